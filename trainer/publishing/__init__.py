"""A run's item vectors on their way to :mod:`embeddings.refresh`, and what keeps them near those that are served."""
