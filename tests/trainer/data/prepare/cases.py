"""Datasets and jobs of many kinds, and the bytes that a preparation of them writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq

from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.numeric import open_numeric
from trainer.data.errors import DataError
from trainer.data.prepare.drift import PROFILE_FILE, open_profile
from trainer.data.prepare.preparation import BAD_ROWS, prepare
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job


@dataclasses.dataclass(frozen=True)
class Case:
    """A dataset and a job of one of many kinds."""

    format: str = "parquet"
    label: str = "column"
    split: str = "random"
    model: str = "dcnv2"
    joined: bool = True
    history: bool = True
    weighted: bool = True
    bad_rows: bool = False
    warm_start: bool = False
    capacity: bool = False
    strings: bool = True
    vectors: bool = False
    filtered: bool = False
    calendar: bool = False
    num_rows: int = 150
    seed: int = 0

    @property
    def has_lists(self) -> bool:
        return self.format != "csv" and self.model == "dcnv2"


def write_rows(case: Case, folder: Path) -> None:
    """Write ``rows``, two files, and ``attributes.parquet``."""
    rng = np.random.default_rng(case.seed)
    count = case.num_rows
    lengths = rng.integers(0, 4, count)
    items = rng.integers(0, 60, count)
    columns: dict[str, Any] = {
        "user": pa.array(rng.integers(0, 12, count) * 7 - 20, mask=rng.random(count) < 0.04),
        "item": pa.array([f"i{item}" for item in items] if case.strings else items),
        "price": pa.array(rng.lognormal(size=count), mask=rng.random(count) < 0.1),
        "click": rng.integers(0, 2, count),
        "rating": rng.integers(0, 6, count).astype(float),
        "ts": rng.permutation(count),
        "side": [("train", "validation", "test")[side] for side in rng.choice(3, count, p=(0.7, 0.1, 0.2))],
    }
    if case.has_lists:
        columns["tags"] = [rng.integers(0, 30, length).tolist() for length in lengths]
        columns["w"] = [rng.random(length).tolist() for length in lengths]
    if case.has_lists and case.vectors:
        columns["v"] = [rng.random(3).tolist() if there else None for there in rng.random(count) < 0.9]
        columns["title"] = [" ".join(rng.choice(["red", "blue", "shoe", "hat"], 2)) for _ in range(count)]
    if case.bad_rows:
        prices = columns["price"].to_pylist()
        for row in rng.choice(count, 5):
            prices[row] = float("inf")
        columns["price"] = pa.array(prices, pa.float64())
    if case.calendar:
        at = rng.integers(1_600_000_000, 1_700_000_000, count)
        columns["at"] = pa.array(at, pa.timestamp("s", "UTC"), mask=rng.random(count) < 0.05)
    table = pa.table(columns)
    (folder / "rows").mkdir(parents=True)
    for part, rows in (("a", table.slice(0, count // 3)), ("b", table.slice(count // 3))):
        path = folder / "rows" / f"{part}.{case.format}"
        if case.format == "parquet":
            pq.write_table(rows, path, row_group_size=37)
        elif case.format == "csv":
            pyarrow.csv.write_csv(rows, path)
        else:
            pyarrow.feather.write_feather(rows, path)
    known = sorted(set(columns["item"].to_pylist()))[2:]
    colors = {"item": known, "color": [number % 5 for number in range(len(known))]}
    pq.write_table(pa.table(colors), folder / "attributes.parquet")


def specs(case: Case, folder: Path) -> tuple[DatasetSpec, JobSpec]:
    is_pairs = case.model != "dcnv2"
    features: dict[str, Any] = {"user": {"type": "id"}, "item": {"type": "id"}}
    if not is_pairs:
        features["price"] = {"type": "dense", "transform": "quantile"}
        if case.joined:
            join = {"uri": str(folder / "attributes.parquet"), "on": "item", "column": "color"}
            features["color"] = {"type": "id", "join": join}
        if case.history:
            derive = {"previous": "item", "by": "user", "order": "ts", "length": 3, "min_length": 1}
            features["history"] = {"type": "id_list", "derive": derive, "shares": "item"}
        if case.calendar:
            features["hour"] = {"type": "id", "column": "at", "calendar": "hour"}
            features["weekday"] = {"type": "id", "column": "at", "calendar": "weekday"}
        if case.has_lists:
            features["tags"] = {"type": "id_list"} | ({"weights": "w"} if case.weighted else {})
        if case.has_lists and case.vectors:
            features["v"] = {"type": "vector", "dim": 3}
            features["title"] = {"type": "text", "ngrams": {"words": [1, 2], "buckets": 64}}
    label = {
        "column": {"column": "click"},
        "rule": {"rule": "rating >= 3"},
        "value": {"column": "click"} if is_pairs else {"value": "rating"},
        "negatives": {"negatives": {"of": "item", "per_positive": 2}},
    }[case.label]
    dataset: dict[str, Any] = {
        "name": "rows", "uri": str(folder / "rows"), "features": features, "label": label, "order": "ts",
    }  # fmt: skip
    if case.bad_rows:
        dataset["max_bad_rows"] = 0.5
    if case.filtered:
        dataset["filter"] = "rating >= 1 and click <= 1"
    split = {"kind": case.split} | ({"column": "side"} if case.split == "column" else {})
    job: dict[str, Any] = {
        "name": "job",
        "dataset": {"name": "rows"},
        "model": {"kind": case.model, "loss": "bce"}
        | ({"loss": "mse"} if case.label == "value" and not is_pairs else {}),
        "batch_size": 32,
        "evaluation": {"split": split},
    }
    if case.capacity and not is_pairs:
        job["tables"] = {"item": {"capacity": 20}}
    return parse_dataset(dataset), parse_job(job)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def base_of(data: PreparedData, directory: Path) -> dict[str, Any]:
    """Return what a warm start from prepared data hands on."""
    return {
        "base_vocabulary": {table: data.id_map(table) for table in data.tables},
        "base_numeric": None if data.numeric_path is None else open_numeric(data.numeric_path),
        "base_profile": open_profile(directory / PROFILE_FILE),
    }


def prepared_bytes(
    case: Case, folder: Path, threads: int = 1, into: Path | None = None, **settings: Any
) -> dict[str, bytes]:
    """Prepare a case whose rows are in ``folder``; return its files, or the error as one."""
    dataset, job = specs(case, folder)
    base: dict[str, Any] = {}
    into = into or folder / str(threads)
    target = into / "data"
    try:
        if case.warm_start:
            earlier = dataset.model_copy(update={"uri": str(folder / "rows" / f"a.{case.format}")})
            base = base_of(prepare(earlier, job, into / "first", threads=threads), into / "first")
        prepare(dataset, job, target, threads=threads, **settings, **base)
    except DataError as error:
        return {"error": str(error).encode()}
    found = contents(target)
    if (into / BAD_ROWS).exists():
        found[BAD_ROWS] = (into / BAD_ROWS).read_bytes()
    return found
