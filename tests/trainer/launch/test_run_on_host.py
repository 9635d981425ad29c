"""The detached run with ranks on this host, as the service starts it: killed in any way, it leaves no process and ends
with the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from tests.trainer.launch.detached_runs import everything, newest_step, wait_for, wait_for_end
from trainer.checkpoint.format import latest_valid
from trainer.launch.driver import execute
from trainer.launch.on_host import NICENESS_VARIABLE
from trainer.runs import run_process
from trainer.runs.protocol import EXIT_CANCELLED, EXIT_FAILED, EXIT_FILE, EXIT_RETRYABLE, LOG_FILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO = {"num_workers": 2, "cpus_per_worker": 1}
SPLIT = {"item": "row_wise", "user": "table_wise"}


def ranks_of(directory: Path) -> list[psutil.Process]:
    found = [process for process in run_process.processes(directory) if process.name().startswith("evenkeel-rank")]
    return sorted(found, key=lambda process: process.name())


def start(run, warm_pool) -> int:
    (run.directory / EXIT_FILE).unlink(missing_ok=True)
    return run_process.launch(run.directory, warm_pool=warm_pool)


def test_a_run_survives_the_death_of_a_rank_and_of_its_whole_tree(
    make_run, small, tmp_path, warm_pool, pooled_ranks, monkeypatch
):
    uri = small.write_rows(tmp_path / "rare.parquet", num_items=3000)
    settings = {"uri": uri, "checkpoint": {"every_steps": 7}, "resources": TWO, "sharding": SPLIT}
    long = {"epochs": 1000}  # none ends before it is killed

    # A rank is killed: the run says so, and that it is worth another try.
    run = make_run("killed", **settings, **long)
    start(run, warm_pool)
    wait_for(lambda: newest_step(run.checkpoints) > 0, run.directory)
    ranks = ranks_of(run.directory)
    assert [rank.name() for rank in ranks] == ["evenkeel-rank0", "evenkeel-rank1"]
    assert {rank.nice() for rank in ranks} == {psutil.Process().nice()}, "it keeps its pace beside others"
    ranks[-1].kill()
    ended = wait_for_end(run.directory)
    assert ended["code"] == EXIT_RETRYABLE
    assert ended["error"]["code"] == "worker_died"
    assert "SIGKILL" in ended["error"]["message"]
    assert run_process.processes(run.directory) == []
    assert list(run.directory.glob("ranks-*")) == []
    first = latest_valid(run.checkpoints).step

    # The driver, here a process that was not forked, is killed alone: its ranks go with it.
    run = make_run("killed", attempt=2, **settings, **long)
    with monkeypatch.context() as environment:
        environment.setenv(NICENESS_VARIABLE, "5")
        pid = start(run, None)
    wait_for(lambda: newest_step(run.checkpoints) > first, run.directory)
    for rank in ranks_of(run.directory):  # they give way where that is asked for
        assert rank.ppid() == pid
        assert rank.nice() == min(psutil.Process(pid).nice() + 5, 19)
        if (group := Path(f"/proc/{rank.pid}/autogroup")).exists():
            assert group.read_text().split()[1:] == ["nice", "5"]
        assert Path(f"/proc/{rank.pid}/oom_score_adj").read_text().strip() == "1000"
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not run_process.processes(run.directory), run.directory)
    second = latest_valid(run.checkpoints).step

    # Everything is ended at once.
    run = make_run("killed", attempt=3, **settings, **long)
    start(run, warm_pool)
    wait_for(lambda: newest_step(run.checkpoints) > second, run.directory)
    pids = [process.pid for process in run_process.processes(run.directory)]
    assert len(pids) == 3
    assert run_process.terminate(run.directory, grace_seconds=0) is False
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    assert not (run.directory / EXIT_FILE).exists()
    third = latest_valid(run.checkpoints).step

    # To its end, and ranks that are not the run's own, without a cut.
    settings["epochs"] = third // 25 + 3
    run = make_run("killed", attempt=4, **settings)
    start(run, warm_pool)
    ended = wait_for_end(run.directory)
    assert ended["code"] == 0, (run.directory / LOG_FILE).read_text()[-6000:]
    whole = make_run("whole", **settings)
    assert execute(whole, pooled_ranks) == 0
    openings = [event for event in small.events(run.directory, "info") if "alpha" in event]
    assert [event["resumed_from_step"] for event in openings] == [None, first, second, third]
    assert openings[0]["sharding"] == SPLIT
    mine, expected = everything(latest_valid(run.checkpoints)), everything(latest_valid(whole.checkpoints))
    assert [name for name in expected if not torch.equal(mine[name], expected[name])] == []
    last, steps = mine["item.last_update_step"], latest_valid(run.checkpoints).step
    assert bool(((last > 0) & (last < steps - 20)).any())  # rows did idle across the cuts


def test_sigterm_cancels(make_run, small, warm_pool):
    run = make_run(epochs=1000, checkpoint={"every_steps": 100_000})
    pid = start(run, warm_pool)
    (run.directory / "events.jsonl").touch()
    wait_for(lambda: small.events(run.directory, "metric"), run.directory)
    assert psutil.Process(pid).name() == "evenkeel-run"
    (rank,) = ranks_of(run.directory)
    assert rank.ppid() == pid
    os.kill(pid, signal.SIGTERM)
    ended = wait_for_end(run.directory)
    assert (ended["code"], ended["state"]) == (EXIT_CANCELLED, "cancelled")
    assert latest_valid(run.checkpoints) is not None
    assert run_process.processes(run.directory) == []


def test_ranks_that_are_never_told_to_train_go_with_their_run(make_run, small, warm_pool, tmp_path):
    """What is wrong with the data is found while they wait."""
    run = make_run(uri=tmp_path / "nothing.parquet", resources=TWO)
    start(run, warm_pool)
    ended = wait_for_end(run.directory)
    assert (ended["code"], ended["error"]["code"]) == (EXIT_FAILED, "bad_data")
    assert run_process.processes(run.directory) == []
