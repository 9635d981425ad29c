"""Figures of today's training rows, held if they differ from those of the days before."""

from __future__ import annotations

import math

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison

ROW_FIGURES = "row_figures"
"""Entry of a run's lineage with the figures of its rows (trainer.data.prepare.row_figures)."""
_LOOK = "look at the rows of the window before you serve vectors of them"


class RowFigures(GateCheck):
    """Figures of the rows that the run was trained on, from its lineage.

    ``log_rows`` and ``log_users``: natural logarithms of the numbers of rows and of users. ``largest_user``: share of
    the rows that the most active user has. ``pairing``: association of users with their items, .5 if the item column
    was shuffled; ``pairing_newest``: the same for the newest rows. ``popularity``: correlation of items' counts between
    the newest rows and the others.
    """

    about = "rows"
    needs_previous = False
    limits = (
        Limit("log_rows", None, f"there are far fewer rows than on the days before: {_LOOK}", spread=0.15),
        Limit("log_users", None, f"there are far fewer users than on the days before: {_LOOK}", spread=0.15),
        Limit("largest_user", None, f"one user has a large share of the rows: {_LOOK}", at_most=True, spread=0.02),
        Limit("pairing", None, f"users and items of the rows belong together less than before: {_LOOK}", spread=0.0015),
        Limit("pairing_newest", None, f"users and items of the newest rows belong together less than before: {_LOOK}",
              spread=0.003),
        Limit("popularity", None, f"other items are popular in the newest rows, as if ids had changed: {_LOOK}",
              spread=0.02),
    )  # fmt: skip

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        figures = {name: float(value) for name, value in comparison.row_figures.items() if value is not None}
        counts = {f"log_{name}": figures.pop(name, 0.0) for name in ("rows", "users")}
        return {**{name: math.log(count) for name, count in counts.items() if count > 0}, **figures}
