"""Sixteen days of a real news log: clicks on articles that have a vector, and consumers that are fitted only once.

    python -m benchmarks.news_days [--data DIR] [--full] [--seeds 0 1] [--days N] [--a-day 8]

The job and the refresh are those of :mod:`benchmarks.gate`: BPR of 16 columns on the last three days of news_quarter,
in which an article lives for about two days. All ways have the same first version, trained on the first three days;
then

===================  ================================================================================================
daily                a warm refresh at midnight, all else by default
often                the same, but ``--a-day`` times a day, on today's clicks so far and the two days before
often, ungated       the same, gate mode ``report``
warm, not aligned    a warm refresh at midnight with neither alignment, average nor gate
retrained            a training of another seed at midnight, from initial values, with none of these
retrained, aligned   the same, aligned onto the vectors of the day before
===================  ================================================================================================

*Coverage*: share of the next day's clicks whose article has a vector in the version served at that time. A version
is served from the time of its last row on. With ``retrained`` only the articles of the last training are served.

*Consumers*: logistic regression from an article's vector, fitted on half of the articles (by a hash of their ids) and
judged by its AUC on the other half, of articles with at least ``MIN_ROWS`` clicks in training. *Frozen*: fitted on the
first version and never again; *refitted*: on the day's own vectors. Two questions:

- ``audience``: for each context column, is the share of its most frequent value among the article's clicks above the
  median of the articles? Articles of at least ``MIN_CLICKS`` clicks in the whole log; mean over the columns.
- ``popular``: is the article among the tenth that is clicked most on the next day?

Prints one JSON line for each seed and day; Markdown tables end the output.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.gate import COLLECTION, FIRST_EPOCHS, JOB, WINDOW, Fault, Line, Refreshes, Rows, news
from benchmarks.support.harness import parse
from embeddings.store import open_store
from embeddings.vectors.item_vectors import FOUND, ItemVectors
from trainer.report_pages.section import table_of

Array = npt.NDArray[Any]
MIN_ROWS = 5
"""Fewest training clicks of an article for consumers to be fitted or judged on it; ``publish.evidence.min_count``."""
MIN_CLICKS = 20
"""Fewest clicks in the whole log for an article to be used in the questions about audiences."""
MS_PER_DAY = 86_400_000
ALIGNED = JOB["publish"] | {"ema": None, "gate": {"mode": "off"}}
PLAIN = ALIGNED | {"align": False}
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "daily": ({}, False),
    "often": ({}, False),
    "often, ungated": ({"publish": JOB["publish"] | {"gate": {"mode": "report"}}}, False),
    "warm, not aligned": ({"publish": PLAIN}, False),
    "retrained": ({"publish": PLAIN, "epochs": FIRST_EPOCHS}, True),
    "retrained, aligned": ({"publish": ALIGNED, "epochs": FIRST_EPOCHS}, True),
}
"""For each way of training: changes of the job, and True if every training starts from new values with another seed."""
QUESTIONS, KINDS, ENDS = ("audience", "popular"), ("frozen", "refitted"), ("published", "refreshes")
OFTEN = ("often", "often, ungated")
COVERAGES = ("retrained", "daily, a day old", "daily", *OFTEN, "clicked before")


class Log:
    """The clicks of a log, with the answers to the questions.

    ``moment`` of each click is in days from the first midnight on; ``place`` is its article's position in ``ids``.
    """

    def __init__(self, rows: Rows):
        self.day: Array = rows["day"]
        self.moment = rows["time"] / MS_PER_DAY - rows["time"].min() // MS_PER_DAY
        self.rows = rows | {"moment": self.moment}
        self.num_days = int(self.day.max()) + 1
        self.ids, self.place, self.clicks = np.unique(rows["item"], return_inverse=True, return_counts=True)
        self.fitted_on = (self.ids.astype(np.uint64) * np.uint64(2654435761) >> np.uint64(16)) % np.uint64(2) == 0
        self.audience = [self._above_median(rows[name]) for name in sorted(rows) if name.startswith("click_")]
        self.questions: list[int | None] = [*range(len(self.audience)), None]
        born = np.full(len(self.ids), np.inf)
        np.minimum.at(born, self.place, self.moment)
        self.clicked_before = born[self.place] < self.moment

    def _above_median(self, column: Array) -> Array:
        values, counts = np.unique(column, return_counts=True)
        share = np.bincount(self.place, weights=column == values[counts.argmax()]) / self.clicks
        return np.asarray(share > np.median(share[self.clicks >= MIN_CLICKS]))

    def covered(self, ids: Array, begin: float, end: float) -> Array:
        """Return, for each click from ``begin`` to ``end``, True if its article is among ``ids``."""
        return np.isin(self.rows["item"][(self.moment >= begin) & (self.moment < end)], ids)

    def task(self, items: ItemVectors, day: int, question: int | None) -> tuple[Array, Array, Array]:
        """Return vectors, labels and flags of the articles to fit on; ``question``: an audience, or None for popular.

        ``day`` is the last day in the training rows of ``items``.
        """
        place = np.searchsorted(self.ids, items.keys)
        chosen = (np.asarray(items.counts) >= MIN_ROWS) & (items.statuses == FOUND)
        if question is not None:
            chosen &= self.clicks[place] >= MIN_CLICKS
            label = self.audience[question][place]
        else:
            tomorrow = np.bincount(self.place[self.day == day + 1], minlength=len(self.ids))[place]
            label = tomorrow >= max(1, np.quantile(tomorrow[chosen], 0.9))
        return np.asarray(items.vectors)[chosen], label[chosen], self.fitted_on[place[chosen]]


def fit(vectors: Array, label: Array, fitted_on: Array) -> Any:
    """Return a consumer that is fitted on its half of the articles; None if their labels are all the same."""
    if len(np.unique(label[fitted_on])) < 2:
        return None
    consumer = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, C=0.1))
    return consumer.fit(vectors[fitted_on], label[fitted_on])


def auc(consumer: Any, vectors: Array, label: Array, fitted_on: Array) -> float:
    """Return the AUC of a consumer on the articles that it was not fitted on; nan if their labels are all the same."""
    if consumer is None or len(np.unique(label[~fitted_on])) < 2:
        return float("nan")
    return float(roc_auc_score(label[~fitted_on], consumer.predict_proba(vectors[~fitted_on])[:, 1]))


class Often(Refreshes):
    """A collection that is refreshed within the day: ``day`` 3.25 has the clicks before six o'clock of day 3."""

    def window(self, day: float) -> Rows:
        rows = super().window(day)
        known = rows["moment"] < (day if day % 1 else day + 1)
        return {name: column[known] for name, column in rows.items()}


def served(refreshes: Refreshes) -> ItemVectors:
    """Return the items of the served version."""
    collection = open_store(str(refreshes.store)).collection(COLLECTION)
    version = collection.current()
    assert version is not None
    return collection.open(version).items()


def study(log: Log, folder: Path, seed: int, a_day: int, num_days: int | None = None) -> Iterator[Line]:
    """Yield a line for each day after the first version, or for the first ``num_days`` of them, from all ways."""
    ways: dict[str, Refreshes] = {}
    ends: dict[str, list[str]] = {way: [] for way in WAYS}

    def refresh(way: str, day: float) -> None:
        changes, cold = WAYS[way]
        first = day == WINDOW - 1
        job = changes | {"seed": 1000 * (seed + 1) + int(day) if cold and not first else seed}
        end = ways[way].refresh(day, fault=Fault(job=job, cold=cold), first=first)["end"]
        if first and end != "published":
            raise RuntimeError(f"the first version of {way} is {end}; see {ways[way].folder / 'log.txt'}")
        ends[way] += [] if first else [end]

    for way in WAYS:
        (folder / way).mkdir(parents=True)
        ways[way] = (Often if way in OFTEN else Refreshes)(log.rows, folder / way)
        refresh(way, WINDOW - 1)
    yesterday = served(ways["daily"])
    frozen = {question: fit(*log.task(yesterday, WINDOW - 1, question)) for question in log.questions}
    for day in range(WINDOW - 1, log.num_days - 1)[:num_days]:
        if day >= WINDOW:
            for way in WAYS:
                refresh(way, day)
        now = {way: served(refreshes) for way, refreshes in ways.items()}
        begin, end, trained = day + 1, day + 2, now["retrained"]
        coverage = {
            "retrained": log.covered(trained.keys[trained.statuses == FOUND], begin, end),
            "daily, a day old": log.covered(yesterday.keys, begin, end),
            "daily": log.covered(now["daily"].keys, begin, end),
            "clicked before": log.clicked_before[log.day == begin],
        }
        for way in OFTEN:
            parts = [log.covered(now[way].keys, begin, begin + 1 / a_day)]
            for moment in (begin + part / a_day for part in range(1, a_day)):
                refresh(way, moment)
                parts.append(log.covered(served(ways[way]).keys, moment, moment + 1 / a_day))
            coverage[way] = np.concatenate(parts)
        line: Line = {"seed": seed, "day": end}
        line |= {f"coverage, {name}": float(covered.mean()) for name, covered in coverage.items()}
        for way, items in now.items():
            line |= scored(log, items, day, f"{way}, frozen", frozen) | scored(log, items, day, f"{way}, refitted")
            line |= {f"published, {way}": ends[way].count("published"), f"refreshes, {way}": len(ends[way])}
        yield line
        yesterday = now["daily"]


def scored(
    log: Log, items: ItemVectors, day: int, case: str, frozen: Mapping[int | None, Any] | None = None
) -> dict[str, float]:
    """Return the AUC of each question's consumer: the frozen consumers, or others fitted on these vectors."""
    found = {}
    for question in log.questions:
        task = log.task(items, day, question)
        found[question] = auc(fit(*task) if frozen is None else frozen[question], *task)
    popular = found.pop(None)
    return {f"audience, {case}": float(np.mean(list(found.values()))), f"popular, {case}": popular}


def tables(lines: Sequence[Line]) -> str:
    """Return Markdown tables: a row for each day, then for each way; means over seeds ± their sample deviation."""
    seeds, days = sorted({line["seed"] for line in lines}), sorted({line["day"] for line in lines})

    def cell(chosen: Sequence[int], figure: str) -> str:
        own = [line for line in lines if line["day"] in chosen]
        means = [np.nanmean([line[figure] for line in own if line["seed"] == seed]) for seed in seeds]
        spread = f" ± {np.std(means, ddof=1):.3f}" if len(seeds) > 1 and len(chosen) > 1 else ""
        return f"{np.mean(means):.3f}{spread}"

    figures = [f"coverage, {name}" for name in COVERAGES]
    figures += [f"audience, {way}, {kind}" for way in ("daily", "retrained") for kind in KINDS]
    rows = [(str(day), [day]) for day in days] + [(f"{days[1]} to {days[-1]}", days[1:])]
    by_day = [[name, *(cell(chosen, figure) for figure in figures)] for name, chosen in rows]
    header, by_way = ["way", "published"], [[way] for way in WAYS]
    for line in by_way:
        ends = (sum(at[f"{end}, {line[0]}"] for at in lines if at["day"] == days[-1]) for end in ENDS)
        line.append(" of ".join(map(str, ends)))
    for question, kind in itertools.product(QUESTIONS, KINDS):
        header.append(f"{question}, {kind}")
        for line in by_way:
            line.append(cell(days[1:], f"{question}, {line[0]}, {kind}"))
    return table_of(["day", *figures], by_day) + "\n\n" + table_of(header, by_way)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of news_quarter.parquet")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--a-day", type=int, default=8, help="refreshes a day of the way ``often``")
    parser.add_argument("--days", type=int, default=1, help="days of the log that are followed (default: one)")
    options = parse(parser, arguments, seeds=[0, 1], days=None)
    context = pq.read_table(options.data / "news_quarter.parquet")
    columns = {name: context[name].to_numpy() for name in context.column_names if name.startswith("click_")}
    log = Log(news(options.data, options.data) | columns)
    lines: list[Line] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for line in study(log, Path(folder), seed, options.a_day, options.days):
                lines.append(line)
                print(json.dumps({name: round(value, 4) for name, value in line.items()}), flush=True)
    print(tables(lines))


if __name__ == "__main__":
    main()
