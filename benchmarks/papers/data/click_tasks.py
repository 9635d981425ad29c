"""The click tasks of one-epoch overfitting: three real data sets and the synthetic click log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.papers.data import documents
from embeddings.durable_files import appearing
from trainer.data.sources.click_log import ClickLog, generate
from trainer.spec import DatasetSpec

LOG = ClickLog(num_rows=600_000, num_days=10, seed=0)
"""About as many rows as epinions has; two in five have a query of their own."""


@dataclass(frozen=True)
class ClickTask:
    """One task.

    ``batch_size``: batch size of its table. ``evaluation``: the split.
    """

    of: DatasetSpec
    batch_size: int
    evaluation: dict[str, Any]


def click_tasks(data: Path, rows: Path) -> dict[str, ClickTask]:
    """Return the tasks, keyed by name. ``rows``: the folder of the synthetic click log."""
    liked = {"rule": "rating >= 4"}
    return {
        "amazon_sports": ClickTask(documents.amazon_sports(data), 512, documents.LAST_ITEMS),
        "epinions": ClickTask(documents.epinions(data, liked), 1024, documents.RANDOM),
        "ml1m": ClickTask(documents.ml1m(data, liked, order="pos"), 1024, documents.RANDOM),
        "clicklog": ClickTask(documents.click_log(rows), 512, documents.RANDOM),
    }


def write_click_log(rows: Path, log: ClickLog = LOG) -> None:
    """Write ``clicklog/`` under ``rows``, unless it exists."""
    if not (rows / "clicklog").exists():
        rows.mkdir(parents=True, exist_ok=True)
        with appearing(rows / "clicklog", durable=False) as temporary:
            generate(log, temporary)
