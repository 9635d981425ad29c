"""Checkpoints written in the background: of the moment they were asked for, one at a time, and none of them half."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import forked
from trainer.checkpoint import async_writer
from trainer.checkpoint import format as checkpoint_format
from trainer.checkpoint.async_writer import BackgroundSaver
from trainer.checkpoint.format import Checkpoint, CheckpointError, TableShard, latest_valid, save
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks


def make_shard(num_rows=101, dim=4, row_start=0, total=None):
    """Rows whose state is strided, as that of a kernel is."""
    state = torch.arange(num_rows * 2 * dim, dtype=torch.float32).reshape(num_rows, 2 * dim)
    weight = torch.arange(num_rows * dim, dtype=torch.float32).reshape(num_rows, dim) - 7
    last = torch.arange(num_rows, dtype=torch.int32)
    total = num_rows if total is None else total
    return TableShard("t", total, row_start, weight, {"m": state[:, :dim], "last_update_step": last})


def everything(checkpoint):
    weight, state = checkpoint.read_rows("t")
    return {"weight": weight, **state, **checkpoint.read_dense()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.fixture
def held(monkeypatch):
    """An event that every write in the background waits for."""
    event = threading.Event()

    def wait_then_save(*arguments, **keywords):
        assert event.wait(300)
        return save(*arguments, **keywords)

    monkeypatch.setattr(async_writer, "save", wait_then_save)
    return event


def test_it_is_of_the_moment_it_was_asked_for(tmp_path, held):
    shard, dense, extra = make_shard(), {"bias": torch.ones(3)}, {"history": [1]}
    expected = everything(Checkpoint(save(tmp_path / "sync", step=5, tables=[shard], dense=dense, extra=extra)))
    with BackgroundSaver() as saver:
        saver.save(tmp_path / "async", step=5, tables=[shard], dense=dense, extra=extra)
        for value in (shard.weight, *shard.state.values(), dense["bias"]):
            value.zero_()
        extra["history"].append(2)
        assert latest_valid(tmp_path / "async") is None
        held.set()
        assert saver.wait() == tmp_path / "async" / "step-000000000005"
        assert saver.staged_bytes == shard.nbytes
    found = latest_valid(tmp_path / "async")
    assert_same(everything(found), expected)
    assert found.extra == {"history": [1]}
    assert saver.staged_bytes == 0


def test_at_most_one_is_in_flight(tmp_path, monkeypatch):
    begun, overlapped = {step: threading.Event() for step in (1, 2, 3)}, []

    def save_slowly(*arguments, step, **keywords):
        begun[step].set()
        # Had the next one begun meanwhile, this would see it.
        overlapped.append(step < 3 and begun[step + 1].wait(0.1))
        return save(*arguments, step=step, **keywords)

    monkeypatch.setattr(async_writer, "save", save_slowly)
    with BackgroundSaver() as saver:
        for step in (1, 2, 3):
            saver.save(tmp_path, step=step, tables=[make_shard()], dense={}, extra={})
    assert overlapped == [False, False, False]
    assert latest_valid(tmp_path).step == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_an_error_surfaces_once_and_the_next_save_works(tmp_path):
    (tmp_path / "file").touch()
    saver = BackgroundSaver()
    saver.save(tmp_path / "file" / "inside", step=1, tables=[make_shard()], dense={}, extra={})
    with pytest.raises(CheckpointError, match=r"step 1 .* could not be written .*Not a directory"):
        saver.save(tmp_path, step=2, tables=[make_shard()], dense={}, extra={})
    assert not saver.failed
    assert not list(tmp_path.glob("step-*"))
    saver.save(tmp_path, step=3, tables=[make_shard()], dense={}, extra={})
    saver.close()
    assert latest_valid(tmp_path).step == 3


def test_an_error_on_its_way_is_not_hidden_by_one_of_a_save(tmp_path):
    (tmp_path / "file").touch()

    def save_and_raise(error):
        with BackgroundSaver() as saver:
            saver.save(tmp_path / "file" / "inside", step=1, tables=[make_shard()], dense={}, extra={})
            if error is not None:
                raise error

    with pytest.warns(RuntimeWarning, match="Not a directory"), pytest.raises(KeyError, match="mine"):
        save_and_raise(KeyError("mine"))
    with pytest.raises(CheckpointError, match="Not a directory"):
        save_and_raise(None)


def fail_without_a_group():
    def fail():
        with BackgroundSaver() as saver:
            dist.barrier(saver._group)  # one that ends it while the other still connects is another failure
            dist.destroy_process_group(saver._group)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()


def test_an_error_on_its_way_is_not_hidden_by_a_group_that_was_ended_beneath_it(ranks):
    """As Ray ends the groups of those whose peer has died: the run would fail for good, as if its input were bad."""
    ranks(2).run(fail_without_a_group)


def killed_while_it_writes(folder):
    """Many small pieces, each fsynced: the write takes long enough to be met half done."""
    checkpoint_format.PIECE_BYTES = 64 * 256
    weight = torch.zeros(100_000, 16)
    saver = BackgroundSaver()
    saver.save(folder, step=1, tables=[TableShard("t", 64, 0, torch.ones(64, 16), {})], dense={}, extra={})
    saver.save(folder, step=2, tables=[TableShard("t", len(weight), 0, weight, {})], dense={}, extra={})
    while not list(folder.glob(".writing-*/*-00003.safetensors")):
        assert not (folder / "step-000000000002").exists()
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_kill_9_while_it_is_written_leaves_the_previous_one(tmp_path_factory, tmp_path):
    log = tmp_path_factory.mktemp("log") / "log.txt"
    process = forked.start(killed_while_it_writes, tmp_path, log=log)
    process.join()
    assert process.exitcode == -signal.SIGKILL, log.read_text()
    assert latest_valid(tmp_path).step == 1
    assert list(tmp_path.glob(".writing-*"))
    with BackgroundSaver() as saver:
        saver.save(tmp_path, step=3, tables=[make_shard()], dense={}, extra={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000001", "step-000000000003"]


def save_and_reduce(directory, failing=None):
    """Both ranks save in the background while their main threads speak to each other; what they were told."""
    import torch.distributed as dist

    rank = dist.get_rank()
    edges = [0, 51, 101]
    shard = make_shard(edges[rank + 1] - edges[rank], row_start=edges[rank], total=101)
    if rank == failing:
        shard = TableShard("t", 101, edges[rank], shard.weight[:-1], {k: v[:-1] for k, v in shard.state.items()})
    told, sums = "", []
    saver = BackgroundSaver()
    try:
        for step in (1, 2, 3):
            saver.save(directory, step=step, tables=[shard], dense={"rank": torch.tensor(rank)}, extra={})
            for number in range(50):
                total = torch.tensor([number + rank], dtype=torch.float64)
                dist.all_reduce(total)
                sums.append(total.item() == 2 * number + 1)
        saver.close()
    except CheckpointError as error:
        told = str(error)
    return told, all(sums)


def test_ranks_save_while_they_train(ranks, tmp_path):
    assert ranks(2).run(save_and_reduce, str(tmp_path)) == [("", True), ("", True)]
    found = latest_valid(tmp_path)
    assert (found.step, len(list(tmp_path.iterdir()))) == (3, 3)
    weight, _ = found.read_rows("t")
    assert torch.equal(weight, torch.cat([make_shard(51).weight, make_shard(50).weight]))


def test_a_rank_that_fails_is_told_to_all(ranks, tmp_path):
    results = ranks(2).run(save_and_reduce, str(tmp_path), 0)
    assert all("rows from 50 are held nowhere" in told and sums for told, sums in results), results
    assert not list(tmp_path.iterdir())


def test_a_run_whose_checkpoint_cannot_be_written_ends_soon_and_says_why(make_run, small, monkeypatch):
    def full(*arguments, step, **keywords):
        if step == 10:
            raise CheckpointError("checkpoint of step 10 could not be written (No space left on device)")
        return save(*arguments, step=step, **keywords)

    monkeypatch.setattr(async_writer, "save", full)
    run = make_run(epochs=4)
    assert execute(run, start_ranks) != 0
    (error,) = small.events(run.directory, "error")
    assert "step 10 could not be written" in error["message"]
    # Not at the end of its 100 steps: where the next checkpoint was due at the latest.
    assert latest_valid(run.checkpoints) is None


@pytest.mark.slow
def test_in_the_background_or_not_a_run_ends_with_the_same_bits(make_run):
    ends = []
    for asynchronous in (True, False):
        run = make_run(f"run-{asynchronous}", checkpoint={"every_steps": 7, "asynchronous": asynchronous})
        assert execute(run, start_ranks) == 0
        assert len(list(run.checkpoints.glob("step-*"))) == 3
        ends.append(
            {table: latest_valid(run.checkpoints).read_rows(table) for table in latest_valid(run.checkpoints).tables}
        )
    for table, (weight, state) in ends[0].items():
        assert_same({"weight": weight, **state}, {"weight": ends[1][table][0], **ends[1][table][1]})
