"""Previous-items history and leave-last-two-out, against plain loops over rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.columns.histories import PreviousValues
from trainer.data.prepare.split import TEST, TRAIN, VALIDATION, per_user_last, random_split, time_limits
from trainer.spec import Split

ROWS = st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 6), st.integers(-1, 9)), max_size=40)


def slow_history(rows, length):
    """The last ``length`` values of the same user with a strictly smaller order, oldest first; ties by row number."""
    histories = []
    for user, order, _ in rows:
        earlier = [(o, i, v) for i, (u, o, v) in enumerate(rows) if u == user and o < order] if user >= 0 else []
        histories.append([value for _, _, value in sorted(earlier)[-length:]])
    return histories


@given(ROWS, st.integers(1, 5), st.data())
def test_history_equals_the_loop_over_rows(rows, length, data):
    users, orders, previous = (np.array([row[i] for row in rows], dtype=np.int32) for i in range(3))
    found = PreviousValues(users, orders, previous, length)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    lists = found.rows(start, stop)
    parts = [lists.values[a:b].tolist() for a, b in zip(lists.offsets[:-1], lists.offsets[1:], strict=True)]
    assert parts == slow_history(rows, length)[start:stop]


def slow_per_user_last(rows, num_test, num_validation):
    sides = [TRAIN] * len(rows)
    for user in {row[0] for row in rows if row[0] >= 0}:
        own = [i for _, i in sorted((order, i) for i, (u, order, _) in enumerate(rows) if u == user)]
        for place, i in enumerate(reversed(own[1:])):  # a user's first row always trains
            if place < num_test:
                sides[i] = TEST
            elif place < num_test + num_validation:
                sides[i] = VALIDATION
    return sides


@given(ROWS, st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.1]))
def test_leave_last_out_equals_the_loop_over_users(rows, test, validation):
    users, orders, _ = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    split = Split(kind="per_user_last", test=test, validation=validation)
    sides = per_user_last(split, users, orders)
    assert sides.tolist() == slow_per_user_last(rows, int(test > 0), int(validation > 0))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.floats(0, 0.45), st.floats(0, 0.45))
def test_time_split_never_trains_on_the_future(times, test, validation):
    order = np.array(times)
    sides = time_limits(Split(kind="time", test=test, validation=validation), order).sides(order)
    for early, late in ((TRAIN, VALIDATION), (TRAIN, TEST), (VALIDATION, TEST)):
        if (sides == early).any() and (sides == late).any():
            assert order[sides == early].max() < order[sides == late].min()
    assert (sides == TEST).sum() >= int(len(times) * test)
    assert (sides != TRAIN).sum() >= int(len(times) * test) + int(len(times) * validation)


def test_time_split_takes_exact_shares_without_ties():
    order = np.random.default_rng(0).permutation(1000)
    sides = time_limits(Split(kind="time", test=0.2, validation=0.1), order).sides(order)
    assert [(sides == side).sum() for side in (TRAIN, VALIDATION, TEST)] == [700, 100, 200]


@given(st.lists(st.integers(0, 50), max_size=100), st.randoms())
def test_random_split_is_a_function_of_the_pair(keys, random):
    array = np.array(keys, dtype=np.uint64)
    split = Split(validation=0.3, test=0.3)
    side_of = dict(zip(keys, random_split(split, array).tolist(), strict=True))
    shuffled = random.sample(keys, len(keys))
    again = random_split(split, np.array(shuffled, dtype=np.uint64)).tolist()
    assert again == [side_of[key] for key in shuffled]


def test_random_split_takes_its_shares():
    sides = random_split(Split(validation=0.1, test=0.2), np.arange(100_000, dtype=np.uint64))
    # Binomial: 5 standard deviations are below 0.7 % of the rows.
    for side, share in ((TRAIN, 0.7), (VALIDATION, 0.1), (TEST, 0.2)):
        assert abs((sides == side).mean() - share) < 0.007
