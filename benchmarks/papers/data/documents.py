"""Datasets and jobs of recipes as the documents that users write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.trials.trial import Trial
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job

PAIR = {"user": {"type": "id"}, "item": {"type": "id"}}
RANDOM = {"split": {"kind": "random", "validation": 0.1, "test": 0.1}}
LAST_ITEMS = {"split": {"kind": "per_user_last"}}
NEGATIVES = {"negatives": {"per_positive": 1, "of": "item", "distribution": "uniform", "seed": 7}}
"""One uniform negative for each positive, drawn once."""
TRUST = {"trust": {"uri": "epinions_trust.parquet", "source": "src", "target": "dst", "of": "user"}}


def dataset(
    name: str, uri: Path, label: dict[str, Any], features: dict[str, Any] | None = None, **more: Any
) -> DatasetSpec:
    """Return a dataset of the two ids unless ``features`` says otherwise."""
    return parse_dataset({"name": name, "uri": str(uri), "features": features or PAIR, "label": label, **more}, name)


def job(name: str, of: DatasetSpec, **fields: Any) -> JobSpec:
    """Return a job, checked against its dataset; the name becomes one that a job may have.

    A field of None is left out.
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:62]
    asked = {field: value for field, value in fields.items() if value is not None}
    document = {"spec_version": 1, "name": words, "dataset": {"name": of.name}, **asked}
    return parse_job(document, words).against(of)


def trial(
    table: str, column: str, row: str, of: DatasetSpec, *, tried: str = "", measured_by: str = "", name: str = "",
    **fields: Any,
) -> Trial:  # fmt: skip
    """Return the trial that trains the job of ``fields`` on a dataset."""
    return Trial(table, column, row, of, job(name or f"{table} {row} {tried}", of, **fields), tried, measured_by)


def tower(dim: int, hidden: Sequence[int], init: dict[str, Any], kind: str = "dnn") -> dict[str, Any]:
    """Return the fields of four epochs of a CTR model whose dense part Adam trains."""
    return {
        "model": {"kind": kind, "embedding_dim": dim, "hidden": list(hidden), "init": init},
        "dense_optimizer": {"kind": "adam", "learning_rate": 0.001},
        "epochs": 4,
    }


def amazon_sports(data: Path) -> DatasetSpec:
    """Return Amazon Sports with negatives: user, item, last attribute, the mean of the last five items."""
    attribute = {"uri": "amazon_sports_attrs.parquet", "on": "item", "column": "attrs", "take": "last"}
    previous = {"previous": "item", "by": "user", "order": "pos", "length": 5, "min_length": 1}
    features = {
        **PAIR,
        "attribute": {"type": "id", "join": attribute},
        "history": {"type": "id_list", "derive": previous, "shares": "item", "pooling": "mean"},
    }
    return dataset("amazon_sports", data / "amazon_sports.parquet", NEGATIVES, features, order="pos")


def epinions(data: Path, label: dict[str, Any]) -> DatasetSpec:
    """Return Epinions with the users' graph of trust."""
    return dataset("epinions", data / "epinions.parquet", label, {**PAIR, "category": {"type": "id"}}, graphs=TRUST)


def ml1m(data: Path, label: dict[str, Any], name: str = "ml1m", **more: Any) -> DatasetSpec:
    """Return MovieLens-1M."""
    return dataset(name, data / "ml1m.parquet", label, **more)


def click_log(data: Path) -> DatasetSpec:
    """Return the synthetic click log (trainer.data.sources.click_log), as ``write_click_log`` wrote it."""
    features = {**PAIR, "query": {"type": "id"}, "context": {"type": "id"}}
    return dataset("clicklog", data / "clicklog", {"column": "click"}, features, timestamp="timestamp")
