"""Retrains from scratch: which step of the stage keeps a frozen consumer accurate and its predictions stable.

It also measures which part of a retrain makes them change.

    python -m benchmarks.refresh_steps [SPEC] [--refreshes 9] [--folder DIR]

Takes the runs of benchmarks.refresh (in the same folder they are found again) through the steps of the stage with one
of them changed at a time. One JSON line each:

- case ``apart``: cosines of two trainings after alignment, by what they differ in: ``seed and rows``, ``seed`` alone
  (the same rows), ``rows`` alone (another nine tenths, the same seed and so the same initial rows);
- case ``alignment``: without an average, onto day 0, with the pairs weighted in several ways;
- case ``average``: aligned onto what is served, with weights and resets of the moving average; ``new_weight`` by
  evidence is w c / (c + k) for an item of c training examples.

retained, churn_per_day: as in benchmarks.refresh. resets: share of items that took their new vector whole, on a day.
of_flips_reset: share of the flipped predictions that were of such items.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.refresh import Array, Genres, refreshes, rows_of
from benchmarks.support.item_tables import ItemTables
from embeddings.vectors.item_vectors import ItemVectors, unit_rows
from trainer.launch.in_process import read_spec

ALIGNMENTS: dict[str, Callable[[Array], Array]] = {
    "all alike": np.ones_like,
    "log(1 + count)": np.log1p,
    "sqrt(count)": np.sqrt,
    "30 examples or more": lambda counts: (counts >= 30).astype(np.float64),
}
AVERAGES: dict[str, tuple[float, float, float]] = {
    # new_weight, reset_below_cosine, k
    "weight .3, reset .65": (0.3, 0.65, 0),
    "weight .3, reset .4": (0.3, 0.4, 0),
    "weight .1, reset .65": (0.1, 0.65, 0),
    "weight .1, reset .4": (0.1, 0.4, 0),
    "weight .3 by evidence, k 30, reset .4": (0.3, 0.4, 30),
    "weight .3 by evidence, k 100, reset .4": (0.3, 0.4, 100),
}


@dataclass
class Day:
    """Unit rows [n, d] of the judged items, zero where a day has none, and their training examples [n]."""

    rows: Array
    counts: Array

    @staticmethod
    def of(items: ItemVectors, ids: Array) -> Day:
        known = dict(zip(items.keys[items.evidence].tolist(), np.asarray(items.counts)[items.evidence], strict=True))
        counts = np.array([known.get(one, 0) for one in ids.tolist()], dtype=np.float64)
        return Day(rows_of(items, ids) * (counts > 0)[:, None], counts)


def turned(day: Day, onto: Array, weigh: Callable[[Array], Array] = np.ones_like) -> Array:
    """Return the day's rows in the coordinates of ``onto``: weighted orthogonal Procrustes over the items of both."""
    both = day.rows.any(axis=1) & onto.any(axis=1)
    left, _, right = np.linalg.svd((day.rows[both] * weigh(day.counts[both])[:, None]).T @ onto[both])
    rows: Array = day.rows @ (left @ right)
    return rows


def apart(first: Day, second: Day) -> dict[str, float]:
    both = first.rows.any(axis=1) & second.rows.any(axis=1)
    cosines = np.einsum("nd,nd->n", turned(second, first.rows)[both], first.rows[both])
    return {
        "cosine_mean": float(cosines.mean()),
        "cosine_p5": float(np.percentile(cosines, 5)),
        "cosine_low": float((cosines < 0.65).mean()),
    }


@dataclass
class Aligned:
    """Served as it is aligned onto the rows of one day."""

    onto: Array
    weigh: Callable[[Array], Array]

    def __call__(self, served: Array, day: Day) -> tuple[Array, Array]:
        return turned(day, self.onto, self.weigh), np.zeros(len(served), dtype=np.bool_)


@dataclass
class Averaged:
    """Aligned onto what is served and averaged with it; k > 0: by evidence."""

    new_weight: float
    reset_below_cosine: float
    k: float

    def __call__(self, served: Array, day: Day) -> tuple[Array, Array]:
        new = turned(day, served)
        there = new.any(axis=1)
        reset = there & (np.einsum("nd,nd->n", new, served) < self.reset_below_cosine)
        gain = np.where(there, self.new_weight * day.counts / np.maximum(day.counts + self.k, 1), 0.0)
        gain[reset] = 1.0
        return unit_rows((1 - gain)[:, None] * served + gain[:, None] * new)[0], reset


Step = Callable[[Array, Day], tuple[Array, Array]]


def followed(genres: Genres, days: Sequence[Day], step: Step) -> dict[str, float]:
    """Follow the consumer frozen on the first day through ``step`` (served, day) -> (served, which were reset)."""
    served = days[0].rows
    consumer = genres.fit(served)
    before = genres.predict(consumer, served)
    day0 = genres.accuracy(before)
    accuracies, flips, resets, of_resets = [], [], [], []
    for day in days[1:]:
        served, reset = step(served, day)
        now = genres.predict(consumer, served)
        flipped = now != before
        accuracies.append(genres.accuracy(now))
        flips.append(float(flipped.mean()))
        resets.append(float(reset.mean()))
        of_resets.append(float(reset[genres.held_out][flipped].mean()) if flipped.any() else 0.0)
        before = now
    return {
        "retained": float(np.mean(accuracies)) / day0,
        "churn_per_day": float(np.mean(flips)),
        "resets": float(np.mean(resets)),
        "of_flips_reset": float(np.mean(of_resets)),
    }


def study(tables: ItemTables, movies: Path, num_refreshes: int) -> list[dict[str, Any]]:
    seed = tables.job.seed
    first = tables.table("day0", seed, rows=tables.rows_but_a_tenth(seed))
    genres = Genres(movies, first.keys[first.evidence])
    retrains = refreshes(tables, "retrain", num_refreshes, 1)
    days = [Day.of(items, genres.ids) for items in (first, *retrains)]
    same_rows = tables.table("same-rows-1", seed + 101, rows=tables.rows_but_a_tenth(seed))
    (same_seed,) = refreshes(tables, "same_seed", 1, 1)
    others = {"seed and rows": days[1], "seed": Day.of(same_rows, genres.ids), "rows": Day.of(same_seed, genres.ids)}
    lines: list[dict[str, Any]] = [
        {"case": "apart", "differ in": what, **apart(days[0], other)} for what, other in others.items()
    ]
    for name, weigh in ALIGNMENTS.items():
        lines.append({"case": "alignment", "pairs": name, **followed(genres, days, Aligned(days[0].rows, weigh))})
    for name, how in AVERAGES.items():
        lines.append({"case": "average", "how": name, **followed(genres, days, Averaged(*how))})
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, nargs="?", default=Path("examples/ml1m.yaml"))
    parser.add_argument("--refreshes", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where runs are kept, and found again (default: a temporary one)")
    options = parser.parse_args(arguments)
    dataset, job = read_spec(options.spec, [])
    with tempfile.TemporaryDirectory(prefix="evenkeel-refresh-") as temporary:
        tables = ItemTables(dataset, job, (options.folder or Path(temporary)).resolve() / job.name)
        movies = Path(dataset.uri).with_name("ml1m_movies.parquet")
        for line in study(tables, movies, options.refreshes):
            print(json.dumps({"bench": "refresh_steps", "model": job.model.kind, **line}), flush=True)


if __name__ == "__main__":
    main()
