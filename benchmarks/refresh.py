"""Stability of item vectors: a consumer frozen on day 0 reads the vectors of every later refresh.

    python -m benchmarks.refresh [SPEC ...] [--full] [--refreshes 2] [--kinds KIND ...] [--folder DIR]

Trains each spec's job once (day 0; default: BPR on MovieLens-1M, with --full item2vec too) and refreshes it on later
days, each on its own nine tenths of the rows. ``refresh`` is ``warm`` (an epoch from the day before with a new seed, as
a schedule does), ``retrain`` (from scratch with a new seed, so that only alignment makes vectors comparable),
``same_seed`` (from scratch with day 0's seed and initial rows), ``anchor`` (a retrain with a penalty on the distance to
the vectors served the day before, ``publish.anchor``), ``frozen_context`` (a retrain against the frozen context of the
day before), or ``anchor_frozen_context``. All are aligned and gated. The consumer is a logistic regression that
predicts a movie's first genre, fitted on four fifths of the movies and evaluated on the rest.
One JSON line per case:

- ``day0``: the consumer on the vectors it was fitted on, compared with the majority class and a probe that reads only
  popularity (the logarithm of a movie's count; with BPR also its learned item bias);
- ``unaligned``, ``aligned``, ``aligned_ema``, ``rff_aligned_ema``: the vectors that the stage served.

accuracy: of the frozen consumer, mean over refreshes. retained: accuracy / day-0 accuracy. churn_per_day: share of its
predictions that differ from the day before. freshness: accuracy of a consumer refitted on the last published vectors /
of one refitted on that day's raw vectors. cosine_mean: of aligned vectors to those of the day before. published: how
many refreshes passed the gate (all are served, so that every case has all its days); held_by: the failed metrics of
each of the others.

The gate uses its starting limits until five refreshes were published, and then limits derived from these.

Every condition is printed to stderr as PASS or FAIL with its figures; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.papers.rff.recipe import first_genres
from benchmarks.support.harness import Condition, parse
from benchmarks.support.item_tables import ItemTables
from embeddings.refresh.publication import Publication
from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.refresh.settings import Gate, MovingAverage, Settings
from embeddings.store import Collection, Store, open_store
from embeddings.vectors.item_vectors import ItemVectors, unit_rows
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.prepared import PreparedData
from trainer.launch.in_process import read_spec
from trainer.runs.directory import Run

Array = npt.NDArray[Any]
SPECS = (Path("examples/ml1m.yaml"), Path("examples/ml1m_item2vec.yaml"))
ANCHOR_STRENGTH = 0.01
HELD = ("anchor", "frozen_context", "anchor_frozen_context")
KINDS = ("warm", "retrain", "same_seed", *HELD)
CASES = {
    "unaligned": Settings(align=False, ema=None, gate=Gate("off")),
    "aligned": Settings(ema=None, gate=Gate("report")),
    "aligned_ema": Settings(ema=MovingAverage(), gate=Gate("report")),
}
# Goals, with a lower or upper limit; the goals of a kind that was not run are skipped.
BARS: tuple[tuple[str, str, str, float, bool], ...] = (
    ("retrain", "unaligned", "accuracy", 0.30, False),
    ("retrain", "aligned", "retained", 0.95, True),
    ("retrain", "aligned_ema", "retained", 0.98, True),
    ("retrain", "rff_aligned_ema", "retained", 0.96, True),
    ("retrain", "aligned_ema", "churn_per_day", 0.03, False),
    ("retrain", "aligned_ema", "freshness", 0.98, True),
    ("same_seed", "aligned", "retained", 0.95, True),
    ("same_seed", "aligned_ema", "retained", 0.98, True),
    ("same_seed", "rff_aligned_ema", "retained", 0.96, True),
    ("same_seed", "aligned_ema", "churn_per_day", 0.03, False),
    ("same_seed", "aligned_ema", "freshness", 0.98, True),
    *(
        (kind, *bar)
        for kind in HELD
        for bar in (
            ("aligned", "retained", 0.95, True),
            ("aligned_ema", "retained", 0.98, True),
            ("rff_aligned_ema", "retained", 0.96, True),
            ("aligned_ema", "churn_per_day", 0.03, False),
            ("aligned_ema", "freshness", 0.98, True),
            ("aligned_ema", "published_share", 8 / 9, True),
        )
    ),
    ("warm", "aligned_ema", "retained", 0.98, True),
    ("warm", "aligned_ema", "retained_last", 0.95, True),
    ("warm", "rff_aligned_ema", "retained", 0.96, True),
    ("warm", "aligned_ema", "churn_per_day", 0.03, False),
    ("warm", "aligned_ema", "freshness", 0.98, True),
    ("warm", "aligned_ema", "published_share", 8 / 9, True),
)


class Genres:
    """Movies with a known first genre, split once into movies to fit and movies to evaluate the consumer on."""

    def __init__(self, movies: Path, ids: Array):
        genre = first_genres(movies)
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
    """Return the vectors of a version, [len(ids), dim]; a missing item has a zero row."""
    _, vectors = collection.open(version).lookup(ids)
    vectors = np.nan_to_num(vectors)
    return collection.view_transform(view, vectors, version) if view is not None else vectors


def item_bias(run: Run) -> dict[Any, float]:
    """Return the bias that BPR learns for each item besides its vector; empty for other models."""
    if run.job.model.kind != "bpr":
        return {}
    checkpoint = latest_valid(run.checkpoints)
    assert checkpoint is not None
    vocabulary = PreparedData.open(run.data).vocabulary("item").to_pylist()
    # Rows 0 and 1 are padding and unknown; the bias is the column after the vector.
    rows, _ = checkpoint.read_rows("item", 2, len(vocabulary))
    return dict(zip(vocabulary, rows[:, run.job.model.embedding_dim].tolist(), strict=True))


def rows_of(vectors: ItemVectors, ids: Array) -> Array:
    """Return unit rows of ``ids`` in order, zero for ids without a vector."""
    place = {identifier: row for row, identifier in enumerate(np.asarray(vectors.ids).tolist())}
    unit, _ = unit_rows(np.nan_to_num(vectors.vectors))
    return np.stack([unit[place[identifier]] if identifier in place else 0 * unit[0] for identifier in ids.tolist()])


Day = tuple[Array, Array, list[str]]


def follow(genres: Genres, consumer: Any, day0: Array, days: Sequence[Day]) -> dict[str, Any]:
    """Evaluate the frozen consumer on all days, each (served features, raw vectors, metrics that failed the gate)."""
    before = genres.predict(consumer, day0)
    day0_accuracy = genres.accuracy(before)
    accuracies, flips = [], []
    for served, _, _ in days:
        now = genres.predict(consumer, served)
        accuracies.append(genres.accuracy(now))
        flips.append(float((now != before).mean()))
        before = now
    served, raw, _ = days[-1]
    refitted, on_raw = (genres.accuracy(genres.predict(genres.fit(rows), rows)) for rows in (served, raw))
    accuracy = float(np.mean(accuracies))
    return {
        "accuracy": accuracy,
        "retained": accuracy / day0_accuracy,
        "retained_last": accuracies[-1] / day0_accuracy,
        "churn_per_day": float(np.mean(flips)),
        "freshness": refitted / on_raw,
        "published": sum(not failed for _, _, failed in days),
        "refreshes": len(days),
        "held_by": [failed for _, _, failed in days if failed],
    }


def refreshes(
    tables: ItemTables, kind: str, number: int, epochs: int, strength: float = ANCHOR_STRENGTH
) -> list[ItemVectors]:
    """Return the item rows of each day.

    Kinds with an anchor or a frozen context use the version published the day before.
    """
    found, before = [], "day0"
    held = {
        **({"anchor": {"strength": strength}} if "anchor" in kind else {}),
        **({"frozen_context": {"items": "fresh"}} if "frozen_context" in kind else {}),
    }
    if held:
        chain = f"{kind}-{strength:g}".replace(".", "_") if "anchor" in held else kind
    else:
        chain = kind
    if held:
        tables.begin_chain(chain, tables.table("day0", tables.job.seed))
    for day in range(1, number + 1):
        seed = tables.job.seed + (0 if kind == "warm" else 100) + day
        name, rows = f"{chain}-{day}", tables.rows_but_a_tenth(seed)
        if kind == "same_seed":
            seed = tables.job.seed
        if held:
            init = before if "frozen_context" in held else None
            found.append(tables.table(name, seed, init=init, rows=rows, chain=chain, held=held))
            before = name
        elif kind == "warm":
            found.append(tables.table(name, seed, init=before, rows=rows, epochs=epochs))
            before = name
        else:
            found.append(tables.table(name, seed, rows=rows))
    return found


def evaluate(
    tables: ItemTables,
    movies: Path,
    num_refreshes: int,
    refresh_epochs: int,
    kinds: Sequence[str] = KINDS,
    strength: float = ANCHOR_STRENGTH,
    new_weight: float = MovingAverage.new_weight,
) -> list[dict[str, Any]]:
    day0 = tables.table("day0", tables.job.seed, rows=tables.rows_but_a_tenth(tables.job.seed))
    genres = Genres(movies, day0.keys[day0.evidence])
    ids = day0.keys.tolist()
    bias = item_bias(tables.run("day0"))
    counts = dict(zip(ids, np.asarray(day0.counts).tolist(), strict=True))
    popularity = np.log1p([[counts[one]] for one in genres.ids.tolist()])
    alone = np.hstack([popularity, [[bias[one]] for one in genres.ids.tolist()]]) if bias else popularity
    plain = rows_of(day0, genres.ids)
    lines: list[dict[str, Any]] = [
        {
            "case": "day0",
            "accuracy": genres.accuracy(genres.predict(genres.fit(plain), plain)),
            "majority_class": genres.majority(),
            "popularity_probe": genres.accuracy(genres.predict(genres.fit(alone), alone)),
            "movies": len(genres.ids),
        }
    ]
    with tempfile.TemporaryDirectory(prefix="evenkeel-refresh-store-") as folder:
        store = open_store(folder)
        for kind in kinds:
            candidates = refreshes(tables, kind, num_refreshes, refresh_epochs, strength)
            for case, settings in CASES.items():
                name = f"{kind}-{case}".replace("_", "-")
                if settings.ema is not None:
                    settings = dataclasses.replace(settings, ema=MovingAverage(new_weight))
                served = serve(store, name, case, settings, genres, day0, candidates)
                lines += [{"refresh": kind, **line} for line in served]
    return lines


def serve(
    store: Store,
    name: str,
    case: str,
    settings: Settings,
    genres: Genres,
    day0: ItemVectors,
    candidates: Sequence[ItemVectors],
) -> list[dict[str, Any]]:
    """Publish ``candidates`` in turn to a new collection, and return the output lines of this case."""
    target, view = store.collection(name), f"{name}_rff"

    def publish(items: ItemVectors, how: Settings) -> Publication:
        return publish_candidate(
            store, target.name, RefreshRequest(items, how, parent_version=target.current(), model="model")
        )

    def features(version: str | None) -> tuple[Array, Array]:
        assert version is not None
        plain, featurized = (published_vectors(target, genres.ids, version, one) for one in (None, view))
        return plain, featurized

    publish(day0, Settings(gate=Gate("off")))
    lines: list[dict[str, Any]] = []
    plain0, rff0 = features(target.current())
    plain: list[Day] = []
    featurized: list[Day] = []
    cosines = []
    for items in candidates:
        end = publish(items, settings)
        failed = [check["metric"] for check in end.gate if check["verdict"] == "fail"]
        raw = rows_of(items, genres.ids)
        for days, served in zip((plain, featurized), features(end.version), strict=True):
            days.append((served, raw, failed))
        cosines.append(end.metrics.get("cosine_mean", float("nan")))
    measured = {} if settings.gate.mode == "off" else {"cosine_mean": float(np.mean(cosines))}
    lines.append({"case": case, **follow(genres, genres.fit(plain0), plain0, plain), **measured})
    if case == "aligned_ema":
        lines.append({"case": f"rff_{case}", **follow(genres, genres.fit(rff0), rff0, featurized)})
    return lines


def conditions(lines: Sequence[dict[str, Any]]) -> list[Condition]:
    """Check that vectors are informative and that a frozen consumer keeps working with alignment but not without."""
    found = []

    def add(name: str, value: float, limit: float, above: bool = True) -> None:
        holds = value >= limit if above else value <= limit
        found.append(Condition(name, holds, f"{value:+.3f} ({'at least' if above else 'at most'} {limit:+.3f})"))

    (day0,) = [line for line in lines if line["case"] == "day0"]
    add("day 0 above the majority class", day0["accuracy"] - day0["majority_class"], 0.15)
    add("day 0 above a probe on popularity", day0["accuracy"] - day0["popularity_probe"], 0.0)
    measured = {line.get("refresh") for line in lines}
    for kind, case, figure, limit, above in BARS:
        if kind not in measured:
            continue
        (line,) = [line for line in lines if (line.get("refresh"), line["case"]) == (kind, case)]
        value = line["published"] / line["refreshes"] if figure == "published_share" else line[figure]
        add(f"{kind}, {case}: {figure}", value, limit, above)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", type=Path, nargs="*", default=list(SPECS[:1]))
    parser.add_argument("--movies", type=Path, help="titles and genres (default: ml1m_movies.parquet beside the rows)")
    parser.add_argument("--refreshes", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=["warm"])
    parser.add_argument("--anchor", type=float, default=ANCHOR_STRENGTH, help="strength of publish.anchor")
    parser.add_argument(
        "--new-weight", type=float, default=MovingAverage.new_weight,
        help="new_weight of the moving average that is served; an anchor's target uses the spec's value",
    )  # fmt: skip
    parser.add_argument("--refresh-epochs", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="folder of runs, reused if they exist (default: a temporary one)")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="PATH=VALUE")
    options = parse(parser, arguments, specs=list(SPECS), refreshes=9, kinds=list(KINDS))
    broken = 0
    for spec in options.specs:
        dataset, job = read_spec(spec, options.changes)
        movies = options.movies or Path(dataset.uri).with_name("ml1m_movies.parquet")
        with tempfile.TemporaryDirectory(prefix="evenkeel-refresh-") as temporary:
            tables = ItemTables(dataset, job, (options.folder or Path(temporary)).resolve() / job.name)
            lines = evaluate(
                tables, movies, options.refreshes, options.refresh_epochs, options.kinds, options.anchor,
                options.new_weight,
            )  # fmt: skip
        for line in lines:
            print(json.dumps({"bench": "refresh", "model": job.model.kind, **line}), flush=True)
        found = conditions(lines)
        print(*(f"{job.model.kind}: {condition}" for condition in found), sep="\n", file=sys.stderr, flush=True)
        broken += sum(not condition.holds for condition in found)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
