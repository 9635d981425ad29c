"""Memory that ranks of one host share: what is shared is read, and nobody waits for the missing."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta

import pytest
import torch

from tests.support import forked

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("ranks")]

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
PATIENCE = timedelta(seconds=300)


def tensors_of(rank, exchange):
    """What this rank shares: other sizes each time, none, empty ones, and views that are not contiguous."""
    generator = torch.Generator().manual_seed(1000 * rank + exchange)
    sizes = torch.randint(0, 40_000, (exchange % 4,), generator=generator).tolist()
    flat = [torch.randint(0, 2, (size,), generator=generator) for size in sizes]
    found = [value.to(DTYPES[(exchange + number) % len(DTYPES)]) for number, value in enumerate(flat)]
    wide = torch.randn(7 + rank, 12, generator=generator)
    return [*found, torch.empty(0, 3), torch.tensor(rank), wide[:, 2:5], wide.T]


def share_often():
    """Faults: (exchange, rank) where what was read is not what that rank gave."""
    import torch.distributed as dist

    from embeddings.sharding.exchange.shm_transport import host_memory

    shared = host_memory(dist.group.WORLD)
    assert shared is not None
    rank, faults = dist.get_rank(), []
    for exchange in range(40):
        found = shared.exchange(f"exchange {exchange}", *tensors_of(rank, exchange))
        if rank == exchange % dist.get_world_size():
            time.sleep(0.01)  # Others run ahead, as far as they may.
        for other, theirs in enumerate(found):
            expected = tensors_of(other, exchange)
            same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(theirs, expected, strict=True)]
            faults += [] if all(same) else [(exchange, other)]
    return faults


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_read_what_others_shared(ranks, world_size):
    assert ranks(world_size).run(share_often) == [[]] * world_size


def collectives(by_network):
    """Each collective once, with parts that differ in size and of which some are empty or stand side by side."""
    import contextlib

    import torch.distributed as dist

    from embeddings.sharding.exchange.collectives import all_gather, all_reduce, all_to_all
    from embeddings.sharding.exchange.shm_transport import host_memory
    from tests.support.by_network import exchanges_by_network

    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = torch.Generator().manual_seed(rank)

    def part(of, to):
        return torch.randn(3 * of + to, 4, generator=values)

    with exchanges_by_network() if by_network else contextlib.nullcontext():
        assert (host_memory(dist.group.WORLD) is None) == by_network
        whole = [part(rank, to) for to in range(world_size)]
        blocks = [[value[:, :1], value[:, 1:3], value[:, 3:]] for value in whole]
        shapes = [(3 * of + rank, 4) for of in range(world_size)]
        sent = torch.cat(all_to_all("whole", whole, shapes, dist.group.WORLD))
        side_by_side = torch.cat(all_to_all("blocks", blocks, shapes, dist.group.WORLD))
        gathered = all_gather("gathered", whole[0], [(3 * of, 4) for of in range(world_size)], dist.group.WORLD)
        gathered = torch.cat(gathered)
        whole_numbers = all_reduce("sum", torch.arange(1001.0) * (rank + 1))
        reals = all_reduce("reals", torch.randn(3, 997, generator=values))
        scalar = all_reduce("scalar", torch.tensor(rank + 1.0))
        return sent, side_by_side, gathered, whole_numbers, scalar, reals


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shared_memory_and_network_give_the_same(ranks, world_size):
    shared = ranks(world_size).run(collectives, world_size == 1)
    for rank, (mine, theirs) in enumerate(zip(shared, ranks(world_size).run(collectives, True), strict=True)):
        sent, side_by_side, gathered, total, scalar, _ = mine
        assert torch.equal(sent, side_by_side)
        assert len(sent) == sum(3 * of + rank for of in range(world_size))
        assert len(gathered) == sum(3 * of for of in range(world_size))
        assert torch.equal(total, torch.arange(1001.0) * sum(range(1, world_size + 1)))
        assert scalar.item() == sum(range(1, world_size + 1))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert torch.equal(mine[-1], shared[0][-1])


def own_group(**keywords):
    import torch.distributed as dist

    return dist.new_group(backend="gloo", **keywords)


def disagree():
    """The second of two ranks is at another exchange: what the first is told, and the second."""
    import torch.distributed as dist

    from embeddings.sharding.exchange.shm_transport import host_memory

    shared = host_memory(own_group())
    with pytest.raises(RuntimeError, match="same order") as caught:
        shared.exchange("this" if dist.get_rank() == 0 else "that", torch.zeros(3))
    return str(caught.value)


def test_ranks_at_different_exchanges_are_told(ranks):
    first, second = ranks(2).run(disagree)
    assert "rank 1 of the process group is at exchange 0 (that), this one at 0 (this)" in first
    assert "rank 0 of the process group is at exchange 0 (this), this one at 0 (that)" in second


def come_too_late():
    import torch.distributed as dist

    from embeddings.sharding.exchange.shm_transport import host_memory

    shared = host_memory(own_group(timeout=PATIENCE))
    shared._set_timeout(1.0)
    caught = None
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match="rank 1 of the process group did not come to exchange 0") as caught:
            shared.exchange("alone", torch.zeros(3))
    dist.barrier()
    return None if caught is None else str(caught.value)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(ranks):
    message, _ = ranks(2).run(come_too_late)
    assert "within 1 seconds" in message


def connect_without(what):
    """Whether the ranks share memory where the last one cannot, and a sum that needs it or the network."""
    import warnings

    import torch.distributed as dist

    from embeddings.sharding.exchange import shm_transport
    from embeddings.sharding.exchange.collectives import all_reduce

    last, group = dist.get_rank() == dist.get_world_size() - 1, own_group()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if last and what == "another host":
            patch.setattr(shm_transport, "_host", lambda: ["another", 1, 1])
        if last and what == "switched off":
            patch.setenv(shm_transport.SWITCH, "0")
        if last and what == "another user":
            patch.setattr(os, "getuid", lambda: 12345)
            patch.setattr(shm_transport, "_host", list)
        if not last and what == "another user":
            patch.setattr(shm_transport, "_host", list)
        shared = shm_transport.host_memory(group) is not None
    told = [str(warning.message) for warning in caught if "cannot share memory" in str(warning.message)]
    return shared, all_reduce("sum", torch.ones(5), group).tolist(), told


@pytest.mark.parametrize("what", ["nothing", "another host", "switched off", "another user"])
def test_all_ranks_share_memory_or_none_does(ranks, what):
    found = ranks(4).run(connect_without, what)
    assert [shared for shared, _, _ in found] == [what == "nothing"] * 4
    assert [total for _, total, _ in found] == [[4.0] * 5] * 4
    told = [message for _, _, messages in found for message in messages]
    assert len(told) == (what == "another user")
    assert all("wanted to be a rank of a run of user" in message and "rank 3: user" in message for message in told)


def die_at_the_second(rank, store, pipe):
    import torch.distributed as dist

    from embeddings.sharding.exchange.shm_transport import host_memory
    from trainer.runs.failures import classify

    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=PATIENCE)
    shared = host_memory(dist.group.WORLD)
    shared.exchange("first", torch.ones(4))
    if rank == 1:
        os._exit(7)
    try:
        # It may be seen while this is sent, or while the answer is waited for.
        for _ in range(2):
            shared.exchange("second", torch.ones(4))
    except ConnectionResetError as error:
        pipe.send((str(error), classify(error).code))
    os._exit(0)


def test_a_rank_that_dies_ends_the_waiting_of_others(tmp_path):
    here, there = multiprocessing.Pipe()
    store = f"file://{tmp_path}/store"
    processes = [forked.start(die_at_the_second, rank, store, there, log=tmp_path / f"{rank}.txt") for rank in (0, 1)]
    there.close()
    for process in processes:
        process.join(PATIENCE.total_seconds())
    assert processes[1].exitcode == 7
    message, code = here.recv()
    assert "rank 1 of the process group has ended" in message
    assert code == "peer_lost"
