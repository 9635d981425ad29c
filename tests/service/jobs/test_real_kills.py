"""A real training job whose rank is killed, or which is stopped: it goes on by itself, and ends with the same bits as
one that nobody touched. One that wakes beside its successor takes nothing from it. EVENKEEL_TEST_VICTIMS names
more victims, in their order (docs/guides/reliability.md)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embeddings.store import open_store
from service.client import Client
from tests.service import serving
from tests.support import forked, trained_runs
from tests.trainer.launch.detached_runs import everything
from trainer.checkpoint.format import latest_valid
from trainer.launch import fork_server
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import Run, read_run, revoke, write_run
from trainer.runs.events import EVENTS_FILE, read_events
from trainer.runs.protocol import EXIT_FILE, LOG_FILE, PROCESS_FILE
from trainer.runs.run_process import launch, processes, terminate
from trainer.spec import parse_dataset, parse_job

VICTIMS = os.environ.get("EVENKEEL_TEST_VICTIMS", "rank stopped stopped_rank").split()
"""rank, driver, everything: kill -9. stopped: SIGSTOP of all, until it is given up; stopped_rank: of its rank alone."""
LIMIT_SECONDS = 900 * len(VICTIMS)
pytestmark = [pytest.mark.slow, pytest.mark.end_to_end, pytest.mark.timeout(LIMIT_SECONDS)]
SILENCE_SECONDS = 15
EPOCHS = int(os.environ.get("EVENKEEL_TEST_EPOCHS", 8 + 6 * len(VICTIMS)))
"""Some three seconds of training, alone on two cores: it must outlast its victims, each of which is hit a few dozen
steps after a checkpoint."""
POLL_SECONDS = 0.1
ASKED_SECONDS = 0.5
"""Asking the service costs both of them a core's tenth."""
JOB = {
    "name": "killed",
    "dataset": {"name": "clicks"},
    "model": {"kind": "two_tower", "embedding_dim": 8, "hidden": [16]},
    "sse": {"item": {"probability": 0.05}},
    "epochs": EPOCHS,
    "batch_size": 128,
    "checkpoint": {"every_steps": 50},
    "retries": 20,
    "publish": {"collection": "items", "feature": "item", "gate": {"mode": "off"}},
}


class OnThisHost:
    """In the place of a warm pool: forks a run whose rank is in its driver."""

    def start(self, directory: Path, environment: Mapping[str, str], own: Mapping[str, str]) -> int:
        return int(forked.start(be_run, directory, {**environment, **own}, log=directory / LOG_FILE).pid or 0)


def be_run(directory: Path, environment: dict[str, str]) -> int:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    fork_server.show_marker(directory)
    return execute(read_run(directory), start_ranks)


def until(look: Callable[[], Any], seconds: float = 900.0, poll_seconds: float = POLL_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"nothing came within {seconds} s"
        time.sleep(poll_seconds)
    return value


def victims_of(directory: Path, kind: str) -> list[psutil.Process]:
    found = processes(directory)
    main = json.loads((directory / PROCESS_FILE).read_text())["pid"]
    if kind in ("everything", "stopped"):
        return found
    if kind == "driver":
        return [process for process in found if process.pid == main]
    return [process for process in found if process.name() == "evenkeel-rank0"]


def newest_step(directory: Path) -> int:
    names = sorted(path.name for path in (directory / "checkpoints").glob("step-*"))
    return int(names[-1].removeprefix("step-").split(".")[0]) if names else 0


def dataset_in(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    table = {"user": rng.integers(0, 200, 10_000), "item": rng.integers(0, 900, 10_000)}
    file = folder / "clicks.parquet"
    pq.write_table(pa.table({**table, "click": (rng.random(10_000) < 0.5).astype("int8")}), file)
    features: dict[str, Any] = {"user": {}, "item": {}}
    return {"name": "clicks", "uri": str(file), "features": features, "label": {"column": "click"}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same trained without a service, without a break: its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    job, dataset = parse_job(JOB), parse_dataset(dataset_in(folder))
    run = read_run(write_run(folder / "run", run_id="whole", job=job, dataset=dataset, store_url=str(folder / "store")))
    process = forked.start(trained_runs.lead, run.directory, log=folder / "log.txt")
    process.join()
    assert process.exitcode == 0, (folder / "log.txt").read_text()
    return run.checkpoints


def assert_as_if_untouched(run: Run, whole: Path) -> None:
    mine, expected = latest_valid(run.checkpoints), latest_valid(whole)
    assert mine is not None
    assert expected is not None
    found, wanted = everything(mine), everything(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.long
def test_a_run_goes_on_whatever_of_it_is_killed(tmp_path: Path, whole: Path) -> None:
    seen: list[str] = []
    waits = {"EVENKEEL_SILENCE_SECONDS": str(SILENCE_SECONDS), "EVENKEEL_RETRY_BACKOFF_SECONDS": "1"}
    with serving.serving(tmp_path, "all", **waits) as served:
        runs = served.home / "runs"
        try:
            with Client(served.url, served.key) as client:
                client.add_dataset(dataset_in(served.data))
                job = client.submit(JOB)["id"]
                directory = runs / job
                for kind in VICTIMS:
                    # Of this attempt: a kill before its first checkpoint would only repeat the one before.
                    before, began = newest_step(directory), time.monotonic()
                    until(lambda: newest_step(directory) > before or _is_over(directory))  # noqa: B023
                    assert not _is_over(directory), "ended before all were killed"
                    started = time.monotonic() - began
                    attempt, victims = client.job(job)["attempt"], victims_of(directory, kind)
                    assert victims, kind
                    pids = [process.pid for process in processes(directory)]
                    began = time.monotonic()
                    for process in victims:
                        process.send_signal(signal.SIGSTOP if kind.startswith("stopped") else signal.SIGKILL)
                    again = lambda: client.job(job)["attempt"] > attempt or _ended(client, job)  # noqa: B023, E731
                    until(again, poll_seconds=ASKED_SECONDS)
                    assert [pid for pid in pids if _lives(pid)] == [], "the next attempt begins when the last is gone"
                    seen.append(
                        f"attempt {attempt}: first checkpoint after {started:.0f} s; {kind} at step "
                        f"{newest_step(directory)}; next attempt after {time.monotonic() - began:.1f} s"
                    )
                    print(seen[-1], flush=True)
                done = client.wait(job, timeout_seconds=LIMIT_SECONDS)
                assert done["state"] == "succeeded", done["error"]
                assert done["attempt"] >= len(VICTIMS) + 1
            assert_as_if_untouched(read_run(directory), whole)
            until(lambda: processes(directory) == [], 300)
        finally:
            for directory in runs.glob("job_*"):
                terminate(directory, 0)


def test_one_that_wakes_beside_its_successor_takes_nothing_from_it(tmp_path: Path, whole: Path) -> None:
    """Where the first cannot be ended: its machine is out of reach. Its rank is in the driver: nothing
    ends it once it wakes but its own look at the lease."""
    job, dataset = parse_job(JOB), parse_dataset(dataset_in(tmp_path))
    store = str(tmp_path / "store")

    def start(attempt: int) -> Path:
        lease = {"token": f"of attempt {attempt}"}
        directory = write_run(
            tmp_path / "run", run_id="woken", job=job, dataset=dataset, store_url=store, attempt=attempt, lease=lease
        )
        launch(directory, warm_pool=OnThisHost())  # type: ignore[arg-type]
        return directory

    directory = start(1)
    try:
        until(lambda: newest_step(directory) > 0)
        first = processes(directory)
        for process in first:
            process.send_signal(signal.SIGSTOP)
        revoke(directory)
        (directory / PROCESS_FILE).unlink()
        stopped_at = newest_step(directory)
        start(2)
        until(lambda: newest_step(directory) > stopped_at or _exit_of(directory))
        assert not (directory / EXIT_FILE).exists(), "the second ended before the first woke"
        said = (directory / EVENTS_FILE).stat().st_size
        for process in first:
            process.send_signal(signal.SIGCONT)
        until(lambda: not any(_lives(process.pid) for process in first))  # by themselves
        until(lambda: _exit_of(directory))
        assert (_exit_of(directory)["state"], _exit_of(directory)["attempt"]) == ("succeeded", 2)
        events = [event.fields for event in read_events(directory, said)]
        woken = {(event["type"], event.get("state")) for event in events if event["attempt"] == 1}
        print(f"stopped at step {stopped_at}; said after it woke: {sorted(map(str, woken))}")
        assert ("state", "succeeded") not in woken
        assert "publication" not in {kind for kind, _ in woken}
        versions = open_store(store).collection("items").versions()
        assert [manifest["version"] for manifest in versions] == ["v000001"]
        assert_as_if_untouched(read_run(directory), whole)
        until(lambda: processes(directory) == [], 300)
    finally:
        terminate(directory, 0)


def _ended(client: Client, job: str) -> bool:
    found = client.job(job)
    assert found["state"] not in ("succeeded", "failed", "cancelled"), f"ended before all were killed: {found['error']}"
    return False


def _exit_of(directory: Path) -> Any:
    return json.loads((directory / EXIT_FILE).read_text()) if (directory / EXIT_FILE).exists() else None


def _is_over(directory: Path) -> bool:
    """Whether the run has ended and is not tried again."""
    return (found := _exit_of(directory)) is not None and not found.get("retryable")


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
