"""Hard negatives from the last version: a retrain with a share of its drawn negatives near a positive, and one without.

``python -m benchmarks.hard_negatives [--data ../shared/data] [--seeds 2] [--datasets ...] [--methods ...]``.
For each seed a first job trains and publishes; then each method trains the same rows from initial values of another
seed, beside that version. Clicks are ml1m's ratings of at least 4, or amazon_sports' rows; a tenth of the pairs of
user and item is the test split, in which all items are ranked for each user.

Prints one JSON line per training, and a Markdown table of means over seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.cold_start import DATASETS
from trainer.launch.in_process import train
from trainer.launch.on_host import leave
from trainer.recipes.pages.markdown import table_of
from trainer.spec import parse_dataset, parse_job

METRICS = ("recall_20_full", "ndcg_20_full")
MODELS: dict[str, dict[str, Any]] = {
    "two_tower": {
        "kind": "two_tower", "embedding_dim": 32, "hidden": [64], "loss": "sampled_softmax", "normalize": True,
        "temperature": 0.1,
    },
    "bpr": {"kind": "bpr", "embedding_dim": 32},
}  # fmt: skip
HARD: dict[str, dict[str, Any] | None] = {
    "without": None,
    "0.1": {"share": 0.1, "nearest": 100},
    "0.5": {"share": 0.5, "nearest": 100},
    "1.0": {"share": 1.0, "nearest": 100},
    "0.5, skip 20": {"share": 0.5, "nearest": 100, "skip": 20},
}
"""``hard_negatives`` by its name."""
METHODS = tuple(f"{model}: {hard}" for model in MODELS for hard in HARD)


def write_clicks(name: str, data: Path, folder: Path, num_users: int | None, seed: int) -> Path:
    """Write the clicks of a data set, or of so many of its users, as rows of user and item; return their path."""
    loaded = DATASETS[name](data)
    kept = np.unique(loaded.users)
    if num_users is not None:
        kept = np.random.default_rng(seed).permutation(kept)[:num_users]
    own = np.isin(loaded.users, kept)
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"user": loaded.users[own], "item": loaded.items[own]}), path)
    return path


def run(rows: Path, model: dict[str, Any], seed: int, epochs: int, folder: Path, store: Path) -> dict[str, float]:
    """Train and publish; return the metrics of the test split.

    Raises:
        RuntimeError: the run failed.
    """
    dataset = parse_dataset(
        {
            "name": "clicks",
            "uri": str(rows),
            "features": {"user": {"type": "id"}, "item": {"type": "id"}},
            "label": {"negatives": {"per_positive": 1, "of": "item"}},
        }
    )
    job = parse_job(
        {
            "name": "hard-negatives",
            "dataset": {"name": "clicks"},
            "model": model,
            "optimizer": {"kind": "adam", "learning_rate": 0.003},
            "dense_optimizer": {"learning_rate": 0.003},
            "batch_size": 2048,
            "epochs": epochs,
            "seed": seed,
            "evaluation": {
                "split": {"kind": "random", "validation": 0.0, "test": 0.1}, "metrics": ["auc", *METRICS],
            },
            "publish": {"collection": "items", "feature": "item", "ema": None, "gate": {"mode": "off"}},
        }
    ).against(dataset)  # fmt: skip
    if train(dataset, job, run_dir=folder, store=str(store)):
        raise RuntimeError(f"the training in {folder} failed")
    lines = (folder / "events.jsonl").read_text("utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["type"] == "metric" and event["split"] == "test"]
    return {name: float(events[-1][name]) for name in METRICS}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the means over seeds as Markdown."""
    lines = []
    for case, method in dict.fromkeys((one["case"], one["method"]) for one in results):
        own = [one for one in results if (one["case"], one["method"]) == (case, method)]
        lines.append((case, method, *(f"{np.mean([one[name] for one in own]):.4f}" for name in METRICS)))
    return table_of(("data", "method", "recall@20", "NDCG@20"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hard_negatives", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    parser.add_argument("--seeds", type=int, default=2, help="seeds 0 .. N-1")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--users", type=int, help="so many users alone, drawn by the seed (default: all)")
    parser.add_argument("--datasets", default="ml1m", help=f"of {', '.join(DATASETS)}")
    parser.add_argument(
        "--methods", default=";".join(METHODS), help=f"separated by semicolons, of {'; '.join(METHODS)}"
    )
    options = parser.parse_args(arguments)
    names, methods = options.datasets.split(","), options.methods.split(";")
    unknown = [*(set(names) - DATASETS.keys()), *(set(methods) - set(METHODS))]
    if unknown:
        parser.error(f"no such data set or method: {', '.join(unknown)}")
    results = []
    for name in names:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory(prefix="evenkeel-hard-negatives-") as scratch:
                folder = Path(scratch)
                rows = write_clicks(name, options.data, folder, options.users, seed)
                for model in dict.fromkeys(method.partition(": ")[0] for method in methods):
                    first = folder / f"{model}-store"
                    run(rows, MODELS[model], seed, options.epochs, folder / f"{model}-first", first)
                for method in methods:
                    model, _, hard = method.partition(": ")
                    spec = MODELS[model] | ({} if HARD[hard] is None else {"hard_negatives": HARD[hard]})
                    started, store, place = time.perf_counter(), folder / "store", folder / "run"
                    shutil.copytree(folder / f"{model}-store", store)
                    found = run(rows, spec, 100 + seed, options.epochs, place, store)
                    shutil.rmtree(store)
                    shutil.rmtree(place)
                    seconds = round(time.perf_counter() - started, 1)
                    results.append({"case": name, "method": method, "seed": seed, **found, "seconds": seconds})
                    print(json.dumps({"bench": "hard_negatives", **results[-1]}), flush=True)
    print()
    print(table(results))
    return 0


if __name__ == "__main__":
    leave(main())
