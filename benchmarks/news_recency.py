"""Recommend news: BPR alone, with recent negatives, with a recency term, beside what was popular of late.

    python -m benchmarks.news_recency [--seeds 1 2 3] [--windows 1 5] [--cutoffs 12] [--folder DIR]

Each seed draws a log of ``evenkeel generate --churn``. For each of the cutoffs, the number of a day, BPR trains on the
days of the window that ends with it, from initial values, and items are ranked for each user of the training, without
what the user had in it:

- ``next_day``: once, at midnight, among the items of the training; to be found is what the user clicks on the next day,
  items that are born then, which nothing here can find, among it;
- ``hourly``: by the same model at the begin of each third hour of the next day, among the items that were clicked until
  then; to be found is what the user clicks in that hour. An item without a row has the user's mean score.

The score is the model's alone, or that and ``log(c + SMOOTHING)``, c the item's recent count by a half-life at the
time of ranking (embeddings.recent_counts). Beside them: the items with most clicks in the last three hours, or in the
last 24. recall@20, a mean over users (hourly: over users and hours), then over the cutoffs.

``consumer``: logistic regression on served vectors (a daily refresh) asked whether an item that is
clicked tomorrow is clicked more than the median of those: from the vector, from ``log(c + SMOOTHING)``, or from both.
AUC on the days after CONSUMER_DAY, frozen on it, and refitted on the day before.

Prints one JSON line per case, and Markdown tables of means over seeds with sample standard deviations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.metrics import roc_auc_score

from benchmarks.support.news import FEATURES, JOB, Array, News, evident, fit
from embeddings import RecentCounts
from embeddings.vectors.item_vectors import FOUND
from trainer.checkpoint.warm_start import id_maps
from trainer.data.sources.news_log import NewsLog
from trainer.inference.predict import Predictor
from trainer.launch.in_process import train
from trainer.recipes.pages.markdown import table_of
from trainer.spec import parse_dataset, parse_job

Line = dict[str, Any]
MODELS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "popularity, power .75": {"negative_distribution": "popularity"},
    "popularity, power 1": {"negative_distribution": "popularity", "negative_power": 1.0},
    "recent": {"negative_distribution": "recent", "negative_window": 3500},
}
"""By the distribution of negatives; 3,500 rows are about six hours of a log."""
HOUR = 3600
HALF_LIVES = (3, 12)
POPULAR_HOURS = (3, 24)
SMOOTHING = 0.1
EVERY_HOURS = 3
K = 20
CONSUMER_DAY = 3
SPLIT = {"split": {"kind": "random", "validation": 0.0, "test": 0.0}}


class Clicks(NamedTuple):
    """Rows in the order of time."""

    users: Array
    items: Array
    times: Array

    @staticmethod
    def of(table: pa.Table) -> Clicks:
        return Clicks(*(table[name].to_numpy() for name in ("user", "item", "timestamp")))

    def before(self, time: int) -> Clicks:
        return Clicks(*(column[self.times < time] for column in self))


class Scores:
    """What a trained BPR gives users for items."""

    def __init__(self, run: Path):
        predictor = Predictor(run)
        ids = {name: one.ids.to_numpy(zero_copy_only=False) for name, one in id_maps(predictor.checkpoint).items()}
        rows = {name: predictor.tables.weight(name).detach().numpy()[2:] for name in ("user", "item")}
        self._users, self._items = rows["user"], rows["item"]
        self._user_of = {one: row for row, one in enumerate(ids["user"].tolist())}
        self._item_of = {one: row for row, one in enumerate(ids["item"].tolist())}

    def of(self, users: Array, items: Array) -> Array:
        """Return scores [users, items]; an item without a row has the mean of the others."""
        rows = np.array([self._item_of.get(item, -1) for item in items.tolist()])
        own = self._items[rows]
        scores: Array = self._users[[self._user_of[user] for user in users.tolist()]] @ own[:, :-1].T + own[:, -1]
        scores[:, rows < 0] = scores[:, rows >= 0].mean(axis=1, keepdims=True)
        return scores


class Asked:
    """What is to be found at one time: for each user what of ``clicked`` the user had not had in the ``trained`` rows.

    Users without a row of training, or with nothing to find, are left out.
    """

    def __init__(self, trained: Clicks, clicked: Clicks, items: Array):
        self.items = items
        pairs = np.unique(np.stack([clicked.users, clicked.items]), axis=1)
        had = np.unique(np.stack([trained.users, trained.items]), axis=1)
        base = int(items.max()) + int(clicked.items.max()) + 1
        own = np.isin(pairs[0], had[0]) & ~np.isin(pairs[0] * base + pairs[1], had[0] * base + had[1])
        users, relevant = pairs[:, own]
        self.users, self._num_relevant = np.unique(users, return_counts=True)
        there = np.isin(relevant, items)
        self._relevant = (np.searchsorted(self.users, users[there]), np.searchsorted(items, relevant[there]))
        mine = np.isin(had[0], self.users)
        self._had = (np.searchsorted(self.users, had[0, mine]), np.searchsorted(items, had[1, mine]))

    def recalls(self, scores: Array) -> list[float]:
        """Return recall@K of each user by scores [users, items]."""
        shown = np.array(scores, dtype=np.float64)
        shown[self._had] = -np.inf
        best = np.argpartition(-shown, K, axis=1)[:, :K]
        is_best = np.zeros(shown.shape, dtype=bool)
        np.put_along_axis(is_best, best, True, axis=1)
        hits = np.bincount(self._relevant[0], is_best[self._relevant], minlength=len(self.users))
        return (hits / self._num_relevant).tolist()


def popular(past: Clicks, items: Array, time: int, hours: int) -> Array:
    """Return how often each item was clicked in the hours before a time."""
    lately = past.items[past.times >= time - hours * HOUR]
    return np.bincount(np.searchsorted(items, lately), minlength=len(items)).astype(np.float64)


def rankings(models: dict[str, Scores], past: Clicks, asked: Asked, time: int) -> Iterator[tuple[str, list[float]]]:
    """Yield the name of each way to rank at a time, and recall of each user."""
    users, items = asked.users, asked.items
    for hours in POPULAR_HOURS:
        counts = popular(past, items, time, hours)
        yield f"popularity of {hours} hours", asked.recalls(np.tile(counts, (len(users), 1)))
    terms: dict[str, Array | float] = {"": 0.0}
    for hours in HALF_LIVES:
        recent = RecentCounts(hours * HOUR)
        recent.add(past.items, past.times)
        terms[f" + term, {hours} h"] = np.log(recent.at(items, time) + SMOOTHING)
    for name, model in models.items():
        scores = model.of(users, items)
        for suffix, term in terms.items():
            yield f"{name}{suffix}", asked.recalls(scores + term)


def trained(news: News, rows: Path, name: str, seed: int) -> Scores:
    """Train BPR with one distribution of negatives on all rows of a file."""
    model = JOB["model"] | MODELS[name]
    job = parse_job(JOB | {"name": "news", "seed": seed, "model": model, "evaluation": SPLIT})
    dataset = parse_dataset(
        {"name": "news", "uri": str(rows), "features": FEATURES, "label": {"positive": "every_row"},
         "timestamp": "timestamp"}
    )  # fmt: skip
    run = news.folder / "ranked" / f"{rows.stem}-{list(MODELS).index(name)}"
    with open(news.folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        code = train(dataset, job, run_dir=run, store=str(news.folder / "ranked-store"))
    if code:
        raise SystemExit(f"the training in {run} failed: see {news.folder / 'log.txt'}")
    return Scores(run)


def ranked(news: News, window: int, cutoff: int) -> Iterator[Line]:
    """Yield recall of each way to rank, after training on the days of a window."""
    tables = [pq.read_table(path, columns=["user", "item", "timestamp"]) for path in news.days[: cutoff + 2]]
    table, today = pa.concat_tables(tables[cutoff - window + 1 : cutoff + 1]), Clicks.of(tables[cutoff + 1])
    rows = news.folder / f"rows-{window}-{cutoff}.parquet"
    pq.write_table(table, rows)
    past, midnight = Clicks.of(table), int(today.times[0]) // (24 * HOUR) * 24 * HOUR
    models = {name: trained(news, rows, name, news.log.seed) for name in MODELS}
    figures: dict[str, dict[str, list[float]]] = {}
    for name, found in rankings(models, past, Asked(past, today, np.unique(past.items)), midnight):
        figures[name] = {"next_day": found, "hourly": []}
    for hour in range(0, 24, EVERY_HOURS):
        time = midnight + hour * HOUR
        until = Clicks(*(np.concatenate(pair) for pair in zip(past, today.before(time), strict=True)))
        mine = (today.times >= time) & (today.times < time + HOUR)
        asked = Asked(past, Clicks(*(column[mine] for column in today)), np.unique(until.items))
        for name, found in rankings(models, until, asked, time):
            figures[name]["hourly"] += found
    for name, one in figures.items():
        means = {protocol: float(np.mean(values)) for protocol, values in one.items()}
        yield {"case": "ranked", "window": window, "cutoff": cutoff, "by": name, **means}


def consumer(news: News) -> Line:
    """Return what a consumer is worth that asks for tomorrow's clicks, frozen and refitted, by what it reads."""
    for day in range(news.log.num_days):
        news.refresh(day)
    clicks = [Clicks.of(pq.read_table(path)) for path in news.days]
    counts = RecentCounts(HALF_LIVES[1] * HOUR)
    asked: list[tuple[dict[str, Array], Array]] = []
    for day, version in news.served_by_day()[:-1]:
        counts.add(clicks[day].items, clicks[day].times)
        served = news.collection.open(version).items()
        keys, vectors, _ = evident(served, served.statuses == FOUND)
        tomorrow = dict(
            zip(*(part.tolist() for part in np.unique(clicks[day + 1].items, return_counts=True)), strict=True)
        )
        clicked = np.array([tomorrow.get(key, 0) for key in keys.tolist()])
        term = np.log(counts.at(keys, int(clicks[day + 1].times[0])) + SMOOTHING)[:, None]
        there = clicked > 0
        inputs = {"vector": vectors, "term": term, "both": np.hstack([vectors, term])}
        label = clicked[there] > np.median(clicked[there])
        asked.append(({name: one[there] for name, one in inputs.items()}, label))
    figures: Line = {"case": "consumer"}
    for name in asked[0][0]:
        frozen = fit(asked[CONSUMER_DAY][0][name], asked[CONSUMER_DAY][1])
        later = range(CONSUMER_DAY + 1, len(asked))
        worth = {"frozen": [], "refitted": []}  # type: ignore[var-annotated]
        for day in later:
            of_day, label = asked[day]
            fitted = {"frozen": frozen, "refitted": fit(asked[day - 1][0][name], asked[day - 1][1])}
            for how, model in fitted.items():
                worth[how].append(roc_auc_score(label, model.decision_function(of_day[name])))
        figures[name] = {how: float(np.mean(values)) for how, values in worth.items()}
        figures[name]["last"] = worth["frozen"][-1]
    return figures


def tables(lines: Sequence[Line]) -> str:
    """Return Markdown tables of means over the seeds."""

    def shown(values: Sequence[float]) -> str:
        return f"{np.mean(values):.3f}" + (f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else "")

    own = [line for line in lines if line["case"] == "ranked"]
    seeds = dict.fromkeys(line["seed"] for line in own)
    columns = [(protocol, window) for window in dict.fromkeys(line["window"] for line in own)
               for protocol in ("next_day", "hourly")]  # fmt: skip
    rows = []
    for name in dict.fromkeys(line["by"] for line in own):
        cells = []
        for protocol, window in columns:
            of = [line for line in own if line["by"] == name and line["window"] == window]
            by_seed = [[line[protocol] for line in of if line["seed"] == seed] for seed in seeds]
            cells.append(shown([float(np.mean(values)) for values in by_seed]))
        rows.append((name, *cells))
    header = ("recall@20", *(f"{window} days, {protocol}" for protocol, window in columns))
    parts = [table_of(header, rows)]
    asked = [line for line in lines if line["case"] == "consumer"]
    if asked:
        how = ("frozen", "last", "refitted")
        rows = [(name, *(shown([line[name][one] for line in asked]) for one in how)) for name in
                ("vector", "term", "both")]  # fmt: skip
        parts.append(
            table_of(("clicked much tomorrow? AUC from", "frozen", "frozen, last day", "refitted daily"), rows)
        )
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--windows", type=int, nargs="*", default=[1, 5], help="days that are trained on")
    parser.add_argument("--cutoffs", type=int, nargs="*", default=[12], help="the last days of training, from 0")
    parser.add_argument("--folder", type=Path, help="where logs, runs and stores are kept (default: a temporary one)")
    options = parser.parse_args(arguments)
    if max(options.cutoffs) > options.days - 2 or min(options.cutoffs) < max(options.windows) - 1:
        parser.error("a cutoff needs the days of the longest window before it, and one after it")
    if options.days < CONSUMER_DAY + 3:
        parser.error(f"--days {options.days}: a consumer is frozen on day {CONSUMER_DAY}, give two more after the next")
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="evenkeel-recency-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for seed in options.seeds:
            log = NewsLog(num_rows=options.rows, num_days=options.days, seed=seed)
            news = News(log, folder / str(seed))
            of_seed: list[Line] = [consumer(news)]
            for window in options.windows:
                for cutoff in options.cutoffs:
                    of_seed += ranked(news, window, cutoff)
            for line in of_seed:
                lines.append({"bench": "news_recency", "seed": seed, **line})
                print(json.dumps(lines[-1]), flush=True)
    print(f"\n{tables(lines)}")
    return 0


if __name__ == "__main__":
    from trainer.launch.on_host import leave

    leave(main())
