"""SGD of rows."""

from __future__ import annotations

from dataclasses import dataclass

from embeddings.optim.base import RowOptimizer


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """theta <- theta - eta g."""
