"""Attempts with fewer or more workers than the one before, and runs that are told that their machine goes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.launch.detached_runs import everything, newest_step, wait_for, wait_for_end
from trainer.checkpoint.format import latest_valid
from trainer.launch.attempt import Attempt
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import train_rank
from trainer.runs import run_process
from trainer.runs.directory import Workers, read_run
from trainer.runs.protocol import (
    ATTEMPT_VARIABLE,
    EXIT_CANCELLED,
    EXIT_FILE,
    LOG_FILE,
    RUN_DIR_VARIABLE,
    STOP_SECONDS_VARIABLE,
)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

TWO = {"num_workers": 2, "min_workers": 1}
SPLIT = {"item": "row_wise", "user": "table_wise"}
LONG = {"epochs": 1000}  # none ends before it is ended


def start(run, warm_pool) -> None:
    (run.directory / EXIT_FILE).unlink(missing_ok=True)
    run_process.launch(run.directory, warm_pool=warm_pool)


def finish(run, warm_pool) -> None:
    start(run, warm_pool)
    assert wait_for_end(run.directory)["code"] == 0, (run.directory / LOG_FILE).read_text()[-6000:]


def preempt(run, **changes) -> int:
    told = {RUN_DIR_VARIABLE: str(run.directory), ATTEMPT_VARIABLE: str(changes.get("attempt", run.attempt))}
    told[STOP_SECONDS_VARIABLE] = str(changes.get("seconds", 300))
    command = [sys.executable, "-m", "trainer.runs.preemption"]
    return subprocess.run(command, env=os.environ | told, check=False).returncode


def openings(run, small) -> list[dict]:
    return [event for event in small.events(run.directory, "info") if "alpha" in event]


def test_a_sigterm_in_an_epoch_leaves_a_checkpoint_from_which_the_same_bits_come(
    make_run, small, warm_pool, pooled_ranks
) -> None:
    """To one rank, and by what Kubernetes runs in a pod that it ends; to the driver: test_run_on_host.py."""
    settings = {"resources": TWO, "sharding": SPLIT, "checkpoint": {"every_steps": 100_000}}
    step = 0
    for attempt in (1, 2):
        run = make_run("preempted", attempt=attempt, **settings, **LONG)
        start(run, warm_pool)
        (run.directory / "events.jsonl").touch()
        epochs = step // 25 + 1
        wait_for(lambda: len(small.metrics(run.directory, "train")) > epochs, run.directory)  # noqa: B023 - at once
        found = sorted(run_process.processes(run.directory), key=lambda process: process.name())
        assert [process.name() for process in found] == ["evenkeel-rank0", "evenkeel-rank1", "evenkeel-run"]
        if attempt == 1:
            os.kill(found[0].pid, signal.SIGTERM)
        else:
            assert preempt(run, attempt=1) == 0, "of an attempt before: nobody is told"
            assert preempt(run) == 0
            assert (run.directory / EXIT_FILE).exists(), "it waits for the end"
        ended = wait_for_end(run.directory)
        assert (ended["code"], ended["state"]) == (EXIT_CANCELLED, "cancelled"), (run.directory / LOG_FILE).read_text()
        assert run_process.processes(run.directory) == []
        assert newest_step(run.checkpoints) == latest_valid(run.checkpoints).step > step
        step = newest_step(run.checkpoints)

    settings["epochs"] = step // 25 + 2
    run = make_run("preempted", attempt=3, **settings)
    finish(run, warm_pool)
    whole = make_run("whole", **settings)
    assert execute(whole, pooled_ranks) == 0
    assert openings(run, small)[-1]["resumed_from_step"] == step
    mine, expected = everything(latest_valid(run.checkpoints)), everything(latest_valid(whole.checkpoints))
    assert [name for name in expected if not torch.equal(mine[name], expected[name])] == []


def test_attempts_go_on_with_fewer_workers_and_with_all_again(make_run, small, warm_pool, pooled_ranks) -> None:
    """The same batches in the same order: what differs is the order of sums, in the last bits of each step."""
    settings = {"resources": TWO, "sharding": SPLIT, "checkpoint": {"every_steps": 7}}
    run = make_run("elastic", **settings, **LONG)
    start(run, warm_pool)
    wait_for(lambda: newest_step(run.checkpoints) > 0, run.directory)
    next(one for one in run_process.processes(run.directory) if one.name() == "evenkeel-rank1").kill()
    assert wait_for_end(run.directory)["error"]["code"] == "worker_died"
    first = latest_valid(run.checkpoints).step

    run = make_run("elastic", attempt=2, workers=Workers(1, "a node is gone"), **settings, **LONG)
    assert (run.job.resources.num_workers, run.submitted.resources.num_workers) == (1, 2)
    start(run, warm_pool)
    wait_for(lambda: newest_step(run.checkpoints) > first + 14, run.directory)
    assert [one.name() for one in run_process.processes(run.directory) if "rank" in one.name()] == ["evenkeel-rank0"]
    assert run_process.terminate(run.directory, grace_seconds=200) is True
    assert "1 of 2 workers: a node is gone" in (run.directory / LOG_FILE).read_text()
    second = latest_valid(run.checkpoints).step

    settings["epochs"] = second // 25 + 2
    run = make_run("elastic", attempt=3, **settings)
    finish(run, warm_pool)
    told = openings(run, small)
    assert [event["resumed_from_step"] for event in told] == [None, first, second]
    assert [len(event["rows_per_rank"]["item"]) for event in told] == [2, 1, 2]
    assert "; 1 of 2 workers" in told[1]["message"]

    whole = make_run("whole", **settings)
    assert execute(whole, pooled_ranks) == 0
    mine, expected = latest_valid(run.checkpoints), latest_valid(whole.checkpoints)
    for exact in ("step", "evaluated", "loss_count"):
        assert mine.extra["position"][exact] == expected.extra["position"][exact]
    ours, theirs = everything(mine), everything(expected)
    # Which row was touched when is a matter of order and swaps alone: the same to the bit.
    for table in mine.tables:
        assert torch.equal(ours[f"{table}.last_update_step"], theirs[f"{table}.last_update_step"])
    # Rounding of float32 sums, grown over some hundred steps of Adam at a rate of 0.1.
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0.01, atol=0.01, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_what_one_rank_was_told_ends_the_run_before_it_publishes(make_run, small, monkeypatch) -> None:
    """As a rank of another host is told, whose directory this one does not see: nothing comes from the driver."""
    calls = itertools.count()
    monkeypatch.setattr(Attempt, "should_stop", lambda self: "a node is drained" if next(calls) > 30 else None)

    def ranks(run) -> None:
        with single_rank_group():
            train_rank(str(run.directory))

    run = make_run(publish={"collection": "items", "feature": "item", "gate": {"mode": "off"}}, **LONG)
    assert execute(run, ranks) == EXIT_CANCELLED
    assert run.cancel_file.read_text() == "a node is drained"
    assert latest_valid(run.checkpoints).step == 32
    assert small.events(run.directory, "publication") == []


def test_fewer_workers_are_of_the_attempt_and_not_of_the_job(make_run) -> None:
    run = make_run(resources=TWO, workers=Workers(1, "a node is gone"))
    again = read_run(run.directory)
    assert again.has_fewer_workers
    assert again.fewer_because == "a node is gone"
    assert not read_run(make_run("all", resources=TWO).directory).has_fewer_workers
    assert Path(again.directory) == run.directory


def test_a_notice_that_nobody_takes_does_not_keep_the_pod(make_run) -> None:
    run = make_run()
    assert preempt(run) == 0, "it has not begun"
    events = run.directory / "events.jsonl"
    events.touch()
    os.utime(events, (0, 0))
    assert preempt(run) == 0, "it has died"
    assert not run.cancel_file.exists()
    events.touch()
    assert preempt(run, seconds=0.1) == 1
    assert run.cancel_file.read_text() == "its machine shuts down"
    (run.directory / "run.json").unlink()
    assert preempt(run) == 0
