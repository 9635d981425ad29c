"""Fault-free ("honest") and faulty refreshes under the default gate: which are published, which are held, and why.

    python -m benchmarks.gate [--full] [--logs news ml1m ...] [--faults NAME ...] [--folder DIR]

Each log is cut into days. A first job trains on the first days, then a job a day refreshes the collection on the last
three days: a warm start from the served version, or from a held version that is sound, the refresh with its average,
gate mode ``enforce``, all else by default. Before a day's honest refresh each fault is made once in that day's rows or
job, on a copy of the store, from the first day on that has ``MIN_REFRESHES`` published refreshes before it.

Logs, from --data (default ``data``): ``news`` (news_quarter, 16 days, an article lives about two), ``ml1m``
(MovieLens-1M in order of time), ``sports`` (amazon_sports in order of each user's items), ``generated`` (evenkeel
generate --churn), ``ratings`` (MovieLens-1M with labels: good ratings and others, and users' gender and age).

One JSON line for each refresh; tables end the output. Exit code 1 if fewer than 95 % of the honest refreshes of a log
are published.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.harness import parse
from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.refresh.usual import MIN_REFRESHES
from embeddings.store import open_store
from trainer.checkpoint.format import latest_valid
from trainer.data.sources.news_log import NewsLog, generate_news
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.publishing.publish import candidate_of, comparison_of, settings_of
from trainer.runs.directory import read_run, write_run
from trainer.runs.lineage import lineage_of
from trainer.runs.parents import served_checkpoints, start_of
from trainer.runs.protocol import EXIT_FILE
from trainer.spec import InitFrom, parse_dataset, parse_job

Array = npt.NDArray[Any]
Rows = dict[str, Array]
Line = dict[str, Any]
COLLECTION = "items"
WINDOW = 3
FIRST_DATE = np.datetime64("2026-01-01")
JOB: dict[str, Any] = {
    "name": "daily",
    "dataset": {"name": "log"},
    "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 16, "init": {"kind": "hash", "std": 0.1}},
    "optimizer": {"kind": "adam", "learning_rate": 0.005, "moments": "dense"},
    "epochs": 2,
    "batch_size": 512,
    "publish": {"collection": COLLECTION, "feature": "item"},
}
FIRST_EPOCHS = 6
ID_FEATURES = ("user", "item")
DATASET: dict[str, Any] = {"name": "log", "label": {"column": "label"}, "timestamp": "time", "partition": "date"}
RATINGS_JOB: dict[str, Any] = JOB | {
    "model": JOB["model"] | {"kind": "deepfm", "hidden": [32]},
    "evaluation": {"slices": ["gender", "age"]},
}


# --- logs ------------------------------------------------------------------------------------------------------------


def news(data: Path, folder: Path) -> Rows:
    """Return the news log, divided into its 16 days."""
    table = pq.read_table(data / "news_quarter.parquet", columns=["user", "item", "ts", "day", "click_region"])
    day = np.unique(np.array(table["day"].to_pylist()), return_inverse=True)[1]
    other = table["click_region"].to_numpy()
    return {name: table[name].to_numpy() for name in ("user", "item")} | {
        "time": table["ts"].to_numpy(), "day": day, "other": other
    }  # fmt: skip


def ml1m(data: Path, folder: Path) -> Rows:
    """Return MovieLens-1M's ratings of at least 4 that have times, in 16 days of equally many rows."""
    rows = _ratings(data)
    return _equal_days({name: column[rows["other"] >= 4] for name, column in rows.items()})


def ratings(data: Path, folder: Path) -> Rows:
    """Return all ratings of MovieLens-1M that have times, in 16 days of equally many rows; label: at least 4."""
    rows, users = _ratings(data), pq.read_table(data / "ml1m_users.parquet", columns=["user", "gender", "age"])
    order = np.argsort(users["user"].to_numpy())
    of_row = order[np.searchsorted(users["user"].to_numpy(), rows["user"], sorter=order)]
    more = {name: np.array(users[name].to_pylist())[of_row] for name in ("gender", "age")}
    return _equal_days(rows | more | {"label": (rows["other"] >= 4).astype(np.int64)})


def _ratings(data: Path) -> Rows:
    table = pq.read_table(data / "ml1m.parquet")
    keep = table["timestamp"].is_valid().to_numpy(zero_copy_only=False)
    columns = {"user": "user", "item": "item", "time": "timestamp", "other": "rating"}
    rows = {name: table[column].to_numpy()[keep] for name, column in columns.items()}
    return rows | {name: rows[name].astype(np.int64) for name in ("time", "other")}


def sports(data: Path, folder: Path) -> Rows:
    """Return the purchases of amazon_sports in 16 days of equally many rows, each user's in order."""
    table = pq.read_table(data / "amazon_sports.parquet")
    user, item, place = (table[name].to_numpy() for name in ("user", "item", "pos"))
    lengths = np.bincount(np.unique(user, return_inverse=True)[1])[np.unique(user, return_inverse=True)[1]]
    time = (1e6 * (place + 0.5) / lengths).astype(np.int64)
    return _equal_days({"user": user, "item": item, "time": time, "other": place.astype(np.int64)})


def generated(data: Path, folder: Path) -> Rows:
    """Return a log of ``evenkeel generate --churn``, 14 days of 15,000 clicks."""
    days = generate_news(NewsLog(num_rows=14 * 15_000, num_days=14, seed=0), folder / "generated")
    tables = [pq.read_table(day, columns=["user", "item"]) for day in days]
    rows = {name: np.concatenate([table[name].to_numpy() for table in tables]) for name in ("user", "item")}
    day = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    return rows | {"time": np.arange(len(day)), "day": day, "other": day.astype(np.int64)}


@dataclass(frozen=True)
class Log:
    """Rows, and the job and its features that read them. ``labelled``: some of the rows are negatives."""

    rows: Callable[[Path, Path], Rows]
    job: Mapping[str, Any] = field(default_factory=lambda: JOB)
    features: tuple[str, ...] = ID_FEATURES
    labelled: bool = False


LOGS: dict[str, Log] = {
    "news": Log(news),
    "ml1m": Log(ml1m),
    "sports": Log(sports),
    "generated": Log(generated),
    "ratings": Log(ratings, RATINGS_JOB, (*ID_FEATURES, "gender", "age"), labelled=True),
}


def _equal_days(rows: Rows, num_days: int = 16) -> Rows:
    order = np.argsort(rows["time"], kind="stable")
    day = np.empty(len(order), dtype=np.int64)
    day[order] = np.arange(len(order)) * num_days // len(order)
    return rows | {"day": day}


# --- faults ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault of a window's rows, of the job that trains on them, or of the vectors' norms.

    ``rows``: (rows, flags of the last day, generator) -> rows; ``job``: fields that change; ``cold``: no warm start;
    ``item``: column read as the item; ``norms``: the share of the items whose norms are 1.5 times as large;
    ``labelled``: True: only for logs with labels, False: only for logs of clicks.
    """

    rows: Callable[[Rows, Array, np.random.Generator], Rows] = lambda rows, last, rng: rows
    job: Mapping[str, Any] = field(default_factory=dict)
    item: str = "item"
    cold: bool = False
    norms: float = 0.0
    labelled: bool | None = None


def shuffled(share: float, last_day: bool = False) -> Callable[[Rows, Array, np.random.Generator], Rows]:
    """Build a fault that shuffles the item column over a share of the rows, or over the last day's."""

    def change(rows: Rows, last: Array, rng: np.random.Generator) -> Rows:
        item = rows["item"].copy()
        chosen = last if last_day else rng.random(len(item)) < share
        item[chosen] = rng.permutation(item[chosen])
        return rows | {"item": item}

    return change


def exchanged(share: float) -> Callable[[Rows, Array, np.random.Generator], Rows]:
    """Build a fault that exchanges the ids of a share of the last day's items."""

    def change(rows: Rows, last: Array, rng: np.random.Generator) -> Rows:
        ids, item = np.unique(rows["item"][last]), rows["item"].copy()
        chosen = rng.permutation(ids)[: max(2, round(share * len(ids)))]
        new = dict(zip(chosen.tolist(), np.roll(chosen, 1).tolist(), strict=True))
        item[last] = [new.get(one, one) for one in item[last].tolist()]
        return rows | {"item": item}

    return change


def flipped(column: str = "", value: Any = None, last_day: bool = False) -> Callable[..., Rows]:
    """Build a fault that flips the labels of a fifth of the rows, or of all rows with a column's value."""

    def change(rows: Rows, last: Array, rng: np.random.Generator) -> Rows:
        chosen = rows[column] == value if column else rng.random(len(last)) < 0.2
        return rows | {"label": np.where(chosen & (last | (not last_day)), 1 - rows["label"], rows["label"])}

    return change


def a_tenth(rows: Rows, last: Array, rng: np.random.Generator) -> Rows:
    """Return a tenth of the rows."""
    chosen = rng.random(len(last)) < 0.1
    return {name: column[chosen] for name, column in rows.items()}


def robot(rows: Rows, last: Array, rng: np.random.Generator) -> Rows:
    """Return the rows and as many rows of one added user, who takes each item as often as it occurs."""
    more = rows | {"user": np.full(len(last), rows["user"].max() + 1), "item": rng.permutation(rows["item"])}
    return {name: np.concatenate([column, more[name]]) for name, column in rows.items()}


def columns_exchanged(rows: Rows, last: Array, rng: np.random.Generator) -> Rows:
    """Return the rows with the user and the item column exchanged."""
    return rows | {"user": rows["item"], "item": rows["user"]}


FAULTS: dict[str, Fault] = {
    "item column shuffled, all rows": Fault(shuffled(1.0)),
    "item column shuffled, the last day": Fault(shuffled(1.0, last_day=True)),
    "item column shuffled, 30 % of the rows": Fault(shuffled(0.3)),
    "ids of 1 % exchanged from today on": Fault(exchanged(0.01)),
    "ids of 5 % exchanged from today on": Fault(exchanged(0.05)),
    "ids of 25 % exchanged from today on": Fault(exchanged(0.25)),
    "a tenth of the rows": Fault(a_tenth),
    "a robot makes half of the rows": Fault(robot),
    "user and item columns exchanged": Fault(columns_exchanged),
    "another column behind the item": Fault(item="other"),
    "learning rate x 30": Fault(job={"optimizer": {"learning_rate": 0.15}}),
    "half the epochs": Fault(job={"epochs": 1}),
    "negatives by popularity": Fault(job={"model": {"negative_distribution": "popularity"}}, labelled=False),
    "norms x 1.5, all items": Fault(norms=1.0),
    "norms x 1.5, a tenth of the items": Fault(norms=0.1),
    "another seed, neither warm nor aligned": Fault(job={"seed": 77, "publish": {"align": False}}, cold=True),
    "labels of a fifth flipped": Fault(flipped(), labelled=True),
    "labels of one gender flipped": Fault(flipped("gender", "F"), labelled=True),
    "labels of one age group flipped": Fault(flipped("age", 45), labelled=True),
    "labels of a fifth flipped, the last day": Fault(flipped(last_day=True), labelled=True),
    "labels of one gender flipped, the last day": Fault(flipped("gender", "F", last_day=True), labelled=True),
}  # fmt: skip


# --- refreshes -------------------------------------------------------------------------------------------------------


class Refreshes:
    """A collection that is refreshed daily from one log."""

    def __init__(self, rows: Rows, folder: Path, log: Log = LOGS["news"]):
        self.log, self.folder = log, folder
        self.rows = {"label": np.ones(len(rows["day"]), np.int64)} | rows
        self.store = folder / "store"
        self.num_days = int(rows["day"].max()) + 1

    def window(self, day: float) -> Rows:
        chosen = (self.rows["day"] <= day) & (self.rows["day"] > day - WINDOW)
        return {name: column[chosen] for name, column in self.rows.items()}

    def refresh(self, day: float, name: str = "honest", fault: Fault | None = None, first: bool = False) -> Line:
        """Run a day's job; with a fault, on a copy of the store. Return its end."""
        fault, rows, store = fault or Fault(), self.window(day), self.store
        if name != "honest":
            store = self.folder / "copy"
            shutil.rmtree(store, ignore_errors=True)
            shutil.copytree(self.store, store)
        rows = fault.rows(rows, rows["day"] == day, np.random.default_rng(int(day)))
        run_id = f"{name}-{day}".replace(" ", "-").replace(",", "").replace("%", "percent").replace(".", "-")
        features: dict[str, Any] = {feature: {"type": "id"} for feature in self.log.features}
        features["item"] = {"type": "id", "column": fault.item}
        dataset = DATASET | {"uri": str(self._write(rows)), "features": features}
        spec = dict(self.log.job) | {"dataset": {"name": "log", "window": {"start": _date(day), "days": WINDOW}}}
        for part, change in fault.job.items():
            spec[part] = spec[part] | change if isinstance(change, dict) else change
        spec |= {"epochs": FIRST_EPOCHS} if first else {}
        start, parent = None, None
        if not first:
            parent = open_store(str(store)).collection(COLLECTION).current()
        if not first and not fault.cold:
            spec |= {"init_from": {"collection": COLLECTION}}
            start = start_of(InitFrom(collection=COLLECTION), COLLECTION, str(store), self.folder / "runs")
        served = None
        if parent is not None:
            begin = None if start is None else str(start.checkpoints)
            served = served_checkpoints(str(store), COLLECTION, parent, self.folder / "runs", begin)
        directory = self.folder / "runs" / run_id
        shutil.rmtree(directory, ignore_errors=True)
        write_run(
            directory, run_id=run_id, job=parse_job(spec), dataset=parse_dataset(dataset),
            store_url=str(store), parent_version=parent,
            init_checkpoint=None if start is None else str(start.checkpoints),
            start_version=None if start is None else start.start_version,
            served_checkpoint=served,
        )  # fmt: skip
        with open(self.folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            code = execute(read_run(directory), start_ranks)
        line: Line = {"case": name, "day": day}
        if code:
            error = json.loads((directory / EXIT_FILE).read_text())["error"]
            return line | {"end": "failed", "by": [error["code"]], "said": error["message"]}
        version = open_store(str(store)).collection(COLLECTION).versions()[-1]
        if name != "honest":
            shutil.rmtree(directory)
        return line | _end_of(version)

    def _write(self, rows: Rows) -> Path:
        folder = self.folder / "rows"
        shutil.rmtree(folder, ignore_errors=True)
        for day in np.unique(rows["day"]):
            own = {name: column[rows["day"] == day] for name, column in rows.items() if name != "day"}
            part = folder / f"date={_date(day)}"
            part.mkdir(parents=True)
            pq.write_table(pa.table(own), part / "part.parquet")
        return folder

    def with_norms(self, day: int, name: str, share: float) -> Line:
        """Publish an honest run's vectors with larger norms, on a copy of the store as it was before that run."""
        run = read_run(self.folder / "runs" / f"honest-{day}")
        checkpoint = latest_valid(run.checkpoints)
        assert checkpoint is not None
        assert run.job.publish is not None
        items = candidate_of(run, checkpoint)
        times = np.where(np.random.default_rng(day).random(len(items)) < share, np.float32(1.5), np.float32(1.0))
        store = open_store(str(self.folder / "before"))
        publish_candidate(
            store,
            COLLECTION,
            RefreshRequest(
                replace(items, norms=items.norms * times),
                settings_of(run.job.publish),
                parent_version=run.parent_version,
                model=run.job.model.kind,
                job_id="norms",
                lineage=lineage_of(run),
                models=comparison_of(run),
            ),
        )
        return {"case": name, "day": day, **_end_of(store.collection(COLLECTION).versions()[-1])}


def _date(day: float) -> str:
    return str(FIRST_DATE + np.timedelta64(int(day), "D"))


def _end_of(version: Mapping[str, Any]) -> Line:
    failed = [check["metric"] for check in version["gate"] if check["verdict"] == "fail"]
    cause = None if version["diagnosis"] is None else version["diagnosis"]["cause"]
    return {"end": version["state"], "by": failed, "cause": cause, "generation": version["anchor_generation"],
            "metrics": {name: round(value, 4) for name, value in version["metrics"].items()}}  # fmt: skip


def study(refreshes: Refreshes, faults: Mapping[str, Fault]) -> Iterator[Line]:
    """Yield the end of every refresh of one log."""
    refreshes.refresh(WINDOW - 1, first=True)
    for number, day in enumerate(range(WINDOW, refreshes.num_days)):
        ready = number >= MIN_REFRESHES
        if ready:
            for name, fault in faults.items():
                if not fault.norms:
                    yield refreshes.refresh(day, name, fault)
            shutil.rmtree(refreshes.folder / "before", ignore_errors=True)
            shutil.copytree(refreshes.store, refreshes.folder / "before")
        yield refreshes.refresh(day)
        if ready:
            for name, fault in faults.items():
                if fault.norms:
                    yield refreshes.with_norms(day, name, fault.norms)


def table(lines: Sequence[Line]) -> str:
    """Return the tables of all logs as Markdown."""
    logs = list(dict.fromkeys(line["log"] for line in lines))
    cases = list(dict.fromkeys(line["case"] for line in lines if line["case"] != "honest"))
    rows = ["| log | honest refreshes published | longest row of held ones | held by |", "|---|---|---|---|"]
    for log in logs:
        own = [line for line in lines if line["log"] == log and line["case"] == "honest"]
        by = Counter(metric for line in own for metric in line["by"] if line["end"] != "published")
        longest, row = 0, 0
        for line in own:
            row = row + 1 if line["end"] == "held" else 0
            longest = max(longest, row)
        published = sum(line["end"] in ("published", "superseded") for line in own)
        held = ", ".join(f"{metric} {times}" for metric, times in by.most_common())
        rows.append(f"| {log} | {published} of {len(own)} | {longest} | {held} |")
    rows += ["", f"| fault | {' | '.join(logs)} | by |", f"|---{'|---' * len(logs)}|---|"]
    for case in cases:
        cells, by = [], Counter()
        for log in logs:
            own = [line for line in lines if line["log"] == log and line["case"] == case]
            stopped = [line for line in own if line["end"] in ("held", "failed")]
            by.update(metric for line in stopped for metric in line["by"])
            cells.append(f"{len(stopped)} of {len(own)}" if own else "")
        rows.append(f"| {case} | {' | '.join(cells)} | {', '.join(metric for metric, _ in by.most_common(3))} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", nargs="+", choices=list(LOGS), default=["news"])
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=[], metavar="NAME")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the real logs")
    parser.add_argument("--folder", type=Path, help="folder to work in (default: a temporary one)")
    options = parse(parser, arguments, logs=list(LOGS), faults=list(FAULTS))
    faults = {name: FAULTS[name] for name in options.faults}
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for log in options.logs:
            own = folder / log
            own.mkdir(parents=True, exist_ok=True)
            kind = LOGS[log]
            own_faults = {name: one for name, one in faults.items() if one.labelled in (None, kind.labelled)}
            for line in study(Refreshes(kind.rows(options.data, own), own, kind), own_faults):
                lines.append({"log": log, **line})
                print(json.dumps(lines[-1]), flush=True)
    print(table(lines))
    honest = [line for line in lines if line["case"] == "honest"]
    shares = [
        np.mean([line["end"] in ("published", "superseded") for line in honest if line["log"] == log])
        for log in options.logs
    ]
    return int(min(shares) < 0.95)


if __name__ == "__main__":
    raise SystemExit(main())
