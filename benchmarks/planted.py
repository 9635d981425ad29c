"""Are items that move followed by retrains from scratch that are held near what is served? A small log, in minutes.

    python -m benchmarks.planted [--kinds KIND ...] [--anchor .01] [--new-weight .3] [--repeats 3]

120 users take items of one of six clusters of 20, head and tail of it. From day 1 on four items of the first cluster
are of the second. Each day BPR (d = 8) is trained anew with a seed of its own and goes through the refresh stage with
its average: ``free``, drawn to what is served (``anchor``, publish.anchor), against the frozen context of the day
before (``frozen_context``, of publish, with fresh items), or both. One JSON line per kind, means over the repeats:

- moved: cosine of the four, as served, to the centre of the second cluster, by day;
- at_home: the same of the second cluster's own items, what a moved one can reach;
- others: cosine of all others to what was served the day before, by day.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.item_tables import ItemTables
from embeddings.vectors.item_vectors import unit_rows
from trainer.spec import parse_dataset, parse_job

Array = npt.NDArray[Any]
NUM_CLUSTERS, PER_CLUSTER = 6, 20
MOVED = np.array([0, 5, 12, 19])
ITEMS = np.arange(NUM_CLUSTERS * PER_CLUSTER)
HOMES = ITEMS // PER_CLUSTER
STAY = np.setdiff1d(ITEMS, MOVED)
SECOND = np.setdiff1d(np.flatnonzero(HOMES == 1), MOVED)
JOB: dict[str, Any] = {
    "model": {"kind": "bpr", "embedding_dim": 8, "init": {"kind": "hash", "std": 0.1}},
    "optimizer": {"kind": "adamw", "learning_rate": 0.03, "weight_decay": 0.05},
    "sse": {},
    "epochs": 8,
    "batch_size": 128,
}
PUBLISH: dict[str, Any] = {"collection": "items", "feature": "item", "gate": {"mode": "report"}}
KINDS = ("free", "anchor", "frozen_context", "anchor_frozen_context")


def clustered(path: Path, day: int, repeat: int = 0) -> Path:
    """Write the log of a day: user, item and click, 18 clicks for each user."""
    rng, place = np.random.default_rng(day + 1000 * repeat), HOMES.copy()
    place[MOVED] = 1 if day else 0
    weights = (1.0 + ITEMS % PER_CLUSTER) ** -0.7
    users, items = [], []
    for user in range(120):
        chances = np.where(place == user % NUM_CLUSTERS, weights, 0.02 * weights)
        items += rng.choice(len(ITEMS), 18, replace=False, p=chances / chances.sum()).tolist()
        users += [user] * 18
    pq.write_table(pa.table({"user": users, "item": items, "click": np.ones(len(users), np.int64)}), path)
    return path


def to_second(served: Array, items: Array) -> float:
    """Return the mean cosine of unit rows of ``items`` to the centre of the second cluster's own items."""
    centre = unit_rows(served[SECOND].mean(axis=0, keepdims=True))[0]
    return float((served[items] @ centre.T).mean())


def follow(
    folder: Path, kind: str, strength: float, new_weight: float, num_refreshes: int, repeat: int
) -> tuple[Array, Array, Array]:
    """Return (moved, at_home, others) by day."""
    folder.mkdir(parents=True)
    days = [clustered(folder / f"{day}.parquet", day, repeat) for day in range(num_refreshes + 1)]
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    dataset = {"name": "clicks", "uri": str(days[0]), "features": features, "label": {"column": "click"}}
    publish = PUBLISH | {"ema": {"new_weight": new_weight}}
    job = parse_job(JOB | {"name": "planted", "dataset": {"name": "clicks"}, "publish": publish})
    tables = ItemTables(parse_dataset(dataset), job, folder)
    held: dict[str, Any] = {"anchor": {"strength": strength}} if "anchor" in kind else {}
    held |= {"frozen_context": {"items": "fresh"}} if "frozen_context" in kind else {}
    found, before = [], np.zeros(0)
    for day, rows in enumerate(days):
        init = f"day-{day - 1}" if day and "frozen_context" in held else None
        seed = 100 * repeat + day
        tables.table(f"day-{day}", seed, init=init, rows=rows, chain="served", held=held if day else {})
        served = unit_rows(tables.chain("served").open().lookup(ITEMS)[1])[0]
        if day:
            others = float(np.sum(served[STAY] * before[STAY], axis=1).mean())
            found.append((to_second(served, MOVED), to_second(served, SECOND), others))
        before = served
    moved, at_home, others_by_day = np.array(found).T
    return moved, at_home, others_by_day


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--anchor", type=float, default=0.01, help="strength of publish.anchor")
    parser.add_argument("--new-weight", type=float, default=0.3, help="of the average")
    parser.add_argument("--refreshes", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    for kind in options.kinds:
        with tempfile.TemporaryDirectory(prefix="evenkeel-planted-") as folder:
            repeats = [
                follow(Path(folder) / str(repeat), kind, options.anchor, options.new_weight, options.refreshes, repeat)
                for repeat in range(options.repeats)
            ]
        means = np.mean(repeats, axis=0).round(3).tolist()
        line = {"bench": "planted", "kind": kind, "repeats": options.repeats, "new_weight": options.new_weight}
        line |= {"anchor": options.anchor} if "anchor" in kind else {}
        print(json.dumps(line | dict(zip(("moved", "at_home", "others"), means, strict=True))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
