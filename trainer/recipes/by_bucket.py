"""A part of ``adamar``: AdamAR on rare rows and AdamW on frequent ones, and proposition 1's decay (Li and Lyu)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.recipes.click_tasks import ClickTask
from trainer.recipes.pages import documents
from trainer.recipes.trials.trial import Claim, Column, Table, Trial
from trainer.spec.optimizer import NUM_BUCKETS

MEAN_OCCURRENCES: dict[str, tuple[float, ...]] = {
    "amazon_sports": (17.6, 34.4, 73.2, 112.0, 274.0),
    "epinions": (2.64, 7.23, 14.9, 56.3, 228.0),
    "ml1m": (53.2, 185.0, 325.0, 519.0, 924.0),
}
"""Training rows in which a row of bucket 1 to 5 occurs, in the mean of all tables; a split has them on every seed."""
RARE_DECAYS = (1.0, 3.0, 10.0)
"""weight_decay of bucket 1 under proposition 1."""
PROPOSITION_1 = "proposition 1"

Method = tuple[str, str, dict[str, Any]]
"""(row, tried, optimizer)."""


def methods(
    decays: Sequence[float], occurrences: Sequence[float] = (), alpha: float | str = "auto"
) -> Iterator[Method]:
    """Yield AdamW on all rows, AdamAR on more and more buckets, AdamAR on all, and proposition 1.

    Proposition 1 is AdamW whose decay is mu / m in each bucket, m the mean ``occurrences`` of its rows in training, if
    they are given. Candidates of one row differ in ``decays``, of AdamW, or in RARE_DECAYS. ``alpha``: of
    AdamAR, searched for in each row unless it is given.
    """
    rate = {"learning_rate": 0.001}
    adaptive = rate | {"kind": "adam_ar", "alpha": alpha}
    for decay in decays:
        yield "AdamW", f"decay {decay:g}", rate | {"kind": "adamw", "weight_decay": decay}
    for last, decay in itertools.product(range(1, NUM_BUCKETS), decays):
        others = {"buckets": [0, *range(last + 1, NUM_BUCKETS + 1)], "kind": "adamw", "weight_decay": decay}
        yield f"AdamAR on 1 to {last}", f"decay {decay:g}", adaptive | {"by_frequency": [others]}
    yield "AdamAR", "", adaptive
    for decay in RARE_DECAYS if occurrences else ():
        rules = [
            {"buckets": [bucket], "kind": "adamw", "weight_decay": decay * occurrences[0] / mean}
            for bucket, mean in enumerate(occurrences, 1)
        ]
        yield PROPOSITION_1, f"decay {decay:g}", rate | {"kind": "adam", "by_frequency": rules}


def trials(
    name: str, task: ClickTask, seeds: int, decays: Sequence[float], dim: int = 16, hidden: Sequence[int] = (128, 64),
    alpha: float | str = "auto",
) -> Iterator[Trial]:  # fmt: skip
    """Yield DNN on a task by each method and seed."""
    cells = itertools.product(range(seeds), methods(decays, MEAN_OCCURRENCES.get(name, ()), alpha))
    for seed, (row, tried, optimizer) in cells:
        yield documents.trial(
            table_name(name), "dnn", row, task.of, tried=tried, name=f"{table_name(name)} {row} {tried}", seed=seed,
            optimizer=optimizer, batch_size=task.batch_size, evaluation=task.evaluation | {"metrics": ["auc"]},
            **documents.tower(dim, hidden, {"kind": "zero"}),
        )  # fmt: skip


def table(name: str) -> Table:
    title = f"{name}, DNN, AdamAR on the rows of some buckets of frequency, 1 the rarest: test AUC after epochs 1/2/3/4"
    return Table(table_name(name), title, (Column("DNN", "dnn", "auc"),), "epochs", "auc")


def claims(name: str) -> Iterator[Claim]:
    for row in ("AdamW", *(f"AdamAR on 1 to {last}" for last in range(1, NUM_BUCKETS)), PROPOSITION_1):
        text = f"{name}: AdamAR on all rows ends above {row}"
        yield Claim(text, table_name(name), "dnn", ("AdamAR", "last"), (row, "last"), 0.0)


def table_name(name: str) -> str:
    return f"{name}_by_bucket"
