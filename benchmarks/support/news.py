"""A log of news, and a collection that is refreshed daily on it."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression

from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import ItemVectors, unit_rows
from trainer.data.sources.news_log import NewsLog, generate_news
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

Array = npt.NDArray[Any]
COLLECTION = "news"
MIN_ROWS = 5
"""Rows of a day from which on an item's vector says enough for a consumer."""
JOB: dict[str, Any] = {
    "dataset": {"name": "news"},
    "model": {"kind": "bpr", "embedding_dim": 16, "init": {"kind": "hash", "std": 0.1}},
    "optimizer": {"kind": "adamw", "learning_rate": 0.005, "weight_decay": 0.2},
    "sse": {},
    "epochs": 10,
    "batch_size": 256,
}
FEATURES = {"user": {"type": "id"}, "item": {"type": "id"}}


class News:
    """One log, and a collection that is refreshed on its days."""

    def __init__(self, log: NewsLog, folder: Path):
        self.log, self.folder = log, folder
        self.days = generate_news(log, folder / "log")

    def refresh(self, day: int) -> Path:
        """Refresh the collection from the version that it serves, as a schedule would; return the run's directory."""
        serves, name = self.collection.current(), f"day-{day}"
        start = None if serves is None else self.folder / "runs" / f"day-{self.day_of(serves)}"
        publish = {"collection": COLLECTION, "feature": "item"}
        own = {"name": "news", "seed": 1000 * self.log.seed + day, "publish": publish}
        dataset = {"name": "news", "uri": str(self.days[day]), "features": FEATURES, "label": {"column": "click"}}
        directory = self.folder / "runs" / name
        write_run(
            directory, run_id=name, job=parse_job(JOB | own | {"init_from": {"collection": COLLECTION}}),
            dataset=parse_dataset(dataset), store_url=str(self.folder / "store"), parent_version=serves,
            init_checkpoint=None if start is None else str(start / "checkpoints"),
        )  # fmt: skip
        with open(self.folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            code = execute(read_run(directory), start_ranks)
        if code:
            raise SystemExit(f"{name} ended with exit code {code}: see {self.folder / 'log.txt'}")
        return directory

    @property
    def collection(self) -> Collection:
        return open_store(str(self.folder / "store")).collection(COLLECTION)

    def day_of(self, version: str) -> int:
        """Return the day that a version was made on."""
        return int(self.collection.manifest(version)["job"].rsplit("-", 1)[1])

    def served_by_day(self) -> list[tuple[int, str]]:
        """Return which version was served at the end of each day."""
        by_day, current = [], ""
        versions = [one["version"] for one in self.collection.versions() if one["state"] in ("published", "superseded")]
        published = {self.day_of(version): version for version in versions}
        for day in range(self.log.num_days):
            current = published.get(day, current)
            by_day.append((day, current))
        return by_day


def evident(items: ItemVectors, usable: Array) -> tuple[Array, Array, Array]:
    """Return (ids, unit vectors, counts) of the items that have rows enough for a consumer."""
    assert items.counts is not None
    rows = np.flatnonzero(usable & (items.counts >= MIN_ROWS))
    return items.keys[rows], unit_rows(np.asarray(items.vectors)[rows])[0], items.counts[rows]


def fit(vectors: Array, labels: Array) -> Any:
    """Return logistic regression fitted to vectors [n, d] and labels [n]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LogisticRegression(C=10.0, max_iter=500).fit(vectors, labels)
