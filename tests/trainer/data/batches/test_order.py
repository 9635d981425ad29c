"""The global order: a permutation each epoch, a pure function of (seed, epoch, position); slices tile it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batches.order import GlobalOrder, rank_slice

SHAPES = {"num_rows": st.integers(1, 300), "block_rows": st.integers(1, 40), "window_blocks": st.integers(1, 6)}


@given(**SHAPES, seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5))
def test_each_epoch_is_a_permutation(num_rows, block_rows, window_blocks, seed, epoch):
    order = GlobalOrder(num_rows, seed, block_rows, window_blocks)
    assert np.array_equal(np.sort(order.rows(epoch, 0, num_rows)), np.arange(num_rows))


@given(**SHAPES, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_stretch_is_reached_without_what_came_before(num_rows, block_rows, window_blocks, seed, data):
    whole = GlobalOrder(num_rows, seed, block_rows, window_blocks).rows(1, 0, num_rows)
    start = data.draw(st.integers(0, num_rows))
    stop = data.draw(st.integers(start, num_rows))
    fresh = GlobalOrder(num_rows, seed, block_rows, window_blocks)
    assert np.array_equal(fresh.rows(1, start, stop), whole[start:stop])


def test_epochs_and_seeds_differ():
    orders = [GlobalOrder(500, seed).rows(epoch, 0, 500) for seed in (0, 1) for epoch in (0, 1)]
    for number, order in enumerate(orders):
        for other in orders[number + 1 :]:
            assert (order == other).mean() < 0.05


def test_a_window_touches_only_its_blocks():
    """What makes files larger than memory work: a stretch of positions lies in few blocks of rows."""
    order = GlobalOrder(10_000, 3, block_rows=100, window_blocks=4)
    rows = order.rows(0, 0, 400)
    assert len(np.unique(rows // 100)) == 4
    assert not np.array_equal(rows, np.sort(rows))


def test_shuffle_is_uniform_when_data_fit_one_window():
    """Mean position of each row over 400 epochs: within 5 standard errors of the middle."""
    count, epochs = 50, 400
    order = GlobalOrder(count, 9, block_rows=8)
    positions = np.stack([np.argsort(order.rows(epoch, 0, count)) for epoch in range(epochs)])
    standard_error = np.sqrt((count**2 - 1) / 12 / epochs)
    assert np.abs(positions.mean(axis=0) - (count - 1) / 2).max() < 5 * standard_error


def test_the_order_never_changes_between_versions():
    """Checkpoints resume in the middle of an epoch: a changed order would show rows twice."""
    assert GlobalOrder(12, 7).rows(2, 0, 12).tolist() == KNOWN_ORDER


KNOWN_ORDER = [1, 0, 3, 10, 6, 8, 11, 5, 7, 4, 9, 2]


def test_positions_outside_are_an_error():
    with pytest.raises(IndexError):
        GlobalOrder(10, 0).rows(0, 5, 11)


@given(size=st.integers(0, 100), world_size=st.integers(1, 9))
def test_rank_slices_tile_the_batch(size, world_size):
    slices = [rank_slice(size, rank, world_size) for rank in range(world_size)]
    assert slices[0][0] == 0
    assert slices[-1][1] == size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(slices))
    lengths = [stop - start for start, stop in slices]
    assert max(lengths) - min(lengths) <= 1
