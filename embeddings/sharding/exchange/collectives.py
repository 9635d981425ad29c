"""Collectives of tensors whose sizes may differ between ranks.

If all ranks are on one host they exchange through shared memory, else by gloo or NCCL. Either way gives the same bits,
since sums are made in rank order; only NCCL's all-reduce has an order of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from embeddings.sharding.exchange.shm_transport import Part, host_memory, joined


def all_to_all(
    what: str, parts: Sequence[Part], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send ``parts[r]`` to rank r, and return the tensors received, in rank order; a collective call.

    Read or copy the tensors of other ranks before the next collective, which may overwrite them.

    Args:
        what: the exchange's name, the same on every rank.
        parts: for each rank a tensor, or matrices to be joined along columns.
        shapes: shapes of the tensors that come from each rank. All have the dtype of ``parts``.
        group: the ranks that take part.
    """
    rank, own = dist.get_rank(group), joined(parts[dist.get_rank(group)])
    if len(parts) == 1:
        return [own]
    shared = host_memory(group) if own.device.type == "cpu" else None
    if shared is not None:
        by_rank = shared.exchange(what, *(own[:0] if number == rank else part for number, part in enumerate(parts)))
        return [own if number == rank else tensors[rank] for number, tensors in enumerate(by_rank)]
    sizes, flat = [math.prod(shape) for shape in shapes], [joined(part).reshape(-1) for part in parts]
    received = own.new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat(flat), sizes, [len(part) for part in flat], group=group)
    return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


def all_gather(what: str, local: Tensor, shapes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> list[Tensor]:
    """Return ``local`` of each rank, in rank order; a collective call.

    Arguments are as in :func:`all_to_all`; read or copy the result before the next collective, too.
    """
    shared = host_memory(group) if local.device.type == "cpu" else None
    if shared is not None:
        return [joined(remote) for (remote,) in shared.exchange(what, local)]
    # gloo's all-gather wants equal sizes.
    return all_to_all(what, [local] * len(shapes), shapes, group)


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the parts, added in order, so that every rank gets the same bits."""
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def all_reduce(what: str, local: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of ``local`` over all ranks, the same bits on each; a collective call.

    ``local`` has the same shape everywhere.
    """
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return local.clone()
    if local.device.type != "cpu":
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total
    if world_size == 2:
        return sum_in_rank_order(all_gather(what, local, [local.shape] * world_size, group))
    # Each rank sums one piece of the tensors of all ranks, so that no rank reads all of them.
    rank, pieces = dist.get_rank(group), local.reshape(-1).tensor_split(world_size)
    own = sum_in_rank_order(all_to_all(what, pieces, [pieces[rank].shape] * world_size, group))
    return torch.cat(all_gather(what, own, [piece.shape for piece in pieces], group)).view_as(local)
