"""Do item vectors stay put? A consumer frozen on day 0 reads the vectors of every later refresh.

    python -m benchmarks.refresh [examples/ml1m.yaml] [--refreshes 5] [--folder DIR]

Trains the spec's job once (day 0), refreshes it by warm starts and retrains it from scratch with other seeds. Each day
trains on its own nine tenths of the rows, in its own order. Everything is published through the refresh stage. The
consumer is logistic regression on a movie's first genre, fitted on four fifths of the movies and judged on the rest.
One JSON line per case:

- ``day0``: the consumer on the vectors it was fitted on, beside the majority class and a probe on
  popularity alone (the logarithm of a movie's count; with BPR also its learned item bias);
- ``warm``: warm refreshes, aligned, gated, averaged: what a daily schedule does;
- ``unaligned``, ``aligned``, ``aligned_ema``, ``rff_aligned_ema``: independent retrains.

accuracy: of the frozen consumer, mean over refreshes. retained: accuracy / day-0 accuracy. churn_per_day: share of its
predictions that differ from the day before. freshness: a consumer refitted on the last published vectors / on that
day's raw ones. cosine_mean: aligned, to the day before. published: how many refreshes passed the gate (the ``aligned``
cases are served in any case).

What must hold goes to stderr as PASS or FAIL with its figures; exit code 1 if something does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.one_epoch import Condition
from embeddings.stage import publish_candidate
from embeddings.stage_settings import Gate, MovingAverage, Settings
from embeddings.store import Collection, Store, open_store
from embeddings.vectors import ItemVectors, unit_rows
from trainer.checkpoint import latest_valid
from trainer.data import PreparedData
from trainer.events import read_events
from trainer.publish import item_vectors
from trainer.rundir import Run, read_run
from trainer.spec import DatasetSpec, JobSpec, parse_job
from trainer.train import read_spec, train

Array = npt.NDArray[Any]
WARM = "warm"
CASES = {
    "unaligned": Settings(align=False, ema=None, gate=Gate("off")),
    "aligned": Settings(ema=None, gate=Gate("report")),
    "aligned_ema": Settings(ema=MovingAverage(), gate=Gate("report")),
}


class Genres:
    """Movies with a known first genre, split once into those the consumer is fitted on and those it is judged on."""

    def __init__(self, movies: Path, ids: Array):
        table = pq.read_table(movies, columns=["item", "genres"])
        genre = {
            item: text.partition("|")[0]
            for item, text in zip(table["item"].to_pylist(), table["genres"].to_pylist(), strict=True)
        }
        self.ids = np.array([identifier for identifier in ids.tolist() if identifier in genre])
        self.labels = np.array([genre[identifier] for identifier in self.ids.tolist()])
        self.held_out = np.random.default_rng(0).random(len(self.ids)) < 0.2

    def fit(self, features: Array) -> Any:
        consumer = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000, C=0.1))
        return consumer.fit(features[~self.held_out], self.labels[~self.held_out])

    def predict(self, consumer: Any, features: Array) -> Array:
        predicted: Array = consumer.predict(features[self.held_out])
        return predicted

    def accuracy(self, predicted: Array) -> float:
        return float((predicted == self.labels[self.held_out]).mean())

    def majority(self) -> float:
        values, counts = np.unique(self.labels[~self.held_out], return_counts=True)
        return float((self.labels[self.held_out] == values[counts.argmax()]).mean())


def published_vectors(collection: Collection, ids: Array, version: str, view: str | None = None) -> Array:
    """[len(ids), dim] of a version; an item that is missing is a zero row."""
    _, vectors = collection.open(version).lookup(ids)
    vectors = np.nan_to_num(vectors)
    return collection.view_transform(view, vectors, version) if view is not None else vectors


def publication_of(run: Run) -> dict[str, Any]:
    """What the run's event file says became of its vectors."""
    return [event.fields for event in read_events(run.directory) if event.fields["type"] == "publication"][-1]


def raw_vectors(run: Run) -> ItemVectors:
    checkpoint = latest_valid(run.checkpoints)
    assert checkpoint is not None
    return item_vectors(run, checkpoint)


def item_bias(run: Run, ids: Array) -> dict[Any, float]:
    """The bias that BPR learns beside each item's vector; empty for other models."""
    if run.job.model.kind != "bpr":
        return {}
    checkpoint = latest_valid(run.checkpoints)
    assert checkpoint is not None
    # Rows 0 and 1 are padding and unknown; the bias is the column behind the vector.
    rows, _ = checkpoint.read_rows("item", 2, len(ids))
    vocabulary = PreparedData.open(run.data).vocabulary("item").to_pylist()
    return dict(zip(vocabulary, rows[:, run.job.model.embedding_dim].tolist(), strict=True))


def rows_of(vectors: ItemVectors, ids: Array) -> Array:
    """Unit rows of ``ids``, in that order; zero where there is none."""
    place = {identifier: row for row, identifier in enumerate(np.asarray(vectors.ids).tolist())}
    unit, _ = unit_rows(np.nan_to_num(vectors.vectors))
    return np.stack([unit[place[identifier]] if identifier in place else 0 * unit[0] for identifier in ids.tolist()])


class Study:
    """Runs under one folder, and the feature store they publish to."""

    def __init__(self, dataset: DatasetSpec, job: JobSpec, folder: Path):
        self.dataset, self.job, self.folder = dataset, job, folder
        self.store: Store = open_store(folder / "store")

    def run(self, name: str, seed: int, collection: str, init: Path | None = None, **changes: Any) -> Run:
        directory = self.folder / "runs" / name
        document = self.job.model_dump(mode="json") | {"seed": seed, "name": name} | changes
        document["publish"] = {**document["publish"], "collection": collection}
        dataset = self.dataset.model_copy(update={"uri": str(self.rows_of_day(seed))})
        if not (directory / "exit.json").exists():
            print(f"# {name}: training", file=sys.stderr)
            store = str(self.folder / "store")
            with contextlib.redirect_stdout(sys.stderr):
                code = train(dataset, parse_job(document), run_dir=directory, store=store, init=init)
            if code:
                raise SystemExit(f"{name} ended with exit code {code}: see {directory}")
        return read_run(directory)

    def rows_of_day(self, seed: int) -> Path:
        """The data set without a tenth of its rows, another tenth for each seed."""
        path = self.folder / "rows" / f"{seed}.parquet"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = pq.read_table(self.dataset.uri)
            pq.write_table(rows.filter(np.random.default_rng(seed).random(len(rows)) < 0.9), path)
        return path


def follow(
    genres: Genres, consumer: Any, day0: Array, days: Sequence[Callable[[], tuple[Array, Array, bool]]]
) -> dict[str, float]:
    """The frozen consumer through all days; each day gives (served features, raw vectors, whether it was published)."""
    before = genres.predict(consumer, day0)
    day0_accuracy = genres.accuracy(before)
    accuracies, flips, published, freshness = [], [], 0, 1.0
    for day in days:
        served, raw, was_published = day()
        now = genres.predict(consumer, served)
        accuracies.append(genres.accuracy(now))
        flips.append(float((now != before).mean()))
        published += was_published
        refitted = genres.accuracy(genres.predict(genres.fit(served), served))
        freshness = refitted / genres.accuracy(genres.predict(genres.fit(raw), raw))
        before = now
    accuracy = float(np.mean(accuracies))
    return {
        "accuracy": accuracy,
        "retained": accuracy / day0_accuracy,
        "retained_last": accuracies[-1] / day0_accuracy,
        "churn_per_day": float(np.mean(flips)),
        "freshness": freshness,
        "published": published,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, nargs="?", default=Path("examples/ml1m.yaml"))
    parser.add_argument("--movies", type=Path, help="titles and genres (default: ml1m_movies.parquet beside the rows)")
    parser.add_argument("--refreshes", type=int, default=5)
    parser.add_argument("--refresh-epochs", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where runs are kept, and found again (default: a temporary one)")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="PATH=VALUE")
    options = parser.parse_args(arguments)
    dataset, job = read_spec(options.spec, options.changes)
    movies = options.movies or Path(dataset.uri).with_name("ml1m_movies.parquet")
    with tempfile.TemporaryDirectory(prefix="evenkeel-refresh-") as temporary:
        study = Study(dataset, job, (options.folder or Path(temporary)).resolve())
        lines = evaluate(study, movies, options.refreshes, options.refresh_epochs)
    for line in lines:
        print(json.dumps({"bench": "refresh", "model": job.model.kind, **line}), flush=True)
    found = conditions(lines)
    print(*found, sep="\n", file=sys.stderr, flush=True)
    return 0 if all(condition.holds for condition in found) else 1


def conditions(lines: Sequence[dict[str, Any]]) -> list[Condition]:
    """Vectors carry meaning, warm refreshes keep a frozen consumer working, and without alignment it does not work."""
    case = {line["case"]: line for line in lines}
    found = []

    def add(name: str, value: float, limit: float, above: bool = True) -> None:
        holds = value >= limit if above else value <= limit
        found.append(Condition(name, holds, f"{value:+.3f} ({'at least' if above else 'at most'} {limit:+.3f})"))

    day0, warm = case["day0"], case[WARM]
    add("day 0 above the majority class", day0["accuracy"] - day0["majority_class"], 0.15)
    add("day 0 above a probe on popularity", day0["accuracy"] - day0["popularity_probe"], 0.0)
    add("kept over warm refreshes, mean", warm["retained"], 0.95)
    add("kept over warm refreshes, on the last day", warm["retained_last"], 0.95)
    add("kept over independent retrains that are not aligned", case["unaligned"]["retained"], 0.5, above=False)
    return found


def evaluate(study: Study, movies: Path, num_refreshes: int, refresh_epochs: int) -> list[dict[str, Any]]:
    first = study.run("day0", study.job.seed, WARM)
    collection = study.store.collection(WARM)
    raw0 = raw_vectors(first)
    day0 = publication_of(first)["version"]
    genres = Genres(movies, np.asarray(collection.open(day0).ids))
    view = f"{WARM}_rff"
    plain0, rff0 = (published_vectors(collection, genres.ids, day0, name) for name in (None, view))
    consumer, rff_consumer = genres.fit(plain0), genres.fit(rff0)
    popularity = dict(zip(np.asarray(raw0.ids).tolist(), np.asarray(raw0.counts).tolist(), strict=True))
    log_count = np.log1p([[popularity[identifier]] for identifier in genres.ids.tolist()])
    bias = item_bias(first, np.asarray(raw0.ids))
    alone = np.hstack([log_count, [[bias[identifier]] for identifier in genres.ids.tolist()]]) if bias else log_count
    lines: list[dict[str, Any]] = [
        {
            "case": "day0",
            "accuracy": genres.accuracy(genres.predict(consumer, plain0)),
            "rff_accuracy": genres.accuracy(genres.predict(rff_consumer, rff0)),
            "majority_class": genres.majority(),
            "popularity_probe": genres.accuracy(genres.predict(genres.fit(alone), alone)),
            "movies": len(genres.ids),
        }
    ]

    previous = first

    def warm_day(number: int) -> tuple[Array, Array, bool]:
        nonlocal previous
        seed = study.job.seed + number
        previous = study.run(f"warm-{number}", seed, WARM, init=previous.directory, epochs=refresh_epochs)
        outcome = publication_of(previous)
        served = str(outcome["version"] if outcome["status"] == "published" else previous.parent_version)
        return (
            published_vectors(collection, genres.ids, served),
            rows_of(raw_vectors(previous), genres.ids),
            outcome["status"] == "published",
        )

    days = [lambda number=number: warm_day(number) for number in range(1, num_refreshes + 1)]
    lines.append({"case": WARM, **follow(genres, consumer, plain0, days)})

    retrains = [
        raw_vectors(study.run(f"retrain-{number}", study.job.seed + 100 + number, f"own-{number}"))
        for number in range(1, num_refreshes + 1)
    ]
    for case, settings in CASES.items():
        name = case.replace("_", "-")
        target = study.store.collection(name)
        model = study.job.model.kind
        anchor = publish_candidate(study.store, name, raw0, Settings(gate=Gate("off")), job_id="day0", model=model)
        assert anchor.version is not None
        parent = anchor.version
        served: list[tuple[Array, Array, Array, bool]] = []
        cosines = []
        for number, vectors in enumerate(retrains):
            outcome = publish_candidate(
                study.store, name, vectors, settings, job_id=f"retrain-{number}", parent_version=parent, model=model
            )
            assert outcome.version is not None
            parent = outcome.version
            cosines.append(outcome.metrics.get("cosine_mean", float("nan")))
            served.append(
                (
                    published_vectors(target, genres.ids, parent),
                    published_vectors(target, genres.ids, parent, f"{name}_rff"),
                    rows_of(vectors, genres.ids),
                    all(check["verdict"] == "pass" for check in outcome.gate),
                )
            )
        plain = [lambda s=s: (s[0], s[2], s[3]) for s in served]
        measured = {} if settings.gate.mode == "off" else {"cosine_mean": float(np.mean(cosines))}
        lines.append({"case": case, **follow(genres, consumer, plain0, plain), **measured})
        if case == "aligned_ema":
            featurized = [lambda s=s: (s[1], s[2], s[3]) for s in served]
            lines.append({"case": f"rff_{case}", **follow(genres, rff_consumer, rff0, featurized)})
    return lines


if __name__ == "__main__":
    sys.exit(main())
