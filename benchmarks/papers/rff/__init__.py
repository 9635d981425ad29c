"""The random Fourier features paper's tables: item vectors, what reads them, and what the theory says."""
