"""Measure refreshes of items that live for two days: honest ones, faults, and a frozen consumer.

    python -m benchmarks.news_days [--days 14] [--rows 200000] [--seeds 3] [--gates NAME ...] [--folder DIR]

Each seed draws a log of ``evenkeel generate --churn`` and refreshes a collection daily with BPR: a warm start from the
version that is served, on the day's own rows, through the whole run and the refresh stage with its average, gate mode
``enforce``. A refresh that is held leaves what is served alone, and the next day starts from there. Gates:

- ``all_items``: every item counts alike (``evidence.min_count: 0``);
- ``defaults``: items with evidence count.

One JSON line per case:

- ``honest``: how many refreshes were published, and what held the others; under the last gate:
- ``fault``: one line for each of eleven faults and three severities (benchmarks/support/faults.py), made in the refresh
  of FAULTY_DAY: which metrics failed, if any did;
- ``retrain``: that day trained from scratch with another seed in its place;
- ``coverage``: of the clicks of the next day, the share on items that the version has found, or serves at all;
- ``consumer``: logistic regression from the vector to the item's true topic, on items of at least five rows: fitted on
  day 0 and frozen, its accuracy on later days' items that day 0 had (``old``) and had not (``new``), and of one that is
  refitted on half of each day's items; on what was ``served``, and on daily trainings from scratch with seeds of their
  own, ``retrained`` as they are and ``retrained_aligned`` to the first day's;
- ``popularity``: the same consumer asked whether an item's topics will be among the more popular half on the next day
  (AUC by the true shares): frozen on day 0, on the first of the later days and on the last ``LAST_DAYS``; and refitted
  on the day before.

Tables of means over the seeds, with sample standard deviations, end the output. Exit code 1 if fewer than 95 % of the
honest refreshes are published under the last gate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from benchmarks.support.faults import Fault, faults_of_rows
from embeddings.refresh.publish import publish_candidate
from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import CARRIED, FOUND, ItemVectors, find_rows, shared_rows, unit_rows
from trainer.checkpoint.format import latest_valid
from trainer.data.sources.news_log import ITEM_BASE, NewsLog, generate_news
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.publishing.publish import item_vectors
from trainer.recipes.pages.markdown import table_of
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

Array = npt.NDArray[Any]
Line = dict[str, Any]
GATES: dict[str, dict[str, Any]] = {
    "all_items": {"evidence": {"min_count": 0}},
    "defaults": {},
}
FAULTY_DAY = 7
HALF_TRAINED = (1 / 6, 1 / 3, 2 / 3)
MIN_ROWS = 5
LAST_DAYS = 4
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
    """One log, and the trainings on its days."""

    def __init__(self, log: NewsLog, folder: Path):
        self.log, self.folder = log, folder
        self.days = generate_news(log, folder / "log")
        self.topics = log.item_vectors.argmax(axis=1)

    def train(
        self, name: str, day: int, seed: int, start: Path | None = None, parent: str | None = None, **changes: Any
    ) -> Path:
        """Train on a day's rows as a job would, which publishes as ``changes`` say; return the run's directory."""
        own = {"collection": name.replace("/", "-"), "feature": "item", "gate": {"mode": "off"}}
        job = parse_job(JOB | {"name": "news", "seed": seed, "publish": own} | changes)
        dataset = {"name": "news", "uri": str(self.days[day]), "features": FEATURES, "label": {"column": "click"}}
        directory = self.folder / "runs" / name
        write_run(
            directory, run_id=name.replace("/", "-"), job=job, dataset=parse_dataset(dataset),
            store_url=str(self.folder / "store"), parent_version=parent,
            init_checkpoint=None if start is None else str(start / "checkpoints"),
        )  # fmt: skip
        with open(self.folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            code = execute(read_run(directory), start_ranks)
        if code:
            raise SystemExit(f"{name} ended with exit code {code}: see {self.folder / 'log.txt'}")
        return directory

    def refresh(self, gate: str, day: int) -> Path:
        """Refresh the collection of a gate, from the version that it serves, as a schedule would."""
        serves = self.collection(gate).current()
        start = None if serves is None else self.folder / "runs" / gate / f"day-{self.day_of(gate, serves)}"
        publish = {"collection": _name(gate), "feature": "item", **GATES[gate]}
        init = {"collection": _name(gate)}
        seed = 1000 * self.log.seed + day
        return self.train(f"{gate}/day-{day}", day, seed, start, serves, publish=publish, init_from=init)

    def collection(self, gate: str) -> Collection:
        return self.store.collection(_name(gate))

    @property
    def store(self) -> Store:
        return open_store(str(self.folder / "store"))

    def day_of(self, gate: str, version: str) -> int:
        """Return the day that a version was made on."""
        return int(self.collection(gate).manifest(version)["job"].rsplit("-", 1)[1])

    def items(self, directory: Path) -> ItemVectors:
        """Return the rows that a run has trained."""
        run, checkpoint = read_run(directory), latest_valid(directory / "checkpoints")
        assert checkpoint is not None
        return item_vectors(run, checkpoint)

    def topic_of(self, keys: Array) -> Array:
        topics: Array = self.topics[keys - ITEM_BASE]
        return topics


def _name(gate: str) -> str:
    return gate.replace("_", "-")


# --- cases -----------------------------------------------------------------------------------------------------------


def honest(news: News, gate: str) -> Line:
    """Refresh daily under a gate; return how many refreshes were published."""
    started = time.perf_counter()
    for day in range(news.log.num_days):
        news.refresh(gate, day)
    seconds = time.perf_counter() - started
    ends = news.collection(gate).versions()[1:]
    failed = [[check["metric"] for check in end["gate"] if check["verdict"] == "fail"] for end in ends]
    held = [metrics for end, metrics in zip(ends, failed, strict=True) if end["state"] == "held"]
    figures = {
        name: [round(end["metrics"][name], 3) for end in ends if name in end["metrics"]]
        for name in ("cosine_mean", "cosine_mean_all", "newly_carried", "unreplaced", "carried", "anchor_cosine")
    }
    return {"case": "honest", "gate": gate, "refreshes": len(ends), "held": len(held), "held_by": held,
            "seconds": round(seconds, 1), **figures}  # fmt: skip


def faulty(news: News, gate: str) -> Iterator[Line]:
    """Yield lines of refreshes of FAULTY_DAY that are honest but for the fault, judged against the same parent."""
    target, day = news.collection(gate), FAULTY_DAY
    run = read_run(news.folder / "runs" / gate / f"day-{day}")
    good, parent = news.items(run.directory), run.parent_version
    retrained = news.items(news.train("retrain", day, 7000 + news.log.seed))

    def judged(items: ItemVectors, name: str, align: bool = True) -> list[str]:
        publish = run.job.publish
        assert publish is not None
        report = publish.gate.model_copy(update={"mode": "report"})
        end = publish_candidate(
            news.store, _name(gate), items,
            publish.model_copy(update={"gate": report, "align": align}), parent_version=parent, model="bpr",
            job_id=name, keep_last=None,
        )  # fmt: skip
        return [check["metric"] for check in end.gate if check["verdict"] == "fail"]

    def line(fault: Fault, severity: float, items: ItemVectors) -> Line:
        caught = judged(items, f"{fault.name} {severity}", fault.align)
        return {"case": "fault", "fault": fault.name, "severity": severity, "unit": fault.unit, "caught_by": caught}

    assert judged(good, "again") == [], "the honest refresh of this day was held"
    yield {"case": "retrain", "caught_by": judged(retrained, "retrain")}
    for fault in faults_of_rows(retrained):
        for severity in fault.severities:
            yield line(fault, severity, fault.make(good, severity, np.random.Generator(np.random.Philox(17))))
    half = Fault("half-trained model", HALF_TRAINED, "of the training left out", lambda items, *_: items)
    for left_out in HALF_TRAINED:
        epochs = max(1, round((1 - left_out) * JOB["epochs"]))
        yield line(half, left_out, news.items(news.train(f"half-{epochs}", day, 8000 + news.log.seed, epochs=epochs)))
    assert target.current() is not None


def coverage(news: News, gate: str) -> Line:
    """Return, of the clicks of each next day, the share on items found and served."""
    found, served = [], []
    for day, version in _served_by_day(news, gate)[:-1]:
        reader = news.collection(gate).open(version)
        clicked = pq.read_table(news.days[day + 1], columns=["item"])["item"].to_numpy()
        status, _ = reader.lookup(clicked)
        found.append(float((status == FOUND).mean()))
        served.append(float(((status == FOUND) | (status == CARRIED)).mean()))
    return {"case": "coverage", "found": float(np.mean(found)), "served": float(np.mean(served))}


def _served_by_day(news: News, gate: str) -> list[tuple[int, str]]:
    """Return which version was served at the end of each day."""
    by_day, current = [], ""
    versions = [
        one["version"] for one in news.collection(gate).versions() if one["state"] in ("published", "superseded")
    ]
    published = {news.day_of(gate, version): version for version in versions}
    for day in range(news.log.num_days):
        current = published.get(day, current)
        by_day.append((day, current))
    return by_day


def consumers(news: News, gate: str) -> Iterator[Line]:
    """Yield what a consumer frozen on day 0 and one that is refitted are worth, by kind of vectors."""
    served = {}
    for day, version in _served_by_day(news, gate):
        items = news.collection(gate).open(version).items()
        served[day] = _evident(items, items.statuses == FOUND)
    retrained: dict[int, tuple[Array, Array, Array]] = {}
    aligned: dict[int, tuple[Array, Array, Array]] = {}
    for day in range(news.log.num_days):
        items = news.items(news.train(f"scratch-{day}", day, 9000 + 100 * news.log.seed + day))
        retrained[day] = _evident(items, items.evidence)
        rotation = np.eye(items.dim)
        if day:
            old, new = shared_rows(aligned[day - 1][0], retrained[day][0])
            left, _, right = np.linalg.svd(retrained[day][1][new].T @ aligned[day - 1][1][old])
            rotation = left @ right
        aligned[day] = (retrained[day][0], retrained[day][1] @ rotation, retrained[day][2])
    for name, by_day in (("served", served), ("retrained", retrained), ("retrained_aligned", aligned)):
        yield {"case": "consumer", "vectors": name, **_accuracies(news, by_day)}
    yield {"case": "popularity", **_popularity(news, served)}


def _evident(items: ItemVectors, usable: Array) -> tuple[Array, Array, Array]:
    """Return (ids, unit vectors, counts) of the items that have rows enough for a consumer."""
    assert items.counts is not None
    rows = np.flatnonzero(usable & (items.counts >= MIN_ROWS))
    return items.keys[rows], unit_rows(np.asarray(items.vectors)[rows])[0], items.counts[rows]


def _fit(vectors: Array, labels: Array) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LogisticRegression(C=10.0, max_iter=500).fit(vectors, labels)


def _accuracies(news: News, by_day: dict[int, tuple[Array, Array, Array]]) -> dict[str, float]:
    keys, vectors, _ = by_day[0]
    rng = np.random.default_rng(0)
    frozen = _fit(vectors, news.topic_of(keys))
    found: dict[str, list[float]] = {"old": [], "new": [], "refitted": []}
    for day in range(1, news.log.num_days):
        later, at, _ = by_day[day]
        labels, old = news.topic_of(later), find_rows(keys, later) >= 0
        right = frozen.predict(at) == labels
        if old.any():
            found["old"].append(float(right[old].mean()))
        found["new"].append(float(right[~old].mean()))
        half = rng.random(len(later)) < 0.5
        found["refitted"].append(float((_fit(at[half], labels[half]).predict(at[~half]) == labels[~half]).mean()))
    last = {f"{name}_last": values[-1] for name, values in found.items()}
    return {name: float(np.mean(values)) for name, values in found.items()} | {"new_day1": found["new"][0]} | last


def _popularity(news: News, by_day: dict[int, tuple[Array, Array, Array]]) -> dict[str, float]:
    def asked(day: int) -> tuple[Array, Array]:
        keys, vectors, _ = by_day[day]
        shares = news.log.item_vectors[keys - ITEM_BASE] @ news.log.topic_shares(day + 1)
        return vectors, shares > np.median(shares)

    frozen, scores = _fit(*asked(0)), {"frozen": [], "refitted": []}  # type: ignore[var-annotated]
    for day in range(1, news.log.num_days - 1):
        vectors, popular = asked(day)
        for name, consumer in (("frozen", frozen), ("refitted", _fit(*asked(day - 1)))):
            scores[name].append(roc_auc_score(popular, consumer.decision_function(vectors)))
    ends = {"day_1": scores["frozen"][0], "last_days": float(np.mean(scores["frozen"][-LAST_DAYS:]))}
    return {name: float(np.mean(values)) for name, values in scores.items()} | ends


def study(news: News, gates: Sequence[str]) -> Iterator[Line]:
    """Yield the lines of one log."""
    for gate in gates:
        yield honest(news, gate)
    yield coverage(news, gates[-1])
    yield from consumers(news, gates[-1])
    yield from faulty(news, gates[-1])


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(lines: Sequence[Line]) -> str:
    """Return Markdown tables of means over the seeds."""

    def of(case: str, **where: Any) -> list[Line]:
        return [one for one in lines if one["case"] == case and all(one[key] == value for key, value in where.items())]

    def mean(rows: Sequence[Line], figure: str) -> str:
        values = [one[figure] for one in rows]
        return f"{np.mean(values):.3f}" + (f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else "")

    parts = []
    rows: list[tuple[str, ...]] = []
    for gate in dict.fromkeys(one["gate"] for one in of("honest")):
        own = of("honest", gate=gate)
        by: dict[str, int] = {}
        for metrics in (metrics for one in own for metrics in one["held_by"]):
            for metric in metrics:
                by[metric] = by.get(metric, 0) + 1
        most = sorted(by, key=lambda metric: -by[metric])[:4]
        total, held = sum(one["refreshes"] for one in own), sum(one["held"] for one in own)
        why = ", ".join(f"`{metric}` {by[metric]}" for metric in most)
        rows.append((f"`{gate}`", f"{total - held} of {total}", f"{(total - held) / total:.1%}", why))
    parts.append(table_of(("gate", "published", "share", "held most by"), rows))
    faults = dict.fromkeys(one["fault"] for one in of("fault"))
    rows = []
    for fault in faults:
        severities = sorted({one["severity"] for one in of("fault", fault=fault)})
        cells = []
        for severity in severities:
            own = of("fault", fault=fault, severity=severity)
            caught = [one for one in own if one["caught_by"]]
            names = sorted({name for one in caught for name in one["caught_by"]})[:2]
            cells.append(f"{severity:g}: {len(caught)} of {len(own)}" + (f" ({', '.join(names)})" if names else ""))
        rows.append((f"{fault} ({of('fault', fault=fault)[0]['unit']})", *cells))
    retrain = of("retrain")
    num_caught = sum(bool(one["caught_by"]) for one in retrain)
    rows.append(("trained from scratch, another seed", f"{num_caught} of {len(retrain)}", "", ""))
    parts.append(table_of(("fault", "small: held", "middle: held", "large: held"), rows))
    parts.append(table_of(("clicks of the next day on items", "share"),
                          [(name, mean(of("coverage"), name)) for name in ("found", "served")]))  # fmt: skip
    figures = ("old", "new", "new_day1", "new_last", "refitted")
    rows = [
        (f"`{kind}`", *(mean(of("consumer", vectors=kind), name) for name in figures))
        for kind in dict.fromkeys(one["vectors"] for one in of("consumer"))
    ]
    parts.append(table_of(("topic, frozen on day 0", "old items", "new items", "new, day 1", "new, last day",
                           "refitted daily"), rows))  # fmt: skip
    rows = [tuple(mean(of("popularity"), name) for name in ("day_1", "frozen", "last_days", "refitted"))]
    header = ("popular tomorrow? frozen, day 1", "frozen, all days", f"frozen, last {LAST_DAYS} days", "refitted daily")
    parts.append(table_of(header, rows))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gates", nargs="*", choices=list(GATES), default=list(GATES))
    parser.add_argument("--folder", type=Path, help="where logs, runs and stores are kept (default: a temporary one)")
    options = parser.parse_args(arguments)
    if options.days <= FAULTY_DAY:
        parser.error(f"--days {options.days}: faults are made in the refresh of day {FAULTY_DAY}, so give more days")
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="evenkeel-news-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for seed in range(options.seeds):
            log = NewsLog(num_rows=options.rows, num_days=options.days, seed=seed)
            for line in study(News(log, folder / str(seed)), options.gates):
                lines.append({"bench": "news_days", "seed": seed, **line})
                print(json.dumps(lines[-1]), flush=True)
    print(f"\n{tables(lines)}")
    last = [one for one in lines if one["case"] == "honest" and one["gate"] == options.gates[-1]]
    held, total = sum(one["held"] for one in last), sum(one["refreshes"] for one in last)
    return 1 if held > 0.05 * total else 0


if __name__ == "__main__":
    from trainer.launch.on_host import leave

    leave(main())
