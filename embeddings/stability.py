"""Old name of :mod:`embeddings.refresh.gate_metrics`, for one release."""

import warnings

from embeddings.refresh.gate_metrics import compare

__all__ = ["compare"]

warnings.warn("embeddings.stability is now embeddings.refresh.gate_metrics", DeprecationWarning, stacklevel=2)
