"""SGD of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from embeddings.optim.base import RowOptimizer, TouchedRows


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """theta <- theta - eta g."""

    rule: ClassVar[str] = "sgd"

    def apply_rule(self, rows: TouchedRows) -> None:
        rows.theta = rows.theta - rows.rate * rows.grad
