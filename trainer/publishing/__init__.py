"""Publication of a run's item vectors through :mod:`embeddings.refresh`, and ways to keep them near served vectors."""
