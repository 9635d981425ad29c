"""Datasets and jobs of recipes as the documents that users write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job

PAIR = {"user": {"type": "id"}, "item": {"type": "id"}}
RANDOM = {"split": {"kind": "random", "validation": 0.1, "test": 0.1}}
LAST_ITEMS = {"split": {"kind": "per_user_last"}}


def dataset(
    name: str, uri: Path, label: dict[str, Any], features: dict[str, Any] | None = None, **more: Any
) -> DatasetSpec:
    """Return a dataset of the two ids unless ``features`` says otherwise."""
    return parse_dataset({"name": name, "uri": str(uri), "features": features or PAIR, "label": label, **more}, name)


def job(name: str, of: DatasetSpec, **fields: Any) -> JobSpec:
    """Return a job, checked against its dataset; the name becomes one that a job may have."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:62]
    document = {"spec_version": 1, "name": words, "dataset": {"name": of.name}, **fields}
    return parse_job(document, words).against(of)


def amazon_sports(data: Path) -> DatasetSpec:
    """Return Amazon Sports with one uniform negative for each positive, drawn once.

    The features are user, item, last attribute, and the mean of the last five items.
    """
    return dataset(
        "amazon_sports",
        data / "amazon_sports.parquet",
        {"negatives": {"per_positive": 1, "of": "item", "distribution": "uniform", "seed": 7}},
        {
            **PAIR,
            "attribute": {
                "type": "id",
                "join": {"uri": "amazon_sports_attrs.parquet", "on": "item", "column": "attrs", "take": "last"},
            },
            "history": {
                "type": "id_list",
                "derive": {"previous": "item", "by": "user", "order": "pos", "length": 5, "min_length": 1},
                "shares": "item",
                "pooling": "mean",
            },
        },
        order="pos",
    )


def epinions(data: Path, label: dict[str, Any]) -> DatasetSpec:
    return dataset(
        "epinions",
        data / "epinions.parquet",
        label,
        {**PAIR, "category": {"type": "id"}},
        graphs={"trust": {"uri": "epinions_trust.parquet", "source": "src", "target": "dst", "of": "user"}},
    )


def epinions_ratings(data: Path) -> DatasetSpec:
    """Return the ratings of Epinions themselves, with the users' graph of trust."""
    graphs = {"trust": {"uri": "epinions_trust.parquet", "source": "src", "target": "dst", "of": "user"}}
    return dataset("epinions_ratings", data / "epinions.parquet", {"value": "rating"}, graphs=graphs)


def amazon_beauty(data: Path) -> DatasetSpec:
    """Return Amazon Beauty, each row of which is an item that a user had."""
    negatives = {"per_positive": 1, "of": "item", "distribution": "uniform", "seed": 7}
    return dataset("amazon_beauty", data / "amazon_beauty.parquet", {"negatives": negatives}, order="pos")


def click_log(data: Path) -> DatasetSpec:
    """Return the synthetic click log (trainer.data.sources.click_log), as ``write_click_log`` wrote it."""
    features = {**PAIR, "query": {"type": "id"}, "context": {"type": "id"}}
    return dataset("clicklog", data / "clicklog", {"column": "click"}, features, timestamp="timestamp")
