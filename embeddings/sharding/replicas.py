"""Data-parallel tables: every rank holds all rows, and applies every rank's gradients in the same order.

DistributedDataParallel cannot do this: it averages dense gradients of parameters, and rows of EmbeddingTables are not
parameters. Instead backward sends each rank's (ids, output gradient) to all ranks, and
:meth:`ReplicatedTables.step` applies the same records everywhere. Replicas stay equal bit for bit, since a kernel
always sums in the same order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.layout import Record
from embeddings.sharding.exchange.collectives import all_gather
from embeddings.sharding.exchange.shm_transport import host_memory


class ReplicatedTables(EmbeddingTables):
    """EmbeddingTables of which each rank of ``group`` holds a copy; ``replica`` is this rank's number in the group.

    ``backward`` is a collective call.
    """

    def __init__(self, *arguments: Any, group: dist.ProcessGroup, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._group = group
        self.replica = dist.get_rank(group)

    def _record(self, record: Record) -> None:
        self._records.extend(gather_records(record, self._group))


class Replicas(nn.Module):
    """A lookup of replicated tables, with an attribute ``module``, as TorchRec expects of DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: Any) -> Any:
        return self.module(features)

    def flush(self) -> None:
        """Do nothing: there is no cache of rows."""

    def purge(self) -> None:
        """Do nothing: there is no cache of rows."""


def gather_records(record: Record, group: dist.ProcessGroup) -> list[Record]:
    """Return the records of all ranks, in rank order; a collective call. Records may differ in size, and be empty."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return [record]
    parts = {name: value for name, value in record._asdict().items() if isinstance(value, Tensor)}
    shared = host_memory(group) if record.grad.device.type == "cpu" else None
    if shared is not None:
        # Copy the records out of shared memory, because they are kept until the step.
        everyone = shared.exchange("records", *parts.values())
        return [
            record if number == dist.get_rank(group)
            else record._replace(**dict(zip(parts, (value.clone() for value in remote), strict=True)))
            for number, remote in enumerate(everyone)
        ]  # fmt: skip
    sizes = torch.tensor([len(value) for value in parts.values()], dtype=torch.int64, device=record.grad.device)
    gathered = [torch.empty_like(sizes) for _ in range(world_size)]
    dist.all_gather(gathered, sizes, group=group)
    lengths = [dict(zip(parts, row.tolist(), strict=True)) for row in gathered]
    by_rank: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
    for dtype in sorted({value.dtype for value in parts.values()}, key=str):
        same = {name: value for name, value in parts.items() if value.dtype == dtype}
        counts = [[row[name] * math.prod(value.shape[1:]) for name, value in same.items()] for row in lengths]
        flat = torch.cat([value.reshape(-1) for value in same.values()])
        for rank, piece in enumerate(all_gather("records", flat, [(sum(row),) for row in counts], group)):
            for (name, value), elements in zip(same.items(), piece.split(counts[rank]), strict=True):
                by_rank[rank][name] = elements.view(lengths[rank][name], *value.shape[1:])
    return [record._replace(**values) for values in by_rank]
