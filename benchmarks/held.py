"""What becomes of daily refreshes once the gate holds one: locked out, recovered, or a fault that is served.

    python -m benchmarks.held [--worlds NAME ...] [--policies NAME ...] [--days 10] [--repeats 3]

400 users take 10,000 items a day of 800 and those that are new; BPR (d = 16) is trained on days 0 and 1 and refreshed
each day from a warm start, through the whole stage with the gate's starting limits enforced. On day 3 something
happens:

- ``steady``: nothing; ``thin``: day 3 has 6 % of the rows;
- ``outage``: on days 3 and 4 six tenths of the items are not shown; ``switch``: from day 3 on, for good;
- ``moved``: from day 3 on all items are of other topics;
- ``shuffled``: day 3 has its ids permuted; ``renumbered``: all days from 3 on have, in the same way.

Policies, of where the refresh after a held one starts and what ends a row of them:

- ``skip``: from what is served, which is the default;
- ``widened``: the same, on all rows since the day of what is served (turned down, docs/adr/0086);
- ``newest``: from the newest held rows, whatever held them (turned down);
- ``go_on``: ``init_from.held``; each with ``_rule``: also ``publish.gate.promote`` of all metrics that it may name,
  settled, from the third in a row on. ``skip_any``: the rule without ``settled``.

One JSON line per world and policy, over the repeats: ``held``, days held of those from day 3 on, mean and sample
standard deviation; ``again``: day of the first publication after the first held one, by repeat, null for none;
``faulty``: repeats that served a version trained on permuted rows; ``lost``: share of the rows from day 3 on that no
version served at the end was trained on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.refresh.gate_checks.registry import MOVING
from embeddings.refresh.held_versions import held_in_a_row, sound_version
from embeddings.store import open_store
from trainer.launch.driver import execute
from trainer.launch.light_imports import import_torchrec
from trainer.runs.directory import read_run, write_run
from trainer.spec import JobSpec, parse_dataset, parse_job

Array = npt.NDArray[Any]
NUM_USERS, NUM_ITEMS, NEW_ITEMS, NUM_TOPICS, TASTES = 400, 800, 10, 16, 6
ROWS, CHOICES, HIDDEN = 10_000, 25, 6
EVENT = 3
FIRST_DAY = datetime.date(2026, 1, 1)
WORLDS = ("steady", "thin", "outage", "switch", "moved", "shuffled", "renumbered")
POLICIES = ("skip", "skip_rule", "skip_any", "go_on", "go_on_rule", "widened", "newest", "newest_rule")


# --- days ------------------------------------------------------------------------------------------------------------


class World:
    """Users with tastes, items of topics; a user takes the likeliest of 25 items that popularity picks."""

    def __init__(self, kind: str, seed: int):
        self.kind, self.rng = kind, np.random.default_rng(seed)
        self.users = self.rng.standard_normal((NUM_USERS, TASTES))
        self.topics = self.rng.standard_normal((NUM_TOPICS, TASTES))
        self.places = self._places(NUM_ITEMS)
        self.popularity = self.rng.lognormal(size=NUM_ITEMS)
        self.numbers = np.arange(2 * NUM_ITEMS)

    def day(self, number: int) -> pa.Table:
        """Return the rows of a day; days come one after another."""
        self.places = np.vstack([self.places, self._places(NEW_ITEMS)])
        self.popularity = np.append(self.popularity, self.rng.lognormal(size=NEW_ITEMS))
        if number == EVENT:
            self._event()
        weights = self.popularity.copy()
        if (self.kind == "outage" and number in (EVENT, EVENT + 1)) or (self.kind == "switch" and number >= EVENT):
            weights[: NUM_ITEMS * HIDDEN // 10] *= 0.001
        num_rows = ROWS * 6 // 100 if self.kind == "thin" and number == EVENT else ROWS
        user = self.rng.integers(0, NUM_USERS, num_rows)
        seen = self.rng.choice(len(weights), (num_rows, CHOICES), p=weights / weights.sum())
        liking = np.einsum("nt,nct->nc", self.users[user], self.places[seen]) * 3 / np.sqrt(TASTES)
        item = seen[np.arange(num_rows), (liking + self.rng.gumbel(size=seen.shape)).argmax(axis=1)]
        if self.is_faulty(number):
            item = self.numbers[item]
        clicks, dates = np.ones(num_rows, np.int64), [date_of(number)] * num_rows
        return pa.table({"user": user, "item": item, "click": clicks, "date": dates})

    def is_faulty(self, number: int) -> bool:
        """Return whether the ids of a day are permuted."""
        return (self.kind == "shuffled" and number == EVENT) or (self.kind == "renumbered" and number >= EVENT)

    def _event(self) -> None:
        if self.kind == "moved":
            self.places = self._places(len(self.places))
        if self.kind in ("shuffled", "renumbered"):
            known = len(self.places)
            self.numbers[:known] = self.rng.permutation(known)

    def _places(self, num_items: int) -> Array:
        topics = self.topics[self.rng.integers(0, NUM_TOPICS, num_items)]
        return np.asarray(topics + 0.4 * self.rng.standard_normal((num_items, TASTES)))


# --- refreshes -------------------------------------------------------------------------------------------------------


@dataclass
class Chain:
    """Refreshes of one collection under one policy, and the days that each run's rows were trained on."""

    folder: Path
    policy: str
    days_of: dict[str, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store_url = str(self.folder / "store")
        self.collection = open_store(self.store_url).collection("items")

    def refresh(self, day: int, start_ranks: Callable[..., None]) -> bool:
        """Run the job of a day; return whether it was published."""
        current, name = self.collection.current(), f"day-{day}"
        start, start_version = self._start()
        num_days = 2 if current is None else 1
        if self.policy == "widened" and current is not None:
            num_days = day - max(self.served_days())
        directory = write_run(
            self.folder / name, run_id=name, job=self._job(day, num_days, start),
            dataset=parse_dataset(dataset_document(self.folder / "rows")),
            store_url=self.store_url, parent_version=current, start_version=start_version,
            init_checkpoint=None if start is None else str(self.folder / start / "checkpoints"),
        )  # fmt: skip
        with open(self.folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            if execute(read_run(directory), start_ranks):
                raise SystemExit(f"{name} failed: see {self.folder / 'log.txt'}")
        earlier = set() if start is None else self.days_of[start]
        self.days_of[name] = earlier | set(range(day - num_days + 1, day + 1))
        return self.collection.current() != current

    def served_days(self) -> set[int]:
        """Return the days whose rows the served version was trained on."""
        return self.days_of[self.collection.manifest()["job"]]

    def _start(self) -> tuple[str | None, str | None]:
        """Return the run that the next one starts from, and its version if that was held."""
        if self.collection.current() is None:
            return None, None
        held = None
        if self.policy.startswith("go_on"):
            held = sound_version(self.collection)
        elif self.policy.startswith("newest"):
            held = next(iter(held_in_a_row(self.collection)[::-1]), None)
        return (self.collection.manifest()["job"], None) if held is None else (held["job"], held["version"])

    def _job(self, day: int, num_days: int, start: str | None) -> JobSpec:
        rule = {"only": MOVING, "settled": self.policy.endswith("_rule")}
        document = job_document(rule if self.policy.endswith(("_rule", "_any")) else None)
        document["dataset"]["window"] = {"start": date_of(day), "days": num_days}
        document |= {"seed": day, "epochs": 8} if start is None else {"seed": day, "init_from": {"job": start}}
        return parse_job(document)


def date_of(day: int) -> str:
    """Return the date of a day, YYYY-MM-DD."""
    return (FIRST_DAY + datetime.timedelta(day)).isoformat()


def job_document(rule: dict[str, Any] | None) -> dict[str, Any]:
    """Return the job of a refresh, with a rule of ``publish.gate.promote``; without window and start."""
    return {
        "name": "held",
        "dataset": {"name": "log"},
        "model": {"kind": "bpr", "embedding_dim": 16, "init": {"kind": "hash", "std": 0.1}},
        "optimizer": {"kind": "adam", "learning_rate": 0.006},
        "sse": {},
        "epochs": 2,
        "batch_size": 256,
        "publish": {"collection": "items", "feature": "item", "gate": {"promote": rule} if rule else {}},
    }


def dataset_document(rows: Path) -> dict[str, Any]:
    """Return the dataset of a folder of days."""
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return {
        "name": "log", "uri": str(rows), "features": features, "label": {"column": "click"}, "partition": "date",
    }  # fmt: skip


def follow(folder: Path, kind: str, policy: str, num_days: int, seed: int) -> dict[str, Any]:
    """Refresh a collection day by day, and return what became of it."""
    from trainer.launch.on_host import start_ranks

    world, chain = World(kind, seed), Chain(folder, policy)
    (folder / "rows").mkdir(parents=True)
    published, faulty = {}, False
    for day in range(num_days):
        pq.write_table(world.day(day), folder / "rows" / f"{day}.parquet")
        if day:
            published[day] = chain.refresh(day, start_ranks)
            faulty |= any(world.is_faulty(one) for one in chain.served_days())
    held = [day for day, done in published.items() if not done and day >= EVENT]
    again = next((day for day, done in published.items() if held and done and day > held[0]), None)
    lost = set(range(EVENT, num_days)) - chain.served_days()
    return {"held": len(held), "again": again, "faulty": faulty, "lost": len(lost) / (num_days - EVENT)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="*", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    import_torchrec()
    for kind in options.worlds:
        for policy in options.policies:
            ends = []
            for seed in range(options.repeats):
                with tempfile.TemporaryDirectory(prefix="evenkeel-held-") as folder:
                    ends.append(follow(Path(folder), kind, policy, options.days, seed))
            held = [end["held"] for end in ends]
            line: dict[str, Any] = {"bench": "held", "world": kind, "policy": policy, "days": options.days}
            line |= {"repeats": len(ends), "held": round(float(np.mean(held)), 2)}
            line |= {"held_std": round(float(np.std(held, ddof=1)), 2) if len(held) > 1 else None}
            line |= {"again": [end["again"] for end in ends], "faulty": sum(end["faulty"] for end in ends)}
            print(json.dumps(line | {"lost": round(float(np.mean([end["lost"] for end in ends])), 2)}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
