"""Lists of about the same length together: little of what is computed over them is padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORTH_A_GROUP = 1 / 8
"""A group of its own has what saves so much of the positions to compute: it costs calls and copies."""


@dataclass(frozen=True)
class LengthGroup:
    """Lists of a group.

    Attributes:
        samples: int64 [b], which lists of all, ascending.
        lengths: int64 [b], of each.
        places: int64 [n], where their values stand in those of all lists.
        positions: int64 [n], and where in their own.
    """

    samples: Tensor
    lengths: Tensor
    places: Tensor
    positions: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Return the group's rows of those of all lists [N, d], [n, d]."""
        return values if len(self.places) == len(values) else values.index_select(0, self.places)


def length_groups(lengths: Tensor, total: int) -> list[LengthGroup]:
    """Return the lists that are not empty, the longest in the first group.

    Lists at most half as long as a group's longest go to the next, where that saves padding enough. On a GPU, which to
    ask for a length is to wait for, all lists are in one group.

    Args:
        lengths: int64 [b].
        total: their sum.
    """
    if lengths.device.type == "cuda":
        return [one_group(lengths, total)]
    starts = lengths.cumsum(0) - lengths
    ordered, order = lengths.sort(descending=True, stable=True)
    first, end = 0, int((lengths > 0).sum())
    groups = []
    while first < end:
        after = first + _end_of_group(ordered[first:end])
        samples = order[first:after].sort().values
        own = lengths[samples]
        positions = _positions(own, int(own.sum()))
        groups.append(LengthGroup(samples, own, torch.repeat_interleave(starts[samples], own) + positions, positions))
        first = after
    return groups


def one_group(lengths: Tensor, total: int) -> LengthGroup:
    """Return all lists, also the empty ones, in one group; ``total`` is the sum of the lengths."""
    samples, places = (torch.arange(size, device=lengths.device) for size in (len(lengths), total))
    return LengthGroup(samples, lengths, places, _positions(lengths, total))


def _positions(lengths: Tensor, total: int) -> Tensor:
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=total)
    return torch.arange(total, device=lengths.device) - starts


def _end_of_group(lengths: Tensor) -> int:
    """Return the size of the first group of these descending lengths."""
    longest, count = int(lengths[0]), len(lengths)
    long = int((lengths > longest // 2).sum())
    saved = (count - long) * (longest - int(lengths[long])) if long < count else 0
    return long if saved >= WORTH_A_GROUP * count * longest else count


def put_back(parts: list[Tensor], places: list[Tensor], size: int) -> Tensor:
    """Return [size, d] with the rows of each part at its places, and zeros where there is none.

    A part's places are ascending.
    """
    if len(parts) == 1 and len(parts[0]) == size:
        return parts[0]
    rows = torch.cat(parts)
    return rows.new_zeros(size, rows.shape[1]).index_copy(0, torch.cat(places), rows)
