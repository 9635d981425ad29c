"""An attempt that was given up writes nothing, wherever it was stopped: its lease is taken between any two steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from embeddings.durable_files import write_json
from embeddings.store import open_store
from trainer.checkpoint.format import CheckpointError, TableShard, latest_valid, save
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.launch import driver
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import LOCK_FILE, RUN_FILE, Run, read_run, revoke, write_run
from trainer.runs.failures import LeaseLostError
from trainer.runs.protocol import EXIT_FAILED, EXIT_FILE, EXIT_SUCCEEDED


def checkpoint(run: Run, step: int, fence: Callable[[], None] | None = None, keep_last: int = 3) -> Path:
    rows = torch.full((4, 2), float(step))
    shard = TableShard("item", num_rows=4, row_start=0, weight=rows, state={})
    return save(
        run.checkpoints, step=step, tables=[shard], dense={"bias": torch.zeros(1)}, extra={"completed_steps": step},
        keep_last=keep_last, fence=fence or run.fence,
    )  # fmt: skip


def taken_after(run: Run, look: int) -> Callable[[], None]:
    """The run's fence; the lease goes just after the ``look``-th look found it in order, as if the process had been
    stopped there."""
    looks = 0

    def fence() -> None:
        nonlocal looks
        run.fence()
        looks += 1
        if looks == look:
            revoke(run.directory)

    return fence


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_lease_is_taken_once_and_for_good(make_run):
    run = make_run(lease={"token": "a"})
    assert run.still_current()
    revoke(run.directory)
    revoke(run.directory)
    assert not run.still_current()
    with pytest.raises(LeaseLostError, match="given up"):
        run.fence()
    # One that was slow to start reads what is left of its lease: that is none.
    assert not read_run(run.directory).still_current()
    assert execute_code(run.directory) == EXIT_FAILED
    assert not (run.directory / EXIT_FILE).exists()
    revoke(run.directory / "nowhere")


def execute_code(directory: Path) -> int:
    from trainer.launch.entrypoint import main

    return main(["--run-dir", str(directory)])


def test_the_next_attempt_has_a_lease_of_its_own(make_run):
    run = make_run(lease={"token": "a"})
    with driver._lock(run.directory):  # held by a process that is stopped
        revoke(run.directory)
        assert not (run.directory / LOCK_FILE).exists()
        write_run(
            run.directory, run_id=run.run_id, job=run.job, dataset=run.dataset, store_url=run.store_url, attempt=2,
            lease={"token": "b"},
        )  # fmt: skip
        later = read_run(run.directory)
        assert later.still_current()
        assert not run.still_current()
        with driver._lock(run.directory):
            pass


@pytest.mark.parametrize("look", [1, 2])
def test_no_checkpoint_is_written_wherever_the_lease_is_lost(make_run, look):
    run = make_run(lease={"token": "a"})
    kept = checkpoint(run, 10)
    with pytest.raises(CheckpointError):
        checkpoint(run, 20, taken_after(run, look))
    assert names(run.checkpoints) == [kept.name]
    assert latest_valid(run.checkpoints).step == 10
    with pytest.raises(CheckpointError, match="given up"):
        checkpoint(run, 30)
    assert names(run.checkpoints) == [kept.name]


def test_one_that_wakes_leaves_the_next_attempts_checkpoints_alone(make_run, monkeypatch):
    """Stopped between the rename and the removal of what it replaces."""
    run = make_run(lease={"token": "a"})
    checkpoint(run, 10)
    renamed = []

    def stopped(folder: Path) -> None:
        fsync_path(folder)
        if folder == run.checkpoints and not renamed:
            renamed.append(folder)
            revoke(run.directory)
            document = json.loads((run.directory / RUN_FILE).read_text())
            (run.directory / RUN_FILE).write_text(json.dumps(document | {"attempt": 2, "lease": {"token": "b"}}))
            later = read_run(run.directory)
            for step in (30, 40):
                checkpoint(later, step)

    from trainer.checkpoint.format import fsync_path

    monkeypatch.setattr("trainer.checkpoint.format.fsync_path", stopped)
    checkpoint(run, 20)
    assert renamed
    assert latest_valid(run.checkpoints).step == 40
    assert len(names(run.checkpoints)) == 3


def test_prepared_data_stays_as_it_was(make_run, small, tmp_path):
    run = make_run(lease={"token": "a"})
    prepare(run.dataset, run.job, run.data)
    before = PreparedData.fingerprint_of(run.data)
    other = small.job(seed=9)
    with pytest.raises(Exception, match="cannot be written"):
        prepare(run.dataset, other, run.data, fence=taken_after(run, 1))
    assert PreparedData.fingerprint_of(run.data) == before
    with pytest.raises(LeaseLostError):
        prepare(run.dataset, other, run.data, fence=run.fence)
    assert PreparedData.fingerprint_of(run.data) == before
    assert [name for name in names(run.directory) if "preparing" in name] == []
    # With the lease, another job's data take their place, and nothing is left of the old ones.
    fresh = prepare(run.dataset, other, run.data)
    assert fresh.fingerprint != before
    assert [name for name in names(run.data) if "replaced" in name] == []


def test_the_last_word_is_the_next_attempts(make_run):
    run = make_run(lease={"token": "a"})
    path = run.directory / EXIT_FILE
    path.write_text("the next attempt's")
    with pytest.raises(FileNotFoundError):
        write_json(path, {}, fence=taken_after(run, 1))
    with pytest.raises(LeaseLostError):
        write_json(path, {}, fence=run.fence)
    assert driver._exit(run.directory, 1, "failed", None, run.fence) == EXIT_FAILED
    assert path.read_text() == "the next attempt's"
    assert not list(run.directory.glob(".*.tmp"))


def test_a_run_that_lost_its_lease_stops_by_itself(make_run, small, monkeypatch):
    """Nobody ends it: its next heartbeat sees that nobody wants it any more."""
    monkeypatch.setattr(driver, "HEARTBEAT_SECONDS", 0.05)
    run = make_run(lease={"token": "a"}, epochs=1000, checkpoint={"every_steps": 10})
    seen: list[list[str]] = []

    def give_up() -> None:
        revoke(run.directory)
        seen.append(names(run.checkpoints))

    with small.meanwhile(lambda: list(run.checkpoints.glob("step-*")), give_up):
        assert execute(run, start_ranks) != EXIT_SUCCEEDED
    assert set(names(run.checkpoints)) <= set(seen[0]), "no checkpoint after the lease was gone"
    assert not (run.directory / EXIT_FILE).exists()


def test_one_that_is_given_up_while_it_writes_its_version_does_not_switch(make_run, monkeypatch):
    """The version takes long to write: its lease is asked for before that, and again for the switch."""
    run = make_run(publish={"collection": "items", "feature": "item", "gate": {"mode": "off"}}, lease={"token": "a"})
    looks: list[Path] = []

    def taken_after_the_first_look(current: Run) -> None:
        current.fence()
        looks.append(current.directory)
        revoke(current.directory)

    monkeypatch.setattr("trainer.publishing.publish.fence", taken_after_the_first_look)
    assert execute(run, start_ranks) != EXIT_SUCCEEDED
    assert len(looks) == 1
    assert open_store(run.store_url).collection("items").current() is None
