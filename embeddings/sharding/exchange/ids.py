"""Sending of ids to the ranks that hold their rows: one exchange if ranks share memory, where TorchRec needs three."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable
from torchrec.distributed.types import Awaitable, NoWait

from embeddings.sharding.exchange.shm_transport import HostMemory, host_memory


def in_one_exchange(distribution: Any) -> Any:
    """Return TorchRec's input distribution with its all-to-all replaced by :class:`IdExchange`, if it has one."""
    if isinstance(getattr(distribution, "_dist", None), KJTAllToAll):
        distribution._dist = IdExchange(distribution._dist)
    return distribution


class IdExchange(KJTAllToAll):
    """TorchRec's KJTAllToAll, which sends features to their ranks, through shared memory if the ranks share any."""

    def __init__(self, torchrecs: KJTAllToAll) -> None:
        super().__init__(torchrecs._pg, torchrecs._splits, torchrecs._stagger)
        self._order = _order(dist.get_world_size(self._pg), self._stagger)

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        # Not in forward, which TorchRec's pipelines replace by an exchange of all modules over the network.
        shared = host_memory(self._pg) if features.values().device.type == "cpu" else None
        # CollectiveCheck refuses batch sizes that vary between features.
        if shared is None or features.variable_stride_per_key():
            return super().__call__(features)
        return NoWait(self._exchanged(features, shared))

    def _exchanged(self, features: KeyedJaggedTensor, shared: HostMemory) -> Received:
        rank, ends, weights = dist.get_rank(self._pg), self._splits_cumsum, features.weights_or_none()
        lengths = features.lengths().view(len(features.keys()), features.stride())
        starts = features.offset_per_key()
        sent = [lengths, features.values(), torch.tensor(starts)] + ([] if weights is None else [weights])
        first, last = ends[rank], ends[rank + 1]
        # Every rank reads the ids of all ranks and picks its own, so each rank copies its ids once, not once per rank.
        gathered = shared.exchange("ids", *sent)
        bounds_of = [of_rank[2][first : last + 1].tolist() for of_rank in gathered]
        by_rank = [gathered[number] for number in self._order]
        pieces = [
            (number, slice(bounds_of[number][feature], bounds_of[number][feature + 1]))
            for feature in range(last - first)
            for number in self._order
        ]
        bags = torch.cat([of_rank[0][first:last] for of_rank in by_rank], dim=1)
        received = KeyedJaggedTensor(
            keys=features.keys()[first:last],
            values=_joined([gathered[number][1][piece] for number, piece in pieces], features.values()),
            weights=None
            if weights is None
            else _joined([gathered[number][3][piece] for number, piece in pieces], weights),
            lengths=bags.view(-1),
            stride=bags.shape[1],
        )
        return Received(
            received,
            sent=[starts[end] - starts[start] for start, end in itertools.pairwise(ends)],
            received=[bounds[-1] - bounds[0] for bounds in bounds_of],
            batch_sizes=[of_rank[0].shape[1] for of_rank in gathered],
        )


class Received(KJTAllToAllTensorsAwaitable):
    """Features that have arrived; TorchRec reads each rank's number of ids and samples from this class."""

    def __init__(
        self, features: KeyedJaggedTensor, *, sent: list[int], received: list[int], batch_sizes: list[int]
    ) -> None:
        Awaitable.__init__(self)
        self._features = features
        self._input_splits, self._output_splits = {"values": sent}, {"values": received}
        self._stride_per_rank: list[int] | None = batch_sizes
        self._recat: Tensor | None = None

    def clear_inputs(self) -> int:
        """Return 0, the number of bytes freed: this object does not keep the tensors that were sent."""
        return 0

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._features


def _order(world_size: int, stagger: int) -> list[int]:
    """Return ranks in the order in which their samples are concatenated.

    First come the ranks with local rank 0 of all hosts, then all with local rank 1, and so on.
    """
    on_host = world_size // stagger
    return [local_rank + on_host * host for local_rank in range(on_host) for host in range(stagger)]


def _joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else like.new_empty(0)
