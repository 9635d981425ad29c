"""The refresh study states what must hold, and each of it can fail; its own small parts against plain ones."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.refresh import BARS, CASES, KINDS, Day, Genres, conditions, follow, serve
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors

GOOD = {
    "accuracy": 0.6, "retained": 1.0, "retained_last": 1.0, "churn_per_day": 0.01, "freshness": 1.0, "published": 9,
    "refreshes": 9,
}  # fmt: skip
LINES: list[dict[str, Any]] = [
    {"case": "day0", "accuracy": 0.585, "majority_class": 0.281, "popularity_probe": 0.312},
    *(
        {"refresh": kind, "case": case, **GOOD, **({"accuracy": 0.2} if case == "unaligned" else {})}
        for kind in KINDS
        for case in ("unaligned", "aligned", "aligned_ema", "rff_aligned_ema")
    ),
]


def test_good_figures_pass() -> None:
    assert all(condition.holds for condition in conditions(LINES))


@pytest.mark.parametrize(
    ("figure", "value", "says"), [("accuracy", 0.42, "majority class"), ("popularity_probe", 0.6, "popularity")]
)
def test_vectors_without_meaning_fail(figure: str, value: float, says: str) -> None:
    lines = copy.deepcopy(LINES)
    lines[0][figure] = value
    (failed,) = [condition for condition in conditions(lines) if not condition.holds]
    assert says in failed.name
    assert str(failed).startswith("FAIL")


@pytest.mark.parametrize(("kind", "case", "figure", "limit", "above"), BARS)
def test_each_bar_fails_on_a_figure_that_breaks_it(
    kind: str, case: str, figure: str, limit: float, above: bool
) -> None:
    lines = copy.deepcopy(LINES)
    (line,) = [line for line in lines if (line.get("refresh"), line["case"]) == (kind, case)]
    if figure == "published_share":
        line["published"] = 7
    else:
        line[figure] = limit - 0.01 if above else limit + 0.01
    failed = [condition.name for condition in conditions(lines) if not condition.holds]
    assert failed == [f"{kind}, {case}: {figure}"]


class Signs:
    """A stand-in for the genres: the sign of the first coordinate, judged on all rows."""

    labels = np.array([1, 1, -1, -1])

    def fit(self, features: np.ndarray) -> float:
        return float(np.sign(features[:, 0] @ self.labels))

    def predict(self, consumer: float, features: np.ndarray) -> np.ndarray:
        return np.sign(consumer * features[:, 0])

    def accuracy(self, predicted: np.ndarray) -> float:
        return float((predicted == self.labels).mean())


def test_a_frozen_consumer_is_followed_day_by_day() -> None:
    right = np.array([[1.0], [1.0], [-1.0], [-1.0]])
    one_off = right * [[1], [-1], [1], [1]]
    days: list[Day] = [(right, right, []), (one_off, right, ["cosine_mean"]), (-right, right, [])]
    found = follow(Signs(), 1.0, right, days)  # type: ignore[arg-type]
    assert found["accuracy"] == pytest.approx((1 + 0.75 + 0) / 3)
    assert found["retained_last"] == 0
    # None, one of four, the other three.
    assert found["churn_per_day"] == pytest.approx((0 + 0.25 + 0.75) / 3)
    assert (found["published"], found["refreshes"], found["held_by"]) == (2, 3, [["cosine_mean"]])
    # Refitted, a consumer of mirrored vectors is as good as one of the raw ones.
    assert found["freshness"] == 1


def test_refreshes_that_were_published_set_the_limits_by_which_the_next_are_counted(tmp_path: Any) -> None:
    """At first a refresh may have a cosine of .93 to the day before; where five had .999 it may not."""
    rng, ids = np.random.default_rng(0), np.arange(1, 601)
    rows = rng.standard_normal((600, 8)).astype(np.float32)
    genre = np.array(["Drama", "Comedy|Drama"])[(rows[:, 0] > 0).astype(int)]
    pq.write_table(pa.table({"item": ids, "genres": genre}), tmp_path / "movies.parquet")
    genres = Genres(tmp_path / "movies.parquet", ids)

    def day(noise: float) -> ItemVectors:
        vectors = rows + noise * rng.standard_normal(rows.shape).astype(np.float32)
        return ItemVectors(ids, vectors, counts=np.full(600, 50))

    store, settings = open_store(str(tmp_path / "store")), CASES["aligned_ema"]
    (plain, rff) = serve(store, "few", "aligned_ema", settings, genres, day(0), [day(0.02), day(0.02), day(0.4)])
    assert (plain["published"], plain["held_by"], rff["case"]) == (3, [], "rff_aligned_ema")
    days = [*(day(0.02) for _ in range(5)), day(0.4)]
    (plain, _) = serve(store, "known", "aligned_ema", settings, genres, day(0), days)
    assert plain["published"] == 5
    (failed,) = plain["held_by"]
    assert "cosine_mean" in failed
