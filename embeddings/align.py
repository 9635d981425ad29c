"""Old name of :mod:`embeddings.refresh.procrustes`, for one release."""

import warnings

from embeddings.refresh.procrustes import Rotated, TooFewShared, min_shared, procrustes, rotate

__all__ = ["Rotated", "TooFewShared", "min_shared", "procrustes", "rotate"]

warnings.warn("embeddings.align is now embeddings.refresh.procrustes", DeprecationWarning, stacklevel=2)
