"""Groups of lists of about the same length."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.models.layers.length_groups import length_groups, one_group, put_back


@given(st.lists(st.integers(0, 40), max_size=30))
def test_each_list_that_is_not_empty_is_in_one_group_with_the_places_of_its_values(lengths):
    groups = length_groups(torch.tensor(lengths, dtype=torch.int64), sum(lengths))
    values = torch.arange(sum(lengths))
    parts = values.split(lengths)
    seen = []
    for group in groups:
        assert group.lengths.tolist() == [lengths[sample] for sample in group.samples]
        assert group.positions.tolist() == [at for sample in group.samples for at in range(lengths[sample])]
        assert torch.equal(group.of(values), values[group.places])
        assert torch.equal(values[group.places], torch.cat([parts[sample] for sample in group.samples]))
        assert group.samples.tolist() == sorted(group.samples.tolist())
        seen += group.samples.tolist()
    assert sorted(seen) == [sample for sample, length in enumerate(lengths) if length]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_group_after_the_first_has_lists_of_half_the_length(lengths):
    groups = length_groups(torch.tensor(lengths), sum(lengths))
    for one, other in itertools.pairwise(groups):
        assert int(other.lengths.max()) <= int(one.lengths.max()) // 2 < int(one.lengths.min())


def test_lists_are_parted_where_that_saves_enough():
    def sizes(*lengths: int) -> list[int]:
        return [len(group.samples) for group in length_groups(torch.tensor(lengths), sum(lengths))]

    assert sizes(50, 4, 40, 5, 26) == [3, 2]
    assert sizes(*[50] * 20, 20) == [21]  # 30 of 1,050 positions
    assert sizes(8, 1, 1, 3, 3) == [1, 2, 2]
    assert sizes(0, 0) == []


@given(st.lists(st.integers(0, 40), max_size=30))
def test_one_group_has_all_lists_in_their_order(lengths):
    group = one_group(torch.tensor(lengths, dtype=torch.int64), sum(lengths))
    assert group.samples.tolist() == list(range(len(lengths)))
    assert group.places.tolist() == list(range(sum(lengths)))
    assert group.lengths.tolist() == lengths
    assert group.positions.tolist() == [at for length in lengths for at in range(length)]


def test_rows_are_put_back_at_their_places_with_their_gradients():
    parts = [torch.tensor([[1.0], [2.0]], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)]
    found = put_back(parts, [torch.tensor([3, 0]), torch.tensor([2])], 4)
    assert found.flatten().tolist() == [2, 0, 3, 1]
    (found.flatten() * torch.tensor([10.0, 20.0, 30.0, 40.0])).sum().backward()
    assert parts[0].grad.flatten().tolist() == [40, 10]
    assert parts[1].grad.flatten().tolist() == [30]


def test_what_is_whole_is_not_copied():
    rows = torch.ones(3, 2)
    assert put_back([rows], [torch.arange(3)], 3) is rows
    assert one_group(torch.tensor([1, 0, 2]), 3).of(rows) is rows
