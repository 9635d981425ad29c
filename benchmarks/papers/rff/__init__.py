"""The random Fourier features paper's tables: item vectors, the models that read them, and the theory."""
