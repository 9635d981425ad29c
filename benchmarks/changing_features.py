"""Ten daily refreshes whose features and layers change, and what a frozen consumer of the served vectors sees of it.

    python -m benchmarks.changing_features [--repeats 3]

400 users take 30,000 items a day of 800 and those that are new (benchmarks/support/world.py); a two_tower (d = 16,
softmax over the batch) is trained on two days, and refreshed each day from a warm start at lower learning rates, with
the gate's starting limits enforced. ``steady`` changes nothing. ``changing``: the third refresh reads a
new column, ``taste``; the fifth drops ``device``; the seventh has a wider tower. The consumer is a linear classifier of
an item's topic, fitted once, on half the items of the first version.

One JSON line per case, over the repeats: ``published`` of the refreshes; ``flips``, the mean over days of the share of
items whose predicted topic is another than the day before, ``flips_worst`` that of the worst day, and
``flips_on_changes`` those of the three days, worst repeat; ``accuracy_first`` and ``accuracy_last`` on the other half.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.world import NUM_TOPICS, TASTES, Array, World, date_of
from embeddings.store import open_store
from embeddings.vectors.item_vectors import MISSING
from trainer.launch.driver import execute
from trainer.launch.light_imports import import_torchrec
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

CASES = ("steady", "changing")
ADDS, DROPS, WIDENS = 3, 5, 7
"""The refresh, counted from 1, from which on features or layers are others."""
NUM_REFRESHES, TIMES = 10, 3


class Topics(World):
    """A steady world that remembers the topics of items and has two columns of users: one tells of tastes."""

    def __init__(self, seed: int):
        self.topic_of: Array = np.zeros(0, np.int64)
        super().__init__("steady", seed)
        self.taste = self.users.argmax(axis=1)

    def _places(self, num_items: int) -> Array:
        topics = self.rng.integers(0, NUM_TOPICS, num_items)
        self.topic_of = np.append(self.topic_of, topics)
        return np.asarray(self.topics[topics] + 0.4 * self.rng.standard_normal((num_items, TASTES)))

    def day(self, number: int) -> pa.Table:
        table = pa.concat_tables([super(Topics, self).day(number) for _ in range(TIMES)])
        user = table["user"].to_numpy()
        return table.append_column("taste", [self.taste[user]]).append_column("device", [user % 7])


def specs(case: str, refresh: int, rows: Path, parent: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dataset and the job of a refresh; refresh 0 is the first training."""
    changes = case == "changing"
    names = ["user", "item", *(["device"] if not changes or refresh < DROPS else [])]
    names += ["taste"] if changes and refresh >= ADDS else []
    dataset = {
        "name": "log", "uri": str(rows), "features": {name: {"type": "id"} for name in names},
        "label": {"column": "click"}, "partition": "date",
    }  # fmt: skip
    hidden = [48, 24] if changes and refresh >= WIDENS else [32, 24]
    is_first = parent is None
    rates = (0.003, 0.001) if is_first else (0.002, 0.0007)
    job: dict[str, Any] = {
        "name": "changing", "seed": 1, "batch_size": 256, "epochs": 20 if is_first else 1,
        "dataset": {"name": "log", "window": {"start": date_of(refresh + 1), "days": 2 if is_first else 1}},
        "model": {"kind": "two_tower", "embedding_dim": 16, "hidden": hidden, "loss": "sampled_softmax"},
        "optimizer": {"kind": "adam", "learning_rate": rates[0]}, "dense_optimizer": {"learning_rate": rates[1]},
        "publish": {"collection": "items", "feature": "item"},
    }  # fmt: skip
    if parent is not None:
        job["init_from"] = {"job": parent, **({"dropped": ["device"]} if changes and refresh >= DROPS else {})}
    return dataset, job


def follow(folder: Path, case: str, seed: int) -> dict[str, Any]:
    """Train and refresh; return what was published and what the consumer saw."""
    from trainer.launch.on_host import start_ranks

    world, store_url = Topics(seed), str(folder / "store")
    collection = open_store(store_url).collection("items")
    (folder / "rows").mkdir(parents=True)
    pq.write_table(world.day(0), folder / "rows" / "0.parquet")
    consumer = before = None
    published, flips, accuracies = 0, [], []
    for refresh in range(NUM_REFRESHES + 1):
        pq.write_table(world.day(refresh + 1), folder / "rows" / f"{refresh + 1}.parquet")
        current = collection.current()
        parent = None if current is None else str(collection.manifest()["job"])
        dataset, job = specs(case, refresh, folder / "rows", parent)
        directory = write_run(
            folder / f"refresh-{refresh}", run_id=f"refresh-{refresh}", job=parse_job(job),
            dataset=parse_dataset(dataset), store_url=store_url, parent_version=current,
            init_checkpoint=None if parent is None else str(folder / parent / "checkpoints"),
        )  # fmt: skip
        with open(folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            if execute(read_run(directory), start_ranks):
                raise SystemExit(f"refresh {refresh} failed: see {folder / 'log.txt'}")
        published += refresh > 0 and collection.current() != current
        ids = np.arange(len(world.topic_of))
        status, vectors = collection.open().lookup(ids)
        there, fitted = status != MISSING, ids % 2 == 0
        if consumer is None:
            targets = np.eye(NUM_TOPICS)[world.topic_of]
            consumer = np.linalg.lstsq(vectors[there & fitted], targets[there & fitted], rcond=None)[0]
        predicted = np.where(there, (vectors @ consumer).argmax(axis=1), -1)
        judged = there & ~fitted
        accuracies.append(float((predicted == world.topic_of)[judged].mean()))
        if before is not None:
            both = (predicted[: len(before)] >= 0) & (before >= 0)
            flips.append(float((predicted[: len(before)] != before)[both].mean()))
        before = predicted
    return {"published": published, "flips": flips, "first": accuracies[0], "last": accuracies[-1]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    import_torchrec()
    for case in CASES:
        ends = []
        for seed in range(options.repeats):
            with tempfile.TemporaryDirectory(prefix="evenkeel-changing-") as folder:
                ends.append(follow(Path(folder), case, seed))
        flips = np.array([end["flips"] for end in ends])
        line = {
            "bench": "changing_features", "case": case, "refreshes": NUM_REFRESHES,
            "published": [end["published"] for end in ends],
            "flips": round(float(flips.mean()), 4), "flips_worst": round(float(flips.max()), 4),
            "flips_on_changes": [round(float(flips[:, day - 1].max()), 4) for day in (ADDS, DROPS, WIDENS)],
            "accuracy_first": round(float(np.mean([end["first"] for end in ends])), 3),
            "accuracy_last": round(float(np.mean([end["last"] for end in ends])), 3),
        }  # fmt: skip
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
