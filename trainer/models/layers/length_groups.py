"""Groups of lists with similar lengths, so that padded tensors of a group contain little padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORTH_A_GROUP = 1 / 8
"""Least share of padded positions that a new group must save: each group costs calls and copies."""


@dataclass(frozen=True)
class LengthGroup:
    """A group of lists, out of many lists whose values are concatenated.

    Attributes:
        samples: int64 [b], numbers of the group's lists among all lists, ascending.
        lengths: int64 [b], length of each list of the group.
        places: int64 [n], index of each of the group's values among the values of all lists.
        positions: int64 [n], position of each of the group's values in its own list.
    """

    samples: Tensor
    lengths: Tensor
    places: Tensor
    positions: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Return the group's rows [n, d], out of ``values``, the rows of all lists [N, d]."""
        return values if len(self.places) == len(values) else values.index_select(0, self.places)


def length_groups(lengths: Tensor, total: int) -> list[LengthGroup]:
    """Return groups of the lists that are not empty; the first group has the longest lists.

    Lists at most half as long as the longest of a group go to the next group, if that saves enough padding. On a GPU
    all lists are in one group, because reading lengths would wait for the GPU.

    ``lengths``: of the lists, int64 [b]. ``total``: their sum.
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
    """Return one group with all lists, including empty lists; ``total``: sum of the lengths."""
    samples, places = (torch.arange(size, device=lengths.device) for size in (len(lengths), total))
    return LengthGroup(samples, lengths, places, _positions(lengths, total))


def _positions(lengths: Tensor, total: int) -> Tensor:
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=total)
    return torch.arange(total, device=lengths.device) - starts


def _end_of_group(lengths: Tensor) -> int:
    """Return the number of lists in the first group; ``lengths`` must descend."""
    longest, count = int(lengths[0]), len(lengths)
    long = int((lengths > longest // 2).sum())
    saved = (count - long) * (longest - int(lengths[long])) if long < count else 0
    return long if saved >= WORTH_A_GROUP * count * longest else count


def put_back(parts: list[Tensor], places: list[Tensor], size: int) -> Tensor:
    """Return a tensor [size, d] with the rows of each part at the indices in its ``places``, and zeros elsewhere.

    The places of a part must ascend.
    """
    if len(parts) == 1 and len(parts[0]) == size:
        return parts[0]
    rows = torch.cat(parts)
    return rows.new_zeros(size, rows.shape[1]).index_copy(0, torch.cat(places), rows)
