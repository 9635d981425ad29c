"""Figures of a run's rows: how many, what one user has of them, and how well users and items belong together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trainer.data.batches.prepared import PreparedData
from trainer.data.batches.prepared_columns import MANIFEST
from trainer.data.prepare import row_figures
from trainer.data.prepare.preparation import prepare
from trainer.data.prepare.row_figures import MAX_USER_ITEMS, MIN_ITEMS, MIN_PAIRS, pairing, popularity

NUM_USERS, NUM_ITEMS, GROUPS = 300, 200, 5


def rows(seed: int = 0, num_users: int = NUM_USERS, each: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Users and items: nine items in ten of a user are of the user's own group, the popular ones of it most often."""
    rng = np.random.default_rng(seed)
    users = np.repeat(np.arange(num_users), each)
    groups = np.where(rng.random(len(users)) < 0.9, users % GROUPS, rng.integers(0, GROUPS, len(users)))
    places = np.floor((NUM_ITEMS // GROUPS) * rng.random(len(users)) ** 2).astype(np.int64)
    order = rng.permutation(len(users))
    return users[order], (groups * (NUM_ITEMS // GROUPS) + places)[order]


def shuffled(items: np.ndarray, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).permutation(items)


def reference(users: np.ndarray, items: np.ndarray) -> float:
    """The same by sets: each pair's users are counted one by one."""
    width = int(items.max()) + 1
    baskets: dict[int, list[int]] = {}
    for user, item in sorted(set(zip(users.tolist(), items.tolist(), strict=True))):
        baskets.setdefault(user, []).append(item)

    def hashed(values: list[int], seed: int) -> list[float]:
        return row_figures._hashed(np.array(values, dtype=np.int64), seed).tolist()

    for user, basket in baskets.items():
        keys = hashed([user * width + item for item in basket], row_figures._ORDER_SEED)
        baskets[user] = [item for _, item in sorted(zip(keys, basket, strict=True))][:MAX_USER_ITEMS]
    halves = dict(zip(baskets, hashed(list(baskets), row_figures._HALF_SEED), strict=True))
    counting = [set(basket) for user, basket in baskets.items() if halves[user] < 0.5]
    pairs = [pair for user, basket in baskets.items() if halves[user] >= 0.5 for pair in itertools.pairwise(basket)]
    draws = np.argsort(hashed(list(range(len(pairs))), row_figures._DRAW_SEED))
    won: list[float] = []
    for (left, right), draw in zip(pairs, draws, strict=True):
        drawn = pairs[draw][1]
        if drawn != left:
            own, chance = (sum({left, one} <= basket for basket in counting) for one in (right, drawn))
            won.append(1.0 if own > chance else 0.5 if own == chance else 0.0)
    return sum(won) / len(won)


@pytest.mark.parametrize("seed", range(4))
def test_pairing_against_a_plain_count_of_users(seed: int) -> None:
    users, items = rows(seed, num_users=120)
    # One user with more items than take part, and one with a single one.
    users = np.r_[users, np.full(NUM_ITEMS, 500), 501]
    items = np.r_[items, np.arange(NUM_ITEMS), 3]
    found = pairing(users, items)
    assert found == pytest.approx(reference(users, items), abs=1e-12)
    assert pairing(users, shuffled(items)) == pytest.approx(reference(users, shuffled(items)), abs=1e-12)


def test_users_and_items_that_belong_together_are_told_from_shuffled_ones() -> None:
    users, items = rows()
    found = pairing(users, items)
    assert found is not None
    assert found > 0.7
    chance = [pairing(users, shuffled(items, seed)) for seed in range(5)]
    # Popular items are as popular as before, which gives nothing.
    assert chance == pytest.approx([0.5] * 5, abs=0.03)
    # A part of the rows that is shuffled shows in part.
    part = np.where(np.random.default_rng(2).random(len(items)) < 0.2, shuffled(items), items)
    between = pairing(users, part)
    assert between is not None
    assert 0.55 < between < found - 0.05


def test_the_figure_is_of_pairs_that_there_are_not_of_their_order_or_number() -> None:
    users, items = rows()
    order = np.random.default_rng(3).permutation(len(users))
    assert pairing(users, items) == pairing(users[order], items[order])
    assert pairing(users, items) == pairing(np.tile(users, 3), np.tile(items, 3))
    assert pairing(users.astype(np.int32), items.astype(np.int32)) == pairing(users, items)


def test_of_many_rows_a_sample_of_users_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    users, items = rows(num_users=1000)
    whole = pairing(users, items)
    monkeypatch.setattr(row_figures, "MAX_ROWS", len(users) // 2)
    sample = pairing(users, items)
    assert sample is not None
    assert sample != whole
    assert sample == pytest.approx(whole, abs=0.03)
    drawn, _ = row_figures._sampled(users, items)
    # Whole users: a part of the items of each would be other pairs.
    assert (np.unique(drawn, return_counts=True)[1] == 20).all()
    assert len(drawn) == pytest.approx(len(users) // 2, rel=0.1)


def test_too_few_pairs_tell_nothing() -> None:
    users, items = rows()
    few = users < 2 * MIN_PAIRS // 40
    assert pairing(users[few], items[few]) is None
    assert pairing(users[:0], items[:0]) is None
    # Users with a single item have no pairs, however many they are.
    assert pairing(np.arange(5000), np.arange(5000) % 100) is None


def test_popularity_is_the_correlation_of_items_counts_in_two_parts() -> None:
    rng = np.random.default_rng(0)
    often = rng.lognormal(3, 1, 2 * MIN_ITEMS)
    earlier, newest = (np.repeat(np.arange(2 * MIN_ITEMS), rng.poisson(often * part)) for part in (1.0, 0.25))
    counts = [[int((part == item).sum()) for item in range(2 * MIN_ITEMS)] for part in (earlier, newest)]
    twice = [pair for pair in zip(*counts, strict=True) if min(pair) >= 2]
    expected = np.corrcoef(np.log(np.array(twice).T))[0, 1]
    assert popularity(rng.permutation(earlier), newest) == pytest.approx(expected)
    assert expected > 0.8
    # Other ids for the same items, as if somebody had numbered them anew.
    anew = rng.permutation(2 * MIN_ITEMS)
    changed = popularity(earlier, anew[newest])
    assert changed is not None
    assert abs(changed) < 0.3


def test_popularity_of_few_items_or_of_items_alike_is_not_told() -> None:
    items = np.repeat(np.arange(MIN_ITEMS - 1), np.arange(2, MIN_ITEMS + 1))
    assert popularity(items, items) is None
    enough = np.repeat(np.arange(MIN_ITEMS), np.arange(2, MIN_ITEMS + 2))
    assert popularity(enough, enough) == pytest.approx(1.0)
    assert popularity(np.repeat(np.arange(MIN_ITEMS), 2), enough) is None
    assert popularity(items[:0], enough) is popularity(items[:0], items[:0]) is None


# --- of a prepared run ------------------------------------------------------------------------------------------------


def table(items: np.ndarray | None = None, **columns: Any) -> pa.Table:
    users, own = rows()
    items = own if items is None else items
    count = len(users)
    return pa.table({"user": users, "item": items, "click": np.arange(count) % 2, "ts": np.arange(count), **columns})


@pytest.fixture
def figures_of(dataset_spec: Any, job_spec: Any, tmp_path: Path) -> Any:
    """Prepare a table, and return the figures that the run's data tell."""

    def figures(rows_of_run: pa.Table, job: dict[str, Any] | None = None, **fields: Any) -> dict[str, float | None]:
        features = {"user": {"type": "id"}, "item": {"type": "id"}}
        job = {"evaluation": {"split": {"kind": "time"}}} if job is None else job
        spec = dataset_spec(rows_of_run, **{"features": features, "timestamp": "ts", **fields})
        data = prepare(spec, job_spec(**job), tmp_path / "data")
        assert PreparedData.open(data.directory).row_figures == data.row_figures
        return data.row_figures

    return figures


def test_the_figures_are_in_the_manifest_of_what_is_prepared(figures_of: Any) -> None:
    users, items = rows()
    figures = figures_of(table())
    assert set(figures) == {"rows", "users", "largest_user", "pairing", "pairing_newest", "popularity"}
    assert figures["users"] == len(np.unique(users))
    assert figures["rows"] == len(users)
    # Of the rows of training, which are most of all rows.
    assert figures["largest_user"] == pytest.approx(20 / len(users), rel=0.3)
    assert figures["pairing"] == pytest.approx(pairing(users, items), abs=0.03)
    assert figures["pairing_newest"] > 0.57


def test_a_shuffled_column_shows_and_that_of_the_newest_rows_alone_too(figures_of: Any) -> None:
    _, items = rows()
    figures = figures_of(table(shuffled(items)))
    assert figures["pairing"] == pytest.approx(0.5, abs=0.03)
    newest = np.arange(len(items)) >= 0.8 * len(items)
    mixed = items.copy()
    mixed[newest] = shuffled(items[newest])
    figures = figures_of(table(mixed))
    assert figures["pairing"] > 0.6
    assert figures["pairing_newest"] == pytest.approx(0.5, abs=0.06)
    assert figures["popularity"] is not None
    renumbered = np.where(newest, np.random.default_rng(4).permutation(NUM_ITEMS)[items], items)
    other = figures_of(table(renumbered))["popularity"]
    assert other < 0.3 < figures["popularity"]
    # The newest rows are so by their times, wherever they stand.
    backwards = figures_of(table(mixed).take(np.arange(len(items))[::-1]))
    assert backwards["pairing_newest"] == pytest.approx(figures["pairing_newest"], abs=0.05)


def test_one_user_with_half_of_the_rows_shows(figures_of: Any) -> None:
    users, _ = rows()
    robot = np.where(np.arange(len(users)) % 2 == 0, 7, users)
    assert figures_of(table().set_column(0, "user", pa.array(robot)))["largest_user"] == pytest.approx(0.5, abs=0.02)


def test_of_a_window_of_days_the_last_rows_are_the_newest(figures_of: Any) -> None:
    _, items = rows()
    days = np.array(["2026-01-01", "2026-01-02", "2026-01-03"], dtype="datetime64[D]")
    last = np.arange(len(items)) >= 0.8 * len(items)
    mixed = np.where(last, shuffled(items), items)
    dated = table(mixed, date=days[np.arange(len(items)) * 3 // len(items)])
    window = {"dataset": {"name": "clicks", "window": {"start": "2026-01-03", "days": 3}}}
    figures = figures_of(dated, window, partition="date", timestamp=None)
    assert figures["pairing"] > 0.6
    assert figures["pairing_newest"] == pytest.approx(0.5, abs=0.06)


def test_rows_without_times_have_no_newest_and_a_few_tell_nothing(figures_of: Any) -> None:
    assert figures_of(table(), {}, timestamp=None)["pairing_newest"] is None
    few = figures_of(table().slice(0, 100), {}, timestamp=None)
    assert (few["rows"], few["pairing"], few["pairing_newest"]) == (100, None, None)


def test_a_job_that_reads_no_users_has_none_to_pair(figures_of: Any) -> None:
    figures = figures_of(table(), features={"item": {"type": "id"}})
    assert figures.pop("rows") == len(rows()[0])
    assert set(figures.values()) == {None}


def test_what_an_earlier_version_prepared_has_no_figures(figures_of: Any, tmp_path: Path) -> None:
    figures_of(table().slice(0, 500))
    (path,) = tmp_path.glob(f"data/**/{MANIFEST}")
    document = json.loads(path.read_text())
    del document["row_figures"]
    path.write_text(json.dumps(document))
    assert PreparedData.open(path.parent).row_figures == {}
