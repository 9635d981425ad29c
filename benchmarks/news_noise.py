"""Measure what honest trainings of news-like days differ by: nulls of several kinds, and rotations by evidence.

    python -m benchmarks.news_noise [--days 6] [--rows 85700] [--seed 0] [--folder DIR]

The log, the job and the stage are those of benchmarks.news_days, with as many users and clicks a day.
One JSON line per case:

- ``days``: warm refreshes, each on the next day's rows;
- ``null``: a refresh of day 0 on ``same`` rows with another seed, on a ``bootstrap`` of them, on its ``half`` that the
  first training had not, all warm; and on the same rows from ``scratch``: two of each. Figures are of evident items;
- ``rotation``: mean cosines by clicks of two trainings from scratch on the same rows, each half of the shared items
  turned by what the other half says: pairs unweighted, weighted n / (n + k), or those of few clicks left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.news_days import News
from embeddings.refresh.publish import publish_candidate
from embeddings.refresh.settings import Gate, Settings
from embeddings.vectors.item_vectors import ItemVectors, shared_rows, unit_rows
from trainer.data.sources.news_log import NewsLog

Array = npt.NDArray[Any]
FIGURES = ("evident", "cosine_mean", "cosine_p5", "cosine_low", "knn_overlap", "kernel_rms")
BUCKETS = ((1, 2), (2, 5), (5, 20), (20, 100), (100, 10**9))
WEIGHTS: dict[str, Callable[[Array], Array]] = {
    "all alike": np.ones_like,
    **{f"n / (n + {k})": lambda n, k=k: n / (n + k) for k in (2, 5, 10, 20)},  # type: ignore[misc]
    **{f"n >= {least}": lambda n, least=least: (n >= least) * 1.0 for least in (5, 20)},  # type: ignore[misc]
}


def measured(news: News, name: str, first: ItemVectors, later: Sequence[ItemVectors]) -> Iterator[dict[str, float]]:
    """Yield what the gate measures of each of ``later``, refreshed one after the other from ``first``."""
    for number, items in enumerate([first, *later]):
        end = publish_candidate(
            news.store, name, items, Settings(gate=Gate("report")),
            parent_version=news.store.collection(name).current(), model="bpr", keep_last=None,
        )  # fmt: skip
        if number:
            yield {figure: round(end.metrics[figure], 3) for figure in FIGURES if figure in end.metrics}


def nulls(news: News) -> Iterator[dict[str, Any]]:
    """Yield the lines of days and nulls."""
    start = [news.train("day-0", 0, 0)]
    for day in range(1, news.log.num_days):
        start.append(news.train(f"day-{day}", day, day, start[-1]))
    chain = [news.items(run) for run in start]
    for figures in measured(news, "days", chain[0], chain[1:]):
        yield {"case": "days", **figures}
    table = pq.read_table(news.days[0])
    generator = np.random.default_rng(0)

    def rows(name: str, picked: Array) -> int:
        """Add a day of some rows of day 0, and return its number."""
        path = news.folder / f"{name}.parquet"
        pq.write_table(table.take(pa.array(np.sort(picked))), path)
        news.days.append(path)
        return len(news.days) - 1

    boots = [rows(f"boot-{n}", generator.integers(0, len(table), len(table))) for n in range(2)]
    order = generator.permutation(len(table))
    halves = [rows("half-0", order[::2]), rows("half-1", order[1::2])]
    for kind, days in (("same", (0, 0)), ("bootstrap", boots)):
        before, trained = start[0], []
        for number, day in enumerate(days):
            before = news.train(f"{kind}-{number}", day, 900 + number, before)
            trained.append(news.items(before))
        for figures in measured(news, kind, chain[0], trained):
            yield {"case": "null", "kind": kind, **figures}
    for number in range(2):
        first = news.train(f"first-{number}", halves[number], 910 + number)
        other = news.train(f"other-{number}", halves[1 - number], 920 + number, first)
        for figures in measured(news, f"half-{number}", news.items(first), [news.items(other)]):
            yield {"case": "null", "kind": "half", **figures}
    scratch = [news.items(news.train(f"scratch-{number}", 0, 930 + number)) for number in range(2)]
    for figures in measured(news, "scratch", chain[0], scratch):
        yield {"case": "null", "kind": "scratch", **figures}
    yield from rotations(*scratch)


def rotations(left: ItemVectors, right: ItemVectors) -> Iterator[dict[str, Any]]:
    """Yield mean cosines by clicks under each way of weighting."""
    old, new = shared_rows(left.keys, right.keys)
    both = left.evidence[old] & right.evidence[new]
    old, new = old[both], new[both]
    assert left.counts is not None
    counts = left.counts[old].astype(np.float64)
    before, after = unit_rows(left.vectors[old])[0], unit_rows(right.vectors[new])[0]
    in_first = np.random.default_rng(0).random(len(old)) < 0.5
    for name, weigh in WEIGHTS.items():
        weights, cosines = weigh(counts), np.empty(len(old))
        for fitted in (in_first, ~in_first):
            basis, _, other = np.linalg.svd((after[fitted] * weights[fitted, None]).T @ before[fitted])
            cosines[~fitted] = np.sum((after[~fitted] @ (basis @ other)) * before[~fitted], axis=1)
        means = {f"{low}+": round(float(cosines[(counts >= low) & (counts < high)].mean()), 3) for low, high in BUCKETS}
        yield {"case": "rotation", "weights": name, **means}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=6)
    parser.add_argument("--rows", type=int, default=85_700)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where log, runs and store are kept (default: a temporary one)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="evenkeel-noise-") as temporary:
        # As many users as of 14 days, who click as often a day.
        log = NewsLog(options.rows, options.days, options.seed, rows_per_user=250.0 * options.days / 14)
        for line in nulls(News(log, (options.folder or Path(temporary)).resolve())):
            print(json.dumps({"bench": "news_noise", **line}), flush=True)
    return 0


if __name__ == "__main__":
    from trainer.launch.on_host import leave

    leave(main())
