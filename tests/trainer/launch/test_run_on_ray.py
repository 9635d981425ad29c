"""The detached run on a Ray cluster that it joins: killed in any way, it leaves no process there and ends
with the same bits as ranks without Ray."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.support import forked
from tests.support.ray_cluster import Cluster
from tests.trainer.launch import light_actors
from tests.trainer.launch.detached_runs import everything, newest_step, wait_for, wait_for_end
from trainer.checkpoint.format import latest_valid
from trainer.launch import rank_actors
from trainer.launch.driver import execute
from trainer.launch.on_ray import connected
from trainer.runs import run_process
from trainer.runs.directory import Workers, read_run
from trainer.runs.failures import Cancelled, ResourceError
from trainer.runs.lineage import spec_sha256
from trainer.runs.protocol import EXIT_CANCELLED, EXIT_FILE, EXIT_RETRYABLE, LOG_FILE
from trainer.runs.warm_pool import WarmPool

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

TWO = {"num_workers": 2, "cpus_per_worker": 1}
FIVE = {"num_workers": 5, "min_workers": 2}
SPLIT = {"item": "row_wise", "user": "table_wise"}


@pytest.fixture
def head(ray_cluster: Cluster) -> dict[str, str]:
    """The address and the token of a cluster with two CPUs."""
    secret = {name: value for name, value in ray_cluster.environment.items() if name.startswith("RAY_AUTH")}
    return {"address": f"127.0.0.1:{ray_cluster.port}", **secret}


def start_joined(run, head: dict[str, str], warm_pool: WarmPool | None, **changes: str) -> None:
    (run.directory / EXIT_FILE).unlink(missing_ok=True)
    secret = {name: value for name, value in head.items() if name.startswith("RAY_")}
    run_process.launch(run.directory, env={"OMP_NUM_THREADS": "1", **secret, **changes}, warm_pool=warm_pool)


def test_a_run_survives_the_death_of_a_worker_and_of_its_whole_tree_and_a_cancellation(
    make_run, small, tmp_path, head, warm_pool, pooled_ranks
):
    """All with fewer workers than it asks for: the cluster has room for two of five."""
    uri = small.write_rows(tmp_path / "rare.parquet", num_items=3000)
    settings = {"uri": uri, "checkpoint": {"every_steps": 7}, "resources": FIVE, "sharding": SPLIT}
    long = {"epochs": 1000, "ray_address": head["address"]}  # none ends before it is killed

    # A worker is killed: the run says so, and that it is worth another try.
    run = make_run("killed", **settings, **long)
    asked_for = spec_sha256(run.submitted)
    start_joined(run, head, warm_pool)
    wait_for(lambda: newest_step(run.checkpoints) > 0, run.directory)
    workers = [p for p in run_process.processes(run.directory) if "RankActor" in " ".join(p.cmdline())]
    assert len(workers) == 2
    workers[-1].kill()
    ended = wait_for_end(run.directory)
    assert ended["code"] == EXIT_RETRYABLE
    assert ended["error"]["code"] == "worker_died"
    wait_for_no_process(run.directory)
    first = latest_valid(run.checkpoints).step

    # Everything is killed at once.
    run = make_run("killed", attempt=2, **settings, **long)
    start_joined(run, head, warm_pool)
    wait_for(lambda: newest_step(run.checkpoints) > first, run.directory)
    pids = [process.pid for process in run_process.processes(run.directory)]
    assert len(pids) >= 3
    assert run_process.terminate(run.directory, grace_seconds=0) is False
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    assert not (run.directory / EXIT_FILE).exists()
    second = latest_valid(run.checkpoints).step

    # It is cancelled. ray.init takes SIGTERM for itself and would exit amid a step: the handler has to be ours again.
    epochs = len(small.metrics(run.directory, "test"))
    run = make_run("killed", attempt=3, **settings | {"checkpoint": {"every_steps": 100_000}}, **long)
    start_joined(run, head, warm_pool)
    wait_for(lambda: len(small.metrics(run.directory, "test")) > epochs, run.directory)
    assert run_process.terminate(run.directory, grace_seconds=200) is True
    ended = json.loads((run.directory / EXIT_FILE).read_text())
    assert (ended["code"], ended["state"]) == (EXIT_CANCELLED, "cancelled")
    third = latest_valid(run.checkpoints).step
    assert third > second
    wait_for_no_process(run.directory)

    # The cluster is still there. To its end, and the same ranks without Ray and without a cut.
    settings["epochs"] = third // 25 + 3
    run = make_run("killed", attempt=4, ray_address=head["address"], **settings)
    start_joined(run, head, warm_pool)
    ended = wait_for_end(run.directory)
    log = (run.directory / LOG_FILE).read_text()
    assert ended["code"] == 0, log[-6000:]
    whole = make_run("whole", **settings, workers=Workers(2, "there are no more"))
    assert execute(whole, pooled_ranks) == 0
    openings = [event for event in small.events(run.directory, "info") if "alpha" in event]
    assert [event["resumed_from_step"] for event in openings] == [None, first, second, third]
    assert openings[0]["sharding"] == SPLIT
    assert all(len(counts) == 2 for counts in openings[0]["rows_per_rank"].values())
    assert all(count > 0 for count in openings[0]["rows_per_rank"]["item"])
    mine, expected = everything(latest_valid(run.checkpoints)), everything(latest_valid(whole.checkpoints))
    assert [name for name in expected if not torch.equal(mine[name], expected[name])] == []
    last, steps = mine["item.last_update_step"], latest_valid(run.checkpoints).step
    assert bool(((last > 0) & (last < steps - 20)).any())  # rows did idle across the cuts
    wait_for_no_process(run.directory)

    # Each attempt has said that it has fewer workers, and the job is what was asked for.
    told = small.events(run.directory, "workers")
    assert [event["number"] for event in told] == [2] * 4
    assert all("has room for 2 workers of 1 CPUs" in event["because"] for event in told)
    assert log.count("2 of 5 workers: the cluster at") == 4
    assert re.search(r"epoch \d+ test", log)
    assert small.events(run.directory, "lineage")[0]["spec_sha256"] == asked_for


def wait_for_no_process(directory: Path) -> None:
    """Ray's own processes may take a moment to follow their driver."""
    deadline = time.monotonic() + 300
    while left := run_process.processes(directory):
        assert time.monotonic() < deadline, [process.cmdline() for process in left]
        time.sleep(0.1)


def ask_for_room(directory: Path) -> None:
    """Train on ranks one of which dies; then ask for a run's ranks while others have the cluster's processors, and as
    one that is to stop."""
    import ray

    run, told = read_run(directory), []
    with connected(run):
        lost = [ray.remote(light_actors.LosesItsPeer).options(num_cpus=1).remote() for _ in range(2)]
        # Of a process that has just died Ray may say that it is unavailable.
        with pytest.raises(ray.exceptions.RayActorError):
            rank_actors.train_on(lost, run, None)
        for actor in lost:
            ray.kill(actor)
        rank_actors.ROOM_SECONDS = rank_actors.START_SECONDS = 2.0
        other = ray.remote(light_actors.Other).options(num_cpus=2).remote()
        ray.get(other.ready.remote())
        waits = [ray.remote(rank_actors.RankActor).options(num_cpus=1).remote()]
        for reason in (None, "SIGTERM"):
            if reason is not None:
                run.ask_to_stop(reason)
            for ranks in (contextlib.nullcontext(waits), rank_actors.rank_actors(run, {"CPU": 1})):
                try:
                    with ranks as actors:
                        rank_actors.train_on(actors, run, None)
                except (Cancelled, ResourceError) as error:
                    told.append(f"{type(error).__name__}: {error}")
    (directory / "told.json").write_text(json.dumps(told))


def test_ranks_wait_for_room_until_a_limit_or_a_stop(make_run, head, monkeypatch):
    run = make_run(resources=TWO, ray_address=head["address"])
    for name, value in head.items():
        if name.startswith("RAY_"):
            monkeypatch.setenv(name, value)
    process = forked.start(ask_for_room, run.directory, log=run.directory / "asked.log")
    process.join()
    assert process.exitcode == 0, (run.directory / "asked.log").read_text()
    no_start, no_room, *stopped = json.loads((run.directory / "told.json").read_text())
    assert no_start.startswith("ResourceError: ")
    assert no_start.endswith("did not start 2 workers for 2 seconds: a node may be lost, or is slow")
    assert no_room.startswith("ResourceError: ")
    assert no_room.endswith("had no room for 2 workers for 2 seconds: other work has its CPUs or GPUs")
    assert stopped == ["Cancelled: SIGTERM"] * 2


def test_a_cluster_that_is_too_small_is_told_at_once(make_run, head, warm_pool):
    run = make_run(resources={"num_workers": 3}, ray_address=head["address"])
    start_joined(run, head, warm_pool)
    ended = wait_for_end(run.directory)
    assert ended["code"] == EXIT_RETRYABLE
    assert ended["error"]["code"] == "no_resources"
    assert "3 workers" in ended["error"]["message"]
    assert "room for 2" in ended["error"]["message"]


def test_a_cluster_that_does_not_know_us_lets_nobody_in(make_run, small, head):
    run = make_run(resources=TWO, ray_address=head["address"])
    start_joined(run, head, None, RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_gcs_server_port_wait_time_s="2")
    ended = wait_for_end(run.directory)
    assert ended["error"]["code"] == "no_resources"
    assert "the cluster does not take our token: set RAY_AUTH_TOKEN" in ended["error"]["message"]
    assert small.events(run.directory, "metric") == []
