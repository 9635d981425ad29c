"""Consumers that outlive a change of model: they read views of their own generation, mapped from the new vectors.

    python -m benchmarks.generations [--data ../shared/data] [--folder DIR] [--full]

BPR of 32 columns is trained on MovieLens-1M without a tenth of the movies and published: generation 1. Consumers are
fitted on it and never again. Then a two_tower of 64 columns is published to the same collection: generation 2. Daily
refreshes follow, each a warm epoch on its own nine tenths of the rows, with a part of the left-out movies. At last BPR
of 32 columns with another seed begins generation 3, whose map to generation 1 goes through generation 2. The gate holds
both changes, and they are promoted, as an operator does. A canary of genres judges the maps.

Exponential views of several dims are published too; their consumers keep reading them by their plain name, without a
map.

Consumers: ``genres``, a logistic regression of a movie's first genre from the vectors; ``genres_rff``, the same from
the default view; ``ratings``, a ridge regression of a movie's mean rating from the vectors. Scores are accuracy, and
the correlation with the mean rating, on movies that the consumer was not fitted on, new movies among them.

One JSON line per consumer and case: ``mapped`` (it reads ``VIEW@g1``), ``cut`` (it reads the first 32 columns of the
new vectors, or random Fourier features of these) and ``exponential`` (it reads an exponential view). day0: score before
the change; scores: after the change and each refresh; kept: the lowest of them / day0; lift: the highest share of day
0's lift over an answer that is always the same; new: score on only new movies, after the last refresh; third: score in
generation 3; microseconds: time to compute an item's exponential vector from 64 columns, in batches of 1000. Further
lines: ``map`` (figures of the three maps), ``wrong`` (of a map for a two_tower whose ids are shuffled).

Every condition is printed to stderr as PASS or FAIL with its figures; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.papers.rff.recipe import first_genres
from benchmarks.support.harness import Condition, parse
from benchmarks.support.item_tables import ItemTables
from embeddings.refresh import probe
from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.refresh.settings import Settings, View
from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import Array, ItemVectors
from trainer.launch.in_process import read_spec

DIM = 32
OLD, NEW = Path("examples/ml1m.yaml"), Path("examples/ml1m_two_tower.yaml")
SOFTMAX = (
    "model.embedding_dim=64", "model.hidden=[]", "model.loss=sampled_softmax", "model.normalize=true",
    "model.temperature=0.1", "batch_size=512", "epochs=4",
)  # fmt: skip
"""Settings of the new model; with the example's loss its vectors tell nothing of genres, whoever reads them."""
NEW_SEED, AGAIN_SEED = 100, 200
"""Seeds of the later models: with that of the first, rows of one id would begin alike (init of kind hash)."""
EXPONENTIAL = (32, 64, 128, 256, 512)
"""Dims of the exponential views."""
HELD_OUT, NEW_SHARE = 0.2, 0.1
MIN_LIKES = 5
"""Fewest ratings of 4 or 5 that a movie has in all rows, to be judged; on fewer no model tells anything."""
MIN_KEPT, MIN_NEW_KEPT, MIN_EXPONENTIAL_KEPT, MAX_CUT_LIFT = 0.95, 0.9, 0.9, 0.5


class Movies:
    """MovieLens-1M cut into days, with all movies, those of day 0, and the rows of each day."""

    def __init__(self, data: Path, refreshes: int):
        self.uri = data / "ml1m.parquet"
        table = pq.read_table(self.uri, columns=["item", "rating"])
        self._items, ratings = (table.column(name).to_numpy() for name in ("item", "rating"))
        self.ids, place = np.unique(self._items, return_inverse=True)
        self.mean_rating = np.bincount(place, ratings) / np.bincount(place)
        genre = first_genres(data / "ml1m_movies.parquet")
        self.genre = np.array([genre.get(identifier, "") for identifier in self.ids.tolist()])
        draw = np.random.default_rng(0).permutation(len(self.ids))
        self.later = np.array_split(self.ids[draw[: int(NEW_SHARE * len(draw))]], refreshes)
        liked = np.bincount(place, ratings >= 4) >= MIN_LIKES
        is_new = np.isin(self.ids, np.concatenate(self.later))
        self.is_new = is_new & liked
        self.held_out = (is_new | (np.random.default_rng(1).random(len(self.ids)) < HELD_OUT)) & liked
        self.fitted = liked & ~self.held_out

    def rows(self, tables: ItemTables, day: int) -> Path:
        """Return the rows of a day: nine tenths of those whose movie exists by then."""
        absent = np.concatenate([np.empty(0, self.ids.dtype), *self.later[day:]])
        keep = ~np.isin(self._items, absent) & (np.random.default_rng(100 + day).random(len(self._items)) < 0.9)
        return tables.rows(f"day-{day}", keep)


class Consumer:
    """A model that is fitted on the features of a view once.

    Attributes:
        view: name of the view.
        day0: its score before the change.
        scores: by case, its scores after the change and after each refresh.
        others: by case, the score on only new movies, ``new``, and in the third generation, ``third``.
    """

    def __init__(self, view: str, movies: Movies, labels: Array, model: Any, score: Callable[[Array, Array], float]):
        self.view = view
        self.day0 = 0.0
        self.scores: dict[str, list[float]] = {}
        self.others: dict[str, dict[str, float]] = {}
        self._movies, self._labels, self._model, self._score = movies, labels, model, score

    def fit(self, features: Array) -> None:
        """Fit on four fifths of the movies that have features, and score the others."""
        fitted = self._has_both(features) & self._movies.fitted
        self._model.fit(features[fitted], self._labels[fitted])
        self.day0 = self.score(features)
        judged = self._has_both(features) & self._movies.held_out
        values, counts = np.unique(self._labels[fitted], return_counts=True)
        self.constant = self._score(np.full(judged.sum(), values[counts.argmax()]), self._labels[judged])

    def score(self, features: Array, *, only_new: bool = False) -> float:
        """Return the score on movies that the model was not fitted on."""
        judged = self._has_both(features) & (self._movies.is_new if only_new else self._movies.held_out)
        return self._score(self._model.predict(features[judged]), self._labels[judged])

    def read(self, case: str, features: Array) -> None:
        """Keep the scores on a version's features."""
        self.scores.setdefault(case, []).append(self.score(features))
        if (features.any(axis=1) & self._movies.is_new).any():
            self.others.setdefault(case, {})["new"] = self.score(features, only_new=True)

    def line(self, case: str) -> dict[str, Any]:
        scores = self.scores[case]
        return {
            "case": case,
            "day0": self.day0,
            "constant": self.constant,
            "scores": scores,
            "kept": min(scores) / self.day0,
            "lift": (max(scores) - self.constant) / (self.day0 - self.constant),
            **self.others.get(case, {}),
        }

    def _has_both(self, features: Array) -> Array:
        has: Array = features.any(axis=1) & (self._labels != "")
        return has


def accuracy(predicted: Array, labels: Array) -> float:
    return float((predicted == labels).mean())


def correlation(predicted: Array, labels: Array) -> float:
    """Return Pearson's correlation; 0 for predictions that are all the same."""
    return float(np.corrcoef(predicted, labels)[0, 1]) if np.ptp(predicted) else 0.0


def consumers_of(collection: Collection, movies: Movies) -> dict[str, Consumer]:
    def classifier() -> Any:
        return make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000, C=0.1))

    ratings = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-1, 4, 11)))
    name = collection.name
    return {
        "genres": Consumer(f"{name}@g1", movies, movies.genre, classifier(), accuracy),
        "genres_rff": Consumer(f"{name}_rff@g1", movies, movies.genre, classifier(), accuracy),
        "ratings": Consumer(f"{name}@g1", movies, movies.mean_rating, ratings, correlation),
        **{
            f"genres_exp_{dim}": Consumer(f"exp_{dim}", movies, movies.genre, classifier(), accuracy)
            for dim in EXPONENTIAL
        },
    }


def publish(store: Store, name: str, items: ItemVectors, model: str) -> bool:
    """Publish to a collection, and promote what the gate holds; return True if the gate passed it."""
    target = store.collection(name)
    views = tuple(View(f"exp_{dim}", kind="exponential", dim=dim) for dim in EXPONENTIAL) if name == "items" else ()
    request = RefreshRequest(items, Settings(views=views), parent_version=target.current(), model=model)
    end = publish_candidate(store, name, request)
    if end.status == "held":
        assert end.version is not None
        target.promote(end.version, f"the benchmark goes on: {end.reasons[0]}", override_gate=True)
    return end.status == "published"


def cut(collection: Collection, consumer: Consumer, ids: Array) -> Array:
    """Return what a consumer reads without a map: its view of the first columns of the new vectors."""
    vectors = collection.open().lookup(ids)[1][:, :DIM]
    vectors = np.pad(vectors, ((0, 0), (0, DIM - vectors.shape[1])))
    return collection.view_transform(consumer.view, vectors, "v000001")


def evaluate(movies: Movies, old: ItemTables, new: ItemTables, refreshes: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="evenkeel-generations-") as folder:
        store = open_store(folder)
        collection = store.collection("items")
        day0 = old.table("day-0", 0, rows=movies.rows(old, 0))
        publish(store, "items", day0, "bpr")
        consumers = consumers_of(collection, movies)
        for consumer in consumers.values():
            consumer.fit(collection.view_lookup(consumer.view, movies.ids)[1])
        known = movies.genre != ""
        probe.register(collection, "genres", movies.ids[known], movies.genre[known])

        def read(consumer: Consumer) -> dict[str, Array]:
            features = collection.view_lookup(consumer.view, movies.ids)[1]
            if "@" not in consumer.view:
                return {"exponential": features}
            return {"mapped": features, "cut": cut(collection, consumer, movies.ids)}

        passed = 0
        for day in range(refreshes + 1):
            before: dict[str, Any] = {} if day == 0 else {"init": f"day-{day - 1}", "epochs": 1}
            items = new.table(f"day-{day}", NEW_SEED + day, rows=movies.rows(new, day), **before)
            passed += publish(store, "items", items, "two_tower")
            if day == 0:
                shuffled = replace(items, vectors=np.random.default_rng(2).permutation(np.asarray(items.vectors)))
                publish(store, "wrong", day0, "bpr")
                publish(store, "wrong", shuffled, "two_tower")
            for consumer in consumers.values():
                for case, features in read(consumer).items():
                    consumer.read(case, features)
        for name in [f"exp_{dim}" for dim in EXPONENTIAL]:
            compute = partial(collection.view_transform, name, collection.open().vectors[:1000])
            consumers[f"genres_{name}"].others["exponential"]["microseconds"] = 1e3 * min(
                timeit.repeat(compute, number=1)
            )
        second = collection.manifest()["anchor_version"]
        publish(store, "items", old.table("again", AGAIN_SEED, rows=movies.rows(old, refreshes)), "bpr")
        for consumer in consumers.values():
            for case, features in read(consumer).items():
                consumer.others[case]["third"] = consumer.score(features)
        maps = [*collection.manifest(second)["maps"], *collection.manifest()["maps"]]
        return [
            *(
                {"consumer": name, **consumer.line(case)}
                for name, consumer in consumers.items()
                for case in consumer.scores
            ),
            *({"case": "map", **figures} for figures in maps),
            {"case": "wrong", **store.collection("wrong").manifest()["maps"][0]},
            {"case": "refreshes", "published": passed, "of": refreshes},
        ]


def conditions(lines: Sequence[dict[str, Any]]) -> list[Condition]:
    found = []

    def add(name: str, value: float, limit: float, above: bool = True) -> None:
        holds = value >= limit if above else value <= limit
        found.append(Condition(name, holds, f"{value:.3f} ({'at least' if above else 'at most'} {limit:.3f})"))

    for line in lines:
        if line["case"] == "mapped":
            add(f"{line['consumer']} through the map: kept", line["kept"], MIN_KEPT)
            add(f"{line['consumer']} through the map: new movies", line["new"] / line["day0"], MIN_NEW_KEPT)
        if line["case"] == "exponential":
            add(f"{line['consumer']} without a map: kept", line["kept"], MIN_EXPONENTIAL_KEPT)
        if line["case"] == "cut":
            add(f"{line['consumer']} without the map: lift", line["lift"], MAX_CUT_LIFT, above=False)
    (wrong,) = [line for line in lines if line["case"] == "wrong"]
    found.append(Condition("a wrong map is held", bool(wrong["reasons"]), "; ".join(wrong["reasons"])))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    parser.add_argument("--folder", type=Path, help="folder of runs, reused if they exist (default: a temporary one)")
    parser.add_argument("--refreshes", type=int, default=5)
    options = parse(parser, arguments, refreshes=20)
    movies = Movies(options.data, options.refreshes)
    with tempfile.TemporaryDirectory(prefix="evenkeel-generations-runs-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()

        def tables(spec: Path, name: str, *changes: str) -> ItemTables:
            dataset, job = read_spec(spec, changes)
            return ItemTables(dataset.model_copy(update={"uri": str(movies.uri)}), job, folder / name)

        old, new = tables(OLD, "old"), tables(NEW, "new", *SOFTMAX)
        lines = evaluate(movies, old, new, options.refreshes)
    for line in lines:
        print(json.dumps({"bench": "generations", **line}), flush=True)
    found = conditions(lines)
    print(*found, sep="\n", file=sys.stderr, flush=True)
    return 0 if all(condition.holds for condition in found) else 1


if __name__ == "__main__":
    sys.exit(main())
