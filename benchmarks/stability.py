"""Does the gate let honest refreshes through and hold broken ones? Per model family, each one spec file.

    python -m benchmarks.stability [SPEC ...] [--nulls 5] [--unseen 20] [--retrains 3] [--folder DIR]
        [--set PATH=VALUE]

For each spec (default: every examples/ml1m*.yaml) a model is trained on all rows (day 0) and refreshed by warm starts
of one epoch. Each collection begins with ``nulls`` published refreshes in a row that differ by seed alone, through the
whole stage and its average, which say what is usual (case ``usual``: median, spread and limit of each metric). After
these, under ``enforce``:

- case ``unseen``: refreshes with other seeds, in rows of ten;
- case ``shifted``: nine refreshes, each on its own nine tenths of the rows;
- case ``growing``: day 0 without a tenth of the items, which are there in the refreshes; without refreshes before;
- case ``retrained``: a refresh from scratch in place of a warm start;
- case ``fault``: one line for each of eleven faults (benchmarks/support/faults.py) and three severities, on the fifth
  refresh of a row: what caught it, if anything did, and what would have by the starting limits alone.

A canary, a movie's first genre, is registered in every collection. With ``--folder`` a run that was interrupted goes on
where it was. benchmarks.stability_tables makes tables of the lines, of any number of runs. Exit code 1 if more than one
unseen refresh in 20 is held, or growth is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.support.faults import Fault, faults_of_rows
from benchmarks.support.item_tables import ItemTables
from embeddings.refresh import probe
from embeddings.refresh.gate import Limits, decide
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import Gate, Settings, publish_candidate
from embeddings.refresh.usual import usual_metrics
from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import ItemVectors
from trainer.launch.in_process import read_spec
from trainer.recipes.rff.recipe import first_genres

ROW_LENGTH = 10
FAULTY_DAY = 5
HALF_TRAINED = (1 / 6, 1 / 3, 2 / 3)
Line = dict[str, Any]


class Family:
    """One spec: its runs, and the collections that they are published to."""

    def __init__(self, spec: Path, changes: Sequence[str], folder: Path, store: Path):
        dataset, job = read_spec(spec, changes)
        self.name = job.model.kind
        self.tables = ItemTables(dataset, job, folder / self.name)
        self.store: Store = open_store(store / self.name)
        genres = first_genres(Path(dataset.uri).with_name("ml1m_movies.parquet"))
        self.genres = list(genres), list(genres.values())

    def day0(self) -> ItemVectors:
        return self.tables.table("day0", self.tables.job.seed)

    def refreshes(self, row: str, seed: int, number: int, start: str = "day0", shifted: bool = False) -> Iterator[str]:
        """Yield names of warm refreshes, each started from the one before, trained when they are asked for."""
        before = start
        for day in range(1, number + 1):
            name = f"{row}-{day}"
            rows = self.tables.rows_but_a_tenth(seed + day) if shifted else None
            self.tables.table(name, seed + day, init=before, rows=rows, epochs=1)
            yield name
            before = name

    def open(self, name: str, first: ItemVectors, nulls: Sequence[ItemVectors] = ()) -> Collection:
        """Return a fresh collection that served ``first``, with the canary, and then published all of ``nulls``."""
        target = self.store.collection(name)
        if not target.exists():
            self.publish(name, first, "off")
            probe.register(target, "genre", *self.genres)
            for items in nulls:
                self.publish(name, items, "report")
        return target

    def publish(self, collection: str, items: ItemVectors, mode: str, **options: Any) -> Publication:
        target = self.store.collection(collection)
        settings = Settings(align=options.pop("align", True), gate=Gate(mode))  # type: ignore[arg-type]
        parent = options.pop("parent", None) or target.current()
        return publish_candidate(
            self.store, collection, items, settings, parent_version=parent, model=self.name, keep_last=None, **options
        )


def study(family: Family, others: Family | None, num_nulls: int, num_unseen: int, num_retrains: int) -> Iterator[Line]:
    """Yield the lines of one family; ``others``: where another collection's vectors come from."""
    day0 = family.day0()
    nulls = [family.tables.table(name, 0) for name in family.refreshes("null", 1000, num_nulls)]
    yield {"case": "usual", "nulls": num_nulls, "metrics": usual_of(family.open("nulls", day0, nulls), family.name)}

    ends: list[Publication] = []
    for row in range(-(-num_unseen // ROW_LENGTH)):
        length = min(ROW_LENGTH, num_unseen - row * ROW_LENGTH)
        ends += _row(family, f"unseen{row}", 2000 + 100 * row, length, day0, nulls)
    yield {"case": "unseen", **summary(ends)}
    yield growing(family)

    retrains = [family.tables.table(f"retrain-{number}", 4000 + number) for number in range(num_retrains)]
    known = family.open("retrained", day0, nulls).current()
    ends = [
        family.publish("retrained", items, "report", parent=known, job_id=f"retrain-{number}")
        for number, items in enumerate(retrains)
    ]
    yield {"case": "retrained", **summary(ends)}
    yield from faulty(family, others, retrains[0])
    yield {"case": "shifted", **summary(_row(family, "shifted", 3000, 9, day0, nulls, shifted=True))}


def usual_of(target: Collection, model: str) -> dict[str, dict[str, Any]]:
    """Return median, spread, number and limit of each metric of what was published, by name."""
    found = usual_metrics(target, target.current(), model)
    metrics = target.manifest()["metrics"]
    limits = Limits(usual=found)
    return {name: {**usual.as_json(), "limit": limits.of(name, metrics)} for name, usual in found.items()}


def _row(
    family: Family,
    name: str,
    seed: int,
    length: int,
    first: ItemVectors,
    nulls: Sequence[ItemVectors],
    shifted: bool = False,
    start: str = "day0",
) -> list[Publication]:
    family.open(name, first, nulls)
    return [
        family.publish(name, family.tables.table(run, 0), "enforce", job_id=run)
        for run in family.refreshes(name, seed, length, start, shifted)
    ]


def growing(family: Family) -> Line:
    """Return the line of the case with a tenth of the movies unknown on day 0."""
    items = pq.read_table(family.tables.dataset.uri, columns=["item"])["item"].to_numpy()
    distinct = np.unique(items)
    fresh = np.random.default_rng(5).choice(distinct, len(distinct) // 10, replace=False)
    rows = family.tables.rows("without-new", ~np.isin(items, fresh))
    first = family.tables.table("young", family.tables.job.seed, rows=rows)
    ends = _row(family, "growing", 5000, 3, first, [], start="young")
    return {"case": "growing", "items_before": len(first), "items_after": len(distinct), **summary(ends)}


def faulty(family: Family, others: Family | None, retrained: ItemVectors) -> Iterator[Line]:
    """Yield lines of refreshes that are honest but for the fault, judged against the version before them."""
    row = "unseen0"
    target = family.store.collection(row)
    honest = family.tables.table(f"{row}-{FAULTY_DAY}", 0)
    (written,) = [one for one in target.versions() if one["job"] == f"{row}-{FAULTY_DAY}"]
    parent = written["parent"]
    foreign = retrained if others is None else others.day0()

    def line(fault: Fault, severity: float, items: ItemVectors) -> Line:
        name = f"{fault.name} {severity}"
        end = family.publish(row, items, "report", parent=parent, align=fault.align, job_id=name)
        return {
            "case": "fault",
            "fault": fault.name,
            "severity": severity,
            "unit": fault.unit,
            "caught_by": [check["metric"] for check in end.gate if check["verdict"] == "fail"],
            "caught_by_starting_limits": decide(end.metrics).failed,
        }

    for fault in faults_of_rows(foreign):
        for severity in fault.severities:
            rng = np.random.Generator(np.random.Philox(17))
            yield line(fault, severity, fault.make(honest, severity, rng))
    fault = Fault("half-trained model", HALF_TRAINED, "of the training left out", lambda items, *_: items)
    trained = {left_out: max(1, round((1 - left_out) * family.tables.job.epochs)) for left_out in HALF_TRAINED}
    # One training from scratch, looked at on its way: a warm start has the optimizer's state too.
    before: str | None = None
    done = 0
    for epochs in sorted(set(trained.values())):
        family.tables.table(f"half-{epochs}", 6000 + done, init=before, epochs=epochs - done)
        before, done = f"half-{epochs}", epochs
    for left_out, epochs in trained.items():
        yield line(fault, left_out, family.tables.table(f"half-{epochs}", 0))
    # Flipped before the alignment, axes are turned back by it: nothing to hold.
    undone = Fault("signs of axes before alignment (undone by it)", (1, 4, 16), "axes", faults_of_rows(foreign)[8].make)
    for severity in undone.severities:
        yield line(undone, severity, undone.make(honest, severity, np.random.Generator(np.random.Philox(17))))


def summary(ends: Sequence[Publication]) -> Line:
    """Return how many passed, and which metrics held the others."""
    held = [sorted({check["metric"] for check in end.gate if check["verdict"] == "fail"}) for end in ends]
    cosines = [end.metrics["cosine_mean"] for end in ends]
    return {
        "refreshes": len(ends),
        "held": sum(bool(failed) for failed in held),
        "held_by": [failed for failed in held if failed],
        "cosine_mean": [min(cosines), max(cosines)],
        "canary_accuracy": [end.metrics["canary_accuracy[genre]"] for end in ends][-1],
    }


def broken_promises(lines: Sequence[Line]) -> list[str]:
    """Return the conditions that must hold and do not."""
    found = []
    for line in lines:
        where = f"{line['model']}, {line['case']}"
        if line["case"] == "unseen" and line["held"] > max(1, line["refreshes"] // 20):
            found.append(f"{where}: {line['held']} of {line['refreshes']} held")
        if line["case"] == "shifted" and line["held"] > 1:
            found.append(f"{where}: {line['held']} of {line['refreshes']} held")
        if line["case"] == "growing" and line["held"]:
            found.append(f"{where}: {line['held']} of {line['refreshes']} held")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", type=Path, nargs="*", default=sorted(Path("examples").glob("ml1m*.yaml")))
    parser.add_argument("--nulls", type=int, default=5, help="refreshes that say what is usual, at least 5")
    parser.add_argument("--unseen", type=int, default=20)
    parser.add_argument("--retrains", type=int, default=3, help="refreshes from scratch, at least one")
    parser.add_argument("--folder", type=Path, help="where runs are kept, and found again (default: a temporary one)")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="PATH=VALUE")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="evenkeel-stability-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        # A store of its own each time: runs are found again, versions would be in the way.
        families = [Family(spec, options.changes, folder, Path(temporary) / "store") for spec in options.specs]
        lines = []
        for number, family in enumerate(families):
            others = families[number - 1] if len(families) > 1 else None
            for line in study(family, others, options.nulls, options.unseen, options.retrains):
                lines.append({"bench": "stability", "model": family.name, **line})
                print(json.dumps(lines[-1]), flush=True)
    broken = broken_promises(lines)
    print(*(f"FAIL {what}" for what in broken), sep="\n", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
