"""A check that reports bad input on one rank to all ranks, so that none waits for it in vain.

If one rank raised inside ``forward``, the others would wait in a collective until the process group's timeout. So each
rank checks its input before distributing it, and distributes an empty batch if the input is bad. One small all-reduce,
which runs while ids are exchanged, tells all ranks, and all raise before the lookup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from embeddings.sharding.exchange.shm_transport import host_memory
from embeddings.tables.config import TableConfig


class OtherRankFailed(RuntimeError):
    """Another rank refused its input; that rank's own error says why."""


class CollectiveCheck:
    """A check that no rank has bad input: begun when input is distributed, read by :meth:`count` before the lookup."""

    def __init__(self, problem: str | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._problem = problem
        self._work: dist.Work | None = None
        self._highest = torch.zeros(1, dtype=torch.int64)
        if group is not None and dist.get_world_size(group) > 1:
            failed = dist.get_rank(group) + 1 if problem is not None else 0
            shared = host_memory(group) if device.type == "cpu" else None
            if shared is not None:
                self._highest = torch.cat([flag for (flag,) in shared.exchange("vote", torch.tensor([failed]))]).amax()
                return
            self._highest = torch.tensor([failed], dtype=torch.int64, device=device)
            self._work = dist.all_reduce(self._highest, dist.ReduceOp.MAX, group=group, async_op=True)

    def count(self) -> None:
        """Raise ValueError with this rank's problem, or OtherRankFailed if only other ranks have a problem."""
        if self._work is not None:
            self._work.wait()
        if self._problem is not None:
            raise ValueError(self._problem)
        if highest := int(self._highest.item()):
            raise OtherRankFailed(f"rank {highest - 1} refused its input, so no rank goes on: its own error says why")


def problem_of(features: KeyedJaggedTensor, readers: Mapping[str, Sequence[TableConfig]], fatal: bool) -> str | None:
    """Describe the fault in this rank's input; None if it has none.

    ``readers`` are the tables that each feature is looked up in. Unless ``fatal``, ids outside them are no fault.
    """
    if features.variable_stride_per_key():
        return "a batch size that varies between features is not available yet: give every feature one"
    if not fatal:
        return None
    values = features.values()
    if not values.numel():
        return None
    # Most input is valid for every table, which one pass over all ids shows.
    low, high = (int(bound) for bound in values.aminmax())
    if low >= 0 and all(high < table.num_rows for tables in readers.values() for table in tables):
        return None
    starts, num_features = features.offset_per_key(), len(features.keys())
    if len(values) % num_features == 0 and starts == list(range(0, len(values) + 1, len(values) // num_features)):
        # All features have the same number of ids, so one call gives all minima.
        lowest = values.view(num_features, -1).amin(1).tolist()
        highest = values.view(num_features, -1).amax(1).tolist()
        if all(
            low >= 0 and high < table.num_rows
            for feature, low, high in zip(features.keys(), lowest, highest, strict=True)
            for table in readers.get(feature, ())
        ):
            return None
    for number, feature in enumerate(features.keys()):
        ids = values[starts[number] : starts[number + 1]]
        if feature not in readers or not ids.numel():
            continue
        low, high = (int(bound) for bound in ids.aminmax())
        for table in readers[feature]:
            if low < 0 or high >= table.num_rows:
                return (
                    f"feature '{feature}': id {low if low < 0 else high} is not a row of table '{table.name}', which "
                    f"has {table.num_rows} rows: ids must lie in [0, rows); map unknown ids to row 1"
                )
    return None


def emptied(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a batch with the same number of samples and without ids."""
    size = 0 if features.variable_stride_per_key() else features.stride()
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[:0],
        weights=None if weights is None else weights[:0],
        lengths=torch.zeros(len(features.keys()) * size, dtype=torch.int64, device=features.values().device),
        stride=size,
    )
