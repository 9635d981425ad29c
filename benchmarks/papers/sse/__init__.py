"""The Stochastic Shared Embeddings paper's tables: trials, graphs, the baseline by alternating least squares."""
