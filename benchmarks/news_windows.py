"""Measure refreshes on fewer days than the first version was trained on, where items live for two days.

    python -m benchmarks.news_windows [--windows 8:2 ...] [--faults 8:2 ...] [--seeds 3] [--refreshes 5]
        [--stay] [--folder DIR]

``8:2``: a first job on eight days, then daily refreshes on the last two each, as ``examples/clicklog_items.yaml`` and
``examples/daily_refresh.yaml`` do it, with their jobs. The log is one of ``evenkeel generate --churn``, of 14,300
clicks a day; with ``--stay`` the project's own click log, whose items stay. Gate mode ``enforce``.

One JSON line per case:

- ``honest``: how many refreshes were published, what held the others, and what was measured of which items there are;
- ``lost``: the first refresh once more, with a share of the items lost from its rows, or all of its last days, and what
  held it;
- ``fault``: the same with each of ten faults of rows (benchmarks/support/faults.py), for the windows of ``--faults``.

A table ends the output. Exit code 1 if fewer than 95 % of the honest refreshes are published.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.support.faults import faults_of_rows, truncated
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import publish_candidate
from embeddings.store import Store, open_store
from embeddings.vectors.item_vectors import ItemVectors
from trainer.checkpoint.format import latest_valid
from trainer.data.sources.click_log import ClickLog, generate
from trainer.data.sources.news_log import NewsLog, generate_news
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.publishing.publish import item_vectors
from trainer.recipes.pages.markdown import table_of
from trainer.runs.directory import Run, read_run, write_run
from trainer.runs.lineage import lineage_of
from trainer.spec import parse_dataset, parse_job

Line = dict[str, Any]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ROWS_A_DAY = 14_300
LOST = (0.1, 0.5, 0.7)
FIRST_DAY = datetime.date(2026, 1, 1)
COLLECTION = "items"
SHOWN = ("carried", "newly_carried", "newly_carried_rise", "unreplaced", "unreplaced_traffic")


class Flow:
    """A first job and daily refreshes on one log."""

    def __init__(self, days: tuple[int, int], num_refreshes: int, seed: int, stay: bool, folder: Path):
        self.first_days, self.daily_days = days
        self.num_refreshes, self.folder = num_refreshes, folder
        num_days = self.first_days + num_refreshes
        if stay:
            generate(ClickLog(num_rows=ROWS_A_DAY * num_days, num_days=num_days, seed=seed), folder / "log")
        else:
            generate_news(NewsLog(num_rows=ROWS_A_DAY * num_days, num_days=num_days, seed=seed), folder / "log")

    @property
    def store(self) -> Store:
        return open_store(str(self.folder / "store"))

    def run(self, number: int, lack: Sequence[int] = ()) -> Run:
        """Train and publish the first version (0) or a refresh; ``lack``: days of its window whose rows are not there.

        A refresh that lacks rows goes on from the first version, and to a collection of its own.
        """
        example = EXAMPLES / ("daily_refresh.yaml" if number else "clicklog_items.yaml")
        dataset, spec = yaml.safe_load_all(example.read_text("utf-8"))
        last = FIRST_DAY + datetime.timedelta(days=self.first_days - 1 + number)
        window = {"start": str(last), "days": self.daily_days if number else self.first_days}
        document = dataset | {"uri": str(self.folder / "log")}
        own = spec | {"dataset": {"name": dataset["name"], "window": window}}
        parent = self.store.collection(COLLECTION).current() if number else None
        name = f"run-{number}" + ("-lacking" if lack else "")
        if lack:
            gone = {f"date={last - datetime.timedelta(days=days)}" for days in lack}
            shutil.copytree(self.folder / "log", self.folder / "part", ignore=lambda _, names: gone & set(names))
            document["uri"] = str(self.folder / "part")
            own["publish"] = own["publish"] | {"collection": "none", "gate": {"mode": "off"}}
        start = None
        if parent is not None:
            job = "run-0" if lack else self.store.collection(COLLECTION).manifest(parent)["job"]
            start = self.folder / job / "checkpoints"
        directory = self.folder / name
        write_run(
            directory, run_id=name, job=parse_job(own), dataset=parse_dataset(document),
            store_url=str(self.folder / "store"), parent_version=None if lack else parent,
            init_checkpoint=None if start is None else str(start),
        )  # fmt: skip
        with open(self.folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
            code = execute(read_run(directory), start_ranks)
        if code:
            raise SystemExit(f"{name} ended with exit code {code}: see {self.folder / 'log.txt'}")
        return read_run(directory)

    def items(self, run: Run) -> ItemVectors:
        checkpoint = latest_valid(run.checkpoints)
        assert checkpoint is not None
        return item_vectors(run, checkpoint)

    def judged(self, run: Run, items: ItemVectors, parent: str, name: str, align: bool = True) -> Publication:
        """Take rows through the refresh stage as those of ``run`` were, against ``parent``, and publish nothing new."""
        publish = run.job.publish
        assert publish is not None
        gate = publish.gate.model_copy(update={"mode": "report"})
        return publish_candidate(
            self.store, COLLECTION, items, publish.model_copy(update={"gate": gate, "align": align}),
            parent_version=parent, model=run.job.model.kind, job_id=name, keep_last=None, lineage=lineage_of(run),
        )  # fmt: skip


def lose(items: ItemVectors, share: float, seed: int) -> ItemVectors:
    """Return the rows of a run whose data lack a share of its items: their rows are there, and were not trained."""
    rng = np.random.default_rng(seed)
    found = np.flatnonzero(items.evidence)
    gone = rng.choice(found, round(share * len(found)), replace=False)
    assert items.counts is not None
    evidence, counts = items.evidence.copy(), items.counts.copy()
    evidence[gone], counts[gone] = False, 0
    return replace(items, evidence=evidence, counts=counts)


def study(flow: Flow, faults: bool) -> Iterator[Line]:
    """Yield the lines of one flow, with those of ``faults`` or without."""
    flow.run(0)
    collection = flow.store.collection(COLLECTION)
    parent = collection.current()
    assert parent is not None
    first = flow.run(1)
    for number in range(2, flow.num_refreshes + 1):
        flow.run(number)
    ends = collection.versions()[1:]
    failed = [[check["metric"] for check in end["gate"] if check["verdict"] == "fail"] for end in ends]
    held = [metrics for end, metrics in zip(ends, failed, strict=True) if end["state"] == "held"]
    figures = {name: [round(e["metrics"][name], 3) for e in ends if name in e["metrics"]] for name in SHOWN}
    yield {"case": "honest", "refreshes": len(ends), "held": len(held), "held_by": held, **figures}

    items = flow.items(first)
    for share in LOST:
        for how, broken in (
            ("trained", lose(items, share, 17)),
            ("there", truncated(items, share, np.random.Generator(np.random.Philox(17)))),
        ):
            end = flow.judged(first, broken, parent, f"lost {how} {share}")
            yield {"case": "lost", "what": f"{share:g} of the items, not {how}", **_verdict(end)}
    if flow.daily_days > 1:
        run = flow.run(1, lack=range(flow.daily_days // 2))
        end = flow.judged(run, flow.items(run), parent, "lost days")
        yield {"case": "lost", "what": "the last days, half of them", **_verdict(end)}
    if not faults:
        return
    others = replace(items, vectors=np.random.default_rng(5).standard_normal(items.vectors.shape).astype(np.float32))
    for fault in faults_of_rows(others):
        for severity in fault.severities:
            broken = fault.make(items, severity, np.random.Generator(np.random.Philox(17)))
            end = flow.judged(first, broken, parent, f"{fault.name} {severity}", fault.align)
            yield {"case": "fault", "fault": fault.name, "severity": severity, "caught_by": _verdict(end)["caught_by"]}


def _verdict(end: Publication) -> Line:
    caught = [check["metric"] for check in end.gate if check["verdict"] == "fail"]
    return {"caught_by": caught, **{name: round(end.metrics[name], 3) for name in SHOWN if name in end.metrics}}


def tables(lines: Sequence[Line]) -> str:
    """Return Markdown tables over the seeds."""

    def largest(rows: Sequence[Line], name: str) -> str:
        values = [value for one in rows for value in np.atleast_1d(one.get(name, ()))]
        return f"{max(values):.2f}" if values else ""

    rows: list[tuple[str, ...]] = []
    windows = list(dict.fromkeys(one["windows"] for one in lines))
    for window in windows:
        own = [one for one in lines if one["windows"] == window and one["case"] == "honest"]
        total, held = sum(one["refreshes"] for one in own), sum(one["held"] for one in own)
        rows.append((window, f"{total - held} of {total}", *(largest(own, name) for name in SHOWN)))
    parts = [table_of(("days", "published", *(f"largest `{name}`" for name in SHOWN)), rows)]
    whats = list(dict.fromkeys(one["what"] for one in lines if one["case"] == "lost"))
    faults = list(dict.fromkeys((one["fault"], one["severity"]) for one in lines if one["case"] == "fault"))
    rows = []
    for title, case, where in (
        *((what, "lost", {"what": what}) for what in whats),
        *((f"{name}, {severity:g}", "fault", {"fault": name, "severity": severity}) for name, severity in faults),
    ):
        cells = []
        for window in windows:
            own = [one for one in lines if one["windows"] == window and one["case"] == case]
            own = [one for one in own if all(one[key] == value for key, value in where.items())]
            cells.append(f"{sum(bool(one['caught_by']) for one in own)} of {len(own)}" if own else "")
        rows.append((title, *cells))
    parts.append(table_of(("held in the first refresh", *windows), rows))
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", nargs="*", default=["8:2", "8:1", "14:1", "30:7", "30:1", "2:2"])
    parser.add_argument("--faults", nargs="*", default=["8:2"], help="those of --windows that faults are made in")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--refreshes", type=int, default=5)
    parser.add_argument("--stay", action="store_true", help="the project's own click log, whose items stay")
    parser.add_argument("--folder", type=Path, help="where logs, runs and stores are kept (default: a temporary one)")
    options = parser.parse_args(arguments)
    lines: list[Line] = []
    for seed in range(options.seeds):
        for window in options.windows:
            first, _, daily = window.partition(":")
            with tempfile.TemporaryDirectory(prefix="evenkeel-windows-") as temporary:
                folder = (options.folder or Path(temporary)).resolve() / f"{seed}-{first}-{daily}"
                folder.mkdir(parents=True)
                flow = Flow((int(first), int(daily)), options.refreshes, seed, options.stay, folder)
                for line in study(flow, window in options.faults):
                    lines.append({"bench": "news_windows", "windows": window, "seed": seed, **line})
                    print(json.dumps(lines[-1]), flush=True)
    print(f"\n{tables(lines)}")
    honest = [one for one in lines if one["case"] == "honest"]
    held, total = sum(one["held"] for one in honest), sum(one["refreshes"] for one in honest)
    return 1 if held > 0.05 * total else 0


if __name__ == "__main__":
    from trainer.launch.on_host import leave

    leave(main())
