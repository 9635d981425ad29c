"""Held-out days: rows before a day are all before it, histories are what loops find, and consumers learn and freeze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.papers.rff import ab_test, day_consumers
from benchmarks.papers.rff.day_consumers import CONSUMERS, PREDICTS, recall, user_means
from benchmarks.papers.rff.held_out_days import (
    LENGTH,
    MIN_LENGTH,
    SECONDS_PER_DAY,
    Impressions,
    Log,
    day_name,
    day_number,
    impressions,
    read_log,
    write_rows_before,
)
from benchmarks.papers.rff.recipe import AB_TEST, _with_days, recipe
from trainer.report_pages.section import Findings, Section

Array = np.ndarray
NUM_ITEMS, NUM_USERS, DAYS = 60, 80, 6


def made_up_log() -> Log:
    """Users who begin on a day, take a few items on it and a few on each of the next days, mostly of one half."""
    draw = np.random.default_rng(0)
    columns: list[list[int]] = [[], [], [], []]
    for user in range(NUM_USERS):
        half = user % 2
        likely = np.where(np.arange(NUM_ITEMS) % 2 == half, 9.0, 1.0)
        items = draw.choice(NUM_ITEMS, 14, replace=False, p=likely / likely.sum())
        days = np.minimum(draw.integers(DAYS - 1) + np.arange(14) // 5, DAYS - 1)
        for column, values in zip(columns, ([user] * 14, items, 3 + 2 * (items % 2 == half), days), strict=True):
            column.extend(np.asarray(values).tolist())
    return Log(*(np.array(column) for column in columns))


LOG = made_up_log()
IDS = np.random.default_rng(1).permutation(NUM_ITEMS)
ONE_DAY = range(4, 5)

RECORD: dict[str, Any] = {
    "key": "k", "finished_at": "2026-01-02T03:04:05Z", "packages": {}, "git_commit": None, "command": "x",
    "machine": "m", "seconds": 1.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 items nobody can be shown 100 others."""
    monkeypatch.setattr(ab_test, "NUM_OTHERS", 10)


def test_a_log_is_read_in_order_without_rows_of_no_day(tmp_path: Path) -> None:
    noon = SECONDS_PER_DAY // 2
    columns = {
        "user": [7, 7, 3, 7], "item": [1, 2, 3, 4], "rating": [5, 4, 3, 2], "pos": [2, 0, 0, 1],
        "timestamp": [3 * SECONDS_PER_DAY, noon, None, 3 * SECONDS_PER_DAY - 1],
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    log = read_log(tmp_path / "rows.parquet")
    assert log.user.tolist() == [7, 7, 7]
    assert (log.item.tolist(), log.day.tolist()) == ([2, 4, 1], [0, 2, 3])
    assert day_name(day_number("2000-11-24")) == "2000-11-24"
    assert day_number("1970-01-02") == 1


def test_no_row_of_a_held_out_day_or_a_later_one_is_trained_on(tmp_path: Path) -> None:
    write_rows_before(LOG, 3, tmp_path / "before.parquet")
    written = pq.read_table(tmp_path / "before.parquet")
    days = {(user, item): day for user, item, day in zip(LOG.user, LOG.item, LOG.day, strict=True)}
    of_written = [days[pair] for pair in zip(written["user"].to_numpy(), written["item"].to_numpy(), strict=True)]
    assert len(of_written) == (LOG.day < 3).sum() > 0
    assert max(of_written) == 2


def test_what_a_consumer_is_fitted_on_does_not_change_with_later_rows() -> None:
    """Another future, the same training rows: not the taken items, not the histories, not the negatives."""
    later = LOG.day >= 4
    other = LOG._replace(item=np.where(later, (LOG.item + 1) % NUM_ITEMS, LOG.item), rating=LOG.rating - later)
    vectors = [np.eye(NUM_ITEMS)]
    for name in ("training", "asked"):
        one, two = (getattr(ab_test.days_of(log, [4], IDS, vectors)[0], name) for log in (LOG, other))
        assert all(np.array_equal(left, right) for left, right in zip(one, two, strict=True)) == (name == "training")


def test_impressions_are_what_users_did_before_and_next() -> None:
    found = impressions(LOG, IDS, ONE_DAY, 10_000, 7, seed=0)
    expected = []
    for user in range(NUM_USERS):
        rows = np.flatnonzero(LOG.user == user)
        codes = [IDS.tolist().index(item) for item in LOG.item[rows]]
        for at, row in enumerate(rows):
            if LOG.day[row] == 4 and at >= MIN_LENGTH:
                past = codes[:at][-LENGTH:]
                history = [-1] * (LENGTH - len(past)) + past
                expected.append((history, LOG.rating[rows[:at]].mean(), codes[at], LOG.rating[row], set(codes)))
    assert len(found.shown) == len(expected) > 50
    for place, (history, rated, taken, rating, ever) in enumerate(expected):
        assert found.history[place].tolist() == history
        assert found.rated[place] == pytest.approx(rated)
        assert (found.shown[place, 0], found.rating[place]) == (taken, rating)
        assert not ever & set(found.shown[place, 1:].tolist())
    assert len(impressions(LOG, IDS, ONE_DAY, 20, 7, seed=0).shown) == 20
    with pytest.raises(ValueError, match="nobody was asked from 1970-01-10 to 1970-01-10: take other days"):
        impressions(LOG, IDS, range(9, 10), 20, 7, seed=0)


def test_items_without_a_vector_do_not_count() -> None:
    known = IDS[:40]
    found = impressions(LOG, known, ONE_DAY, 10_000, 3, seed=0)
    assert found.shown.max() < 40
    whole = LOG.where(np.isin(LOG.item, known))
    again = impressions(whole, known, ONE_DAY, 10_000, 3, seed=0)
    assert all(np.array_equal(one, other) for one, other in zip(found, again, strict=True))


def test_a_user_who_took_everything_cannot_be_shown_more() -> None:
    count = 6
    log = Log(np.zeros(count, int), np.arange(count), np.ones(count), np.arange(count))
    with pytest.raises(ValueError, match="taken every item"):
        impressions(log, np.arange(count), range(4, 5), 5, 2, seed=0)


def test_user_means_leave_out_what_is_not_there() -> None:
    features = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
    assert user_means(features, np.array([[-1, 0, 1], [2, 2, 0]])).tolist() == [[0.5, 0.5], [11 / 3, 10 / 3]]


def test_recall_counts_the_first_among_the_highest_five() -> None:
    scores = np.array([[5.0, 9, 8, 7, 6, 1], [5.0, 9, 8, 7, 6, 5.5], [5.0, 5, 5, 5, 5, 5]])
    assert recall(scores) == pytest.approx(1 / 3)


def test_neighbours_are_the_nearest_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is fixed, and the index is that of the fit."""
    draw = np.random.default_rng(2)
    then, now = draw.normal(size=(2, 9, 3))
    asked = Impressions(np.array([[-1, 4, 5, 6, 7]]), np.zeros(1), np.array([[0, 1, 2]]), np.zeros(1))
    scores = [sum(sorted((float(then[c] @ now[j]) for j in (4, 5, 6, 7)), reverse=True)[:3]) for c in (0, 1, 2)]
    seen: list[float] = []

    def spy(found: Array) -> float:
        seen.extend(found[0])
        return 0.0

    monkeypatch.setattr(day_consumers, "recall", spy)
    day_consumers.nearest_neighbours(then, asked)(now, asked)
    assert seen == pytest.approx(scores)


def days_of_halves(turned: bool) -> list[ab_test.Day]:
    """Vectors that know the half of an item, in the same basis every day or in another one."""
    draw = np.random.default_rng(3)
    halves = np.where(IDS % 2 == 0, 1.0, -1.0)[:, None] * np.ones((1, 2)) / 2
    base = np.hstack([halves, 0.2 * draw.normal(size=(NUM_ITEMS, 2))])
    vectors = [base @ np.linalg.qr(draw.normal(size=(4, 4)))[0] if turned else base for _ in range(2)]
    return ab_test.days_of(LOG, [4, 5], IDS, vectors)


@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers_learn_what_vectors_know(name: str) -> None:
    """Better than vectors of nothing, whose recall and error are those of a guess."""
    known = days_of_halves(turned=False)
    draw = np.random.default_rng(4)
    unknown = [day._replace(vectors=draw.normal(size=day.vectors.shape)) for day in known]
    right, guess = (ab_test.judge(days, ab_test.unit, CONSUMERS[name]).refitted[0] for days in (known, unknown))
    assert right < 0.95 * guess if name in PREDICTS else right > guess + 0.05


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_frozen_consumer_needs_the_basis_that_it_was_fitted_in(name: str) -> None:
    """Vectors that are only turned: aligned, a frozen consumer does what it does where nothing was turned."""
    turned = ab_test.judge(days_of_halves(turned=True), ab_test.unit, CONSUMERS[name])
    still = ab_test.judge(days_of_halves(turned=False), ab_test.unit, CONSUMERS[name])
    assert still.frozen_aligned == pytest.approx(still.frozen, abs=0.02)
    assert abs(turned.frozen[0] - turned.frozen_aligned[0]) > 0.02
    assert len(turned.refitted) == 2


def test_consumers_of_an_arm_see_the_rows_of_every_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def spy(features: Array, training: Impressions) -> day_consumers.Judge:
        def judge(today: Array, asked: Impressions) -> float:
            seen.append((id(training), id(asked)))
            return float(features.shape[1])

        return judge

    monkeypatch.setattr(ab_test, "CONSUMERS", dict.fromkeys(CONSUMERS, spy))
    days = days_of_halves(turned=True)
    section, judged = ab_test.section_of(days, [4, 5], 4, [RECORD], tmp_path)
    assert len({tuple(seen[at : at + 4]) for at in range(0, len(seen), 4)}) == 1
    assert judged["network", "phi_8"].refitted == (8.0, 8.0)
    line = dict(zip(("consumer", "reads", "refitted", "change"), section.lines[5], strict=False))
    assert line == {
        "consumer": "logistic regression", "reads": "phi_8", "refitted": "800.00 (0.00)", "change": "+400.00 (0.00)"
    }  # fmt: skip
    claims = ab_test.claims_of(judged, 4, is_published=True)
    # More is worse where the figure is an error.
    assert [claim[::2] for claim in claims[1:]] == [
        ("does not hold", "0 of 4 on the mean of the days"), ("does not hold", "3 of 4 on the mean of the days"),
    ]  # fmt: skip
    again, _ = ab_test.section_of(days, [4, 5], 4, [RECORD], tmp_path)
    assert again.lines == section.lines
    assert len(seen) == 4 * 3 * 4, "a second report computes nothing"


def test_the_recipe_trains_each_day_on_the_days_before_with_a_seed_of_its_own(tmp_path: Path) -> None:
    of = recipe(tmp_path, 3, True, rows=tmp_path / "rows")
    assert of.prepare is not None
    of.prepare()
    trials = [trial for trial in of.jobs if trial.table == AB_TEST]
    assert [(trial.row, trial.seed) for trial in trials] == [("1970-01-07", 0), ("1970-01-08", 1)]
    log = read_log(tmp_path / "tastes_by_day.parquet")
    days = dict(zip(log.user.tolist(), log.day.tolist(), strict=True))  # a user of this log has one day
    for trial in trials:
        rows = pq.read_table(trial.dataset.uri)
        held_out = day_number(trial.row)
        assert {days[user] for user in rows["user"].to_pylist()} == set(range(1, held_out))
        assert rows.num_rows == (log.day < held_out).sum()
        assert rows["pos"].to_pylist() == sorted(rows["pos"].to_pylist())


def test_days_are_compared_on_the_items_that_all_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each day in an order of its own and one with an item less: found by id, the others go."""
    given: dict[str, Any] = {}
    empty = Section("ab_test", "", (), ())
    monkeypatch.setattr(ab_test, "findings", lambda *args, **more: given.update(args=args) or (empty, []))
    draw = np.random.default_rng(5)
    truth = draw.normal(size=(NUM_ITEMS, 4))
    days = {}
    for number, count in ((4, NUM_ITEMS - 1), (5, NUM_ITEMS)):
        ids = draw.permutation(count)
        days[day_name(number)] = ({"ids": ids, "vectors": np.stack([truth[ids]])}, RECORD)
    classes = {item: str(item % 2) for item in range(NUM_ITEMS)}
    found = _with_days(Findings(), LOG, days, classes, 4, tmp_path, is_published=False)
    assert [section.name for section in found.sections] == ["ab_test", "task1_days", "sensitivity_days"]
    _, ids, vectors, *_ = given["args"]
    assert ids.tolist() == list(range(NUM_ITEMS - 1))
    assert all(np.array_equal(vectors[number], truth[:-1]) for number in (4, 5))
