"""Jobs that follow a folder: files that come late, torn or out of order; kills; versions of one job."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from benchmarks.support.gathered import gather_table
from embeddings.store import open_store
from tests.support import forked
from tests.support.trained_runs import run_of
from tests.trainer.training.test_one_pass import assert_same_bits, dataset_of, left_by
from tests.trainer.trainings import trainer_of
from trainer.checkpoint.format import latest_valid
from trainer.data.one_pass.data import OnePassData
from trainer.data.prepare.preparation import prepare
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.publishing import repeated
from trainer.runs.protocol import EXIT_CANCELLED
from trainer.spec import parse_job

# Whole jobs.
pytestmark = pytest.mark.slow

NUM_FILES, FILE_ROWS = 8, 250
END = "_END"


def rows_of(number):
    """Rows of one file: users (integers) and items (strings) that come and go with time."""
    rng = np.random.default_rng(number)
    item = number * 12 + (rng.random(FILE_ROWS) ** 2 * 60).astype(np.int64)
    recent = [[f"i{one}" for one in item[max(0, i - rng.integers(0, 4)) : i]] for i in range(FILE_ROWS)]
    return pa.table({
        "user": pa.array(rng.integers(-30, 30, FILE_ROWS), mask=rng.random(FILE_ROWS) < 0.02),
        "item": [f"i{one}" for one in item], "recent": pa.array(recent, pa.list_(pa.string())),
        "click": (rng.random(FILE_ROWS) < np.array([0.1, 0.4, 0.9])[item % 3]).astype(np.int64),
    })  # fmt: skip


def put(folder, number):
    """Let a file appear whole, as its writer would."""
    pq.write_table(rows_of(number), folder / f".{number}.tmp", row_group_size=60)
    os.rename(folder / f".{number}.tmp", folder / f"{number}.parquet")


def folder_of(path, numbers=range(NUM_FILES), ended=True):
    path.mkdir()
    for number in numbers:
        put(path, number)
    if ended:
        (path / END).touch()
    return path


def job_of(follow=None, **changes):
    document = {
        "name": "follow", "dataset": {"name": "log", "one_pass": True,
                                      "follow": {"until": END, "poll_seconds": 0.05} | (follow or {})},
        "model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8]},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.05, "alpha": 0.001},
        "dense_optimizer": {"learning_rate": 0.02}, "batch_size": 32, "checkpoint": {"every_steps": 5},
        "tables": {"item": {"capacity": 60, "ttl_steps": 20}, "user": {"capacity": 90}},
        "evaluation": {"split": {"validation": 0, "test": 0}, "progressive_rows": 500},
    }  # fmt: skip
    return parse_job(document | changes)


PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}


def test_files_that_appear_while_it_trains_are_trained_on_as_if_they_had_been_there(tmp_path, small):
    """The same bits, metrics and progressive figures; it waits without a step, and ends behind the last file."""
    whole = run_of(tmp_path / "whole", "run", job_of(), dataset_of(folder_of(tmp_path / "all")))
    assert execute(whole, start_ranks) == 0
    expected = left_by(whole)
    assert expected[2] == -(-NUM_FILES * FILE_ROWS // 32)
    progressive = [one for one in expected[3] if one["split"] == "progressive"]
    assert [one["epoch"] for one in progressive] == [1, 2, 3, 4]
    assert sum(one["examples"] for one in progressive) == NUM_FILES * FILE_ROWS
    assert progressive[-1]["auc"] > 0.6

    folder = folder_of(tmp_path / "grows", (), ended=False)
    run = run_of(tmp_path / "grows-run", "run", job_of(), dataset_of(folder))

    def grow_slowly():
        for number in range(NUM_FILES):
            time.sleep(0.2)
            put(folder, number)
        time.sleep(0.5)
        (folder / END).touch()

    writer = threading.Thread(target=grow_slowly)
    writer.start()
    assert execute(run, start_ranks) == 0
    writer.join()
    assert_same_bits(left_by(run), expected)
    assert any("waiting for a first file" in one["message"] for one in small.events(run.directory, "info"))
    last = small.events(run.directory, "progress")[-1]
    assert (last["files"], last["files_behind"], last["late_files"]) == (NUM_FILES, 0, 0)


def occurrences(numbers=range(NUM_FILES)):
    """How often each item occurs in these files, in both of its features."""
    found: dict[str, int] = {}
    for number in numbers:
        rows = rows_of(number)
        for one in [*rows["item"].to_pylist(), *(one for many in rows["recent"].to_pylist() for one in many)]:
            found[one] = found.get(one, 0) + 1
    return found


def versions_of(run):
    """Versions of the run, oldest first."""
    return [one for one in open_store(run.store_url).collection("items").versions() if one["job"] == run.run_id]


def served(run):
    version = open_store(run.store_url).collection("items").open()
    items = version.items()
    return dict(zip(items.arrow_ids().to_pylist(), items.counts.tolist(), strict=True)), np.asarray(items.vectors[:])


def lead_and_die(directory, where):
    """The run, until it comes to a place that kills the process."""
    from embeddings.refresh import publish as stage
    from trainer.checkpoint import format as checkpoints
    from trainer.launch.driver import execute
    from trainer.publishing import repeated
    from trainer.runs.directory import read_run
    from trainer.training.loop import Trainer

    repeated.POLL_SECONDS = 0.02
    kind, number = where
    owner, name = {
        "step": (Trainer, "train_step"), "checkpoint": (checkpoints, "_attach"), "publication": (stage, "conclude"),
        "switch": (stage, "_create_views"),
    }[kind]  # fmt: skip
    original, calls = getattr(owner, name), [0]

    def deadly(*arguments, **keywords):
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **keywords)

    setattr(owner, name, deadly)
    execute(read_run(directory), start_ranks)


@pytest.mark.process
def test_a_run_that_is_killed_anywhere_has_every_row_once(tmp_path, monkeypatch):
    """Killed in a file, while a checkpoint is written, while a version is written and before it is served."""
    monkeypatch.setattr("trainer.publishing.repeated.POLL_SECONDS", 0.02)
    job = job_of(tables={"item": {"capacity": 400}, "user": {"capacity": 90}}, publish=PUBLISH | {"every_rows": 500})
    whole = run_of(tmp_path / "whole", "run", job, dataset_of(folder_of(tmp_path / "all")))
    assert execute(whole, start_ranks) == 0
    folder = folder_of(tmp_path / "grows", range(3), ended=False)
    dataset, died = dataset_of(folder), []
    for attempt, where in enumerate([("step", 13), ("checkpoint", 12), ("publication", 1), ("switch", 1)], start=1):
        run = run_of(tmp_path / "killed", "run", job, dataset, attempt=attempt)
        process = forked.start(lead_and_die, run.directory, where, log=tmp_path / "log.txt")
        time.sleep(0.3)
        put(folder, 2 + attempt)
        process.join()
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
        newest = latest_valid(run.checkpoints)
        died.append((newest.step, newest.extra["position"]["place"]["file"]))
    assert died == sorted(died)
    for number in range(7, NUM_FILES):
        put(folder, number)
    (folder / END).touch()
    run = run_of(tmp_path / "killed", "run", job, dataset, attempt=5)
    assert execute(run, start_ranks) == 0
    assert_same_bits(left_by(run), left_by(whole))
    counts, vectors = served(run)
    assert counts == occurrences()
    # Each step is one version at most, in their order; all of them were brought to an end.
    versions = versions_of(run)
    steps = [one["training_step"] for one in versions]
    assert steps == sorted(set(steps))
    assert len(steps) >= 3
    assert {one["state"] for one in versions} == {"superseded", "published"}
    assert latest_valid(run.checkpoints).step == steps[-1]
    assert np.isfinite(vectors).all()


def test_one_job_publishes_versions_while_it_goes_on(tmp_path, small, monkeypatch):
    """An id that lost its row is not served by what was published of it before; the last version is of all rows."""
    monkeypatch.setattr("trainer.publishing.repeated.POLL_SECONDS", 0.02)
    publish = PUBLISH | {"every_seconds": 0.05}
    job = job_of(publish=publish, checkpoint={"every_steps": 1000, "every_seconds": 0.1})
    folder = folder_of(tmp_path / "grows", (), ended=False)
    run = run_of(tmp_path, "run", job, dataset_of(folder))

    def grow_with_versions():
        collection = open_store(run.store_url).collection("items")
        for number in range(4):
            before = collection.current()
            put(folder, number)
            until = time.monotonic() + 30
            while collection.current() == before and time.monotonic() < until:
                time.sleep(0.02)
        (folder / END).touch()

    writer = threading.Thread(target=grow_with_versions)
    writer.start()
    assert execute(run, start_ranks) == 0
    writer.join()
    versions = versions_of(run)
    assert len(versions) >= 4
    assert [one["parent"] for one in versions] == [None, *(one["version"] for one in versions[:-1])]
    assert [one["state"] for one in versions] == [*["superseded"] * (len(versions) - 1), "published"]
    told = {one["version"]: one["step"] for one in small.events(run.directory, "publication")}
    assert told == {one["version"]: one["training_step"] for one in versions}
    ids, _ = served(run)
    first = open_store(run.store_url).collection("items").open(versions[0]["version"])
    gone = set(first.ids.to_pylist()) - set(ids)
    # The table has room for 60 of the 100 and more ids.
    assert gone
    assert len(ids) <= 60
    # Led again, it publishes nothing anew.
    run = run_of(tmp_path, "run", job, run.dataset, attempt=2)
    assert execute(run, start_ranks) == 0
    assert [one["version"] for one in versions_of(run)] == [one["version"] for one in versions]


def test_late_files_are_told_of_and_a_cancel_while_it_waits_ends_with_a_checkpoint(tmp_path, small):
    """Then it goes on, to as many rows as it was asked for."""
    folder = folder_of(tmp_path / "grows", (1,), ended=False)
    run = run_of(tmp_path, "run", job_of({"until": None}), dataset_of(folder))

    def steps():
        is_there = (run.directory / "events.jsonl").exists()
        return [one["step"] for one in small.events(run.directory, "progress")] if is_there else []

    def late():
        put(folder, 0)
        put(folder, 2)

    with (
        small.meanwhile(steps, late),
        # All whole batches of the two files are trained on.
        small.meanwhile(lambda: 2 * FILE_ROWS // 32 in steps(), lambda: os.kill(os.getpid(), signal.SIGTERM)),
    ):
        assert execute(run, start_ranks) == EXIT_CANCELLED
    assert latest_valid(run.checkpoints).step == 2 * FILE_ROWS // 32
    notes = [one["message"] for one in small.events(run.directory, "info")]
    assert "not read, because it sorts before 1.parquet and appeared after the reading of that: 0.parquet" in notes
    put(folder, 3)
    run = run_of(tmp_path, "run", job_of({"until": None, "max_rows": 2 * FILE_ROWS + 99}), run.dataset, attempt=2)
    assert execute(run, start_ranks) == 0
    newest = latest_valid(run.checkpoints)
    assert newest.extra["position"]["place"]["rows"] == 2 * FILE_ROWS + 99
    assert newest.extra["position"]["place"]["is_end"]
    assert newest.step == -(-(2 * FILE_ROWS + 99) // 32)


def test_a_file_that_changed_after_rows_of_it_were_trained_on_is_refused_and_one_that_was_read_may_go(tmp_path, small):
    folder = folder_of(tmp_path / "grows", range(3), ended=False)
    pq.write_table(rows_of(3).drop_columns("click"), folder / "3.parquet")
    run = run_of(tmp_path, "run", job_of(), dataset_of(folder))
    assert execute(run, start_ranks) != 0
    assert "3.parquet: no column 'click'" in small.events(run.directory, "error")[-1]["message"]
    stopped = latest_valid(run.checkpoints).extra["position"]
    begun = stopped["place"]["file"]
    assert stopped["step"] * 32 > stopped["place"]["examples"][0]
    # What is whole behind it goes, as logs are taken away; a broken file is written anew: none of its rows were used.
    for number in range(begun):
        (folder / f"{number}.parquet").unlink()
    put(folder, 3)
    (folder / END).touch()
    whole = (folder / f"{begun}.parquet").read_bytes(), (folder / f"{begun}.parquet").stat()
    os.utime(folder / f"{begun}.parquet", ns=(10**18, 10**18))
    run = run_of(tmp_path, "run", run.job, run.dataset, attempt=2)
    assert execute(run, start_ranks) != 0
    error = small.events(run.directory, "error")[-1]
    assert f"{begun}.parquet: has changed since its reading began" in error["message"]
    assert "start a new job" in error["remedy"] + error["message"]
    os.utime(folder / f"{begun}.parquet", ns=(whole[1].st_atime_ns, whole[1].st_mtime_ns))
    run = run_of(tmp_path, "run", run.job, run.dataset, attempt=3)
    assert execute(run, start_ranks) == 0
    other = run_of(tmp_path, "other", run.job, dataset_of(folder_of(tmp_path / "all", range(4))))
    assert execute(other, start_ranks) == 0
    assert_same_bits(left_by(run), left_by(other))


def test_a_version_that_cannot_be_published_ends_no_training(tmp_path, small, monkeypatch):
    """It is told of, and the next one is tried; the last one is the end of the job."""
    monkeypatch.setattr("trainer.publishing.repeated.POLL_SECONDS", 0.02)
    original, calls = repeated.publish_checkpoint, []

    def failing(run, checkpoint, store):
        calls.append(checkpoint.step)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return original(run, checkpoint, store)

    monkeypatch.setattr(repeated, "publish_checkpoint", failing)
    job = job_of({"until": None, "max_rows": 3 * FILE_ROWS}, publish=PUBLISH | {"every_seconds": 0.02})
    folder = folder_of(tmp_path / "grows", range(2), ended=False)
    run = run_of(tmp_path, "run", job, dataset_of(folder))
    with small.meanwhile(lambda: len(calls) > 1, lambda: put(folder, 2)):
        assert execute(run, start_ranks) == 0
    notes = [one["message"] for one in small.events(run.directory, "info")]
    assert any("a version could not be published (OSError: [Errno 28] No space left on device)" in one for one in notes)
    assert versions_of(run)[-1]["training_step"] == latest_valid(run.checkpoints).step


@pytest.mark.parametrize("publish", [{"every_rows": 1}, {"every_seconds": 600}])
def test_a_version_that_cannot_be_published_is_tried_again_after_a_while(publish, tmp_path):
    """Not at each look at the clock; and it is tried again where the failure could not be told of either."""
    run = run_of(tmp_path, "run", job_of(publish=PUBLISH | publish), dataset_of(folder_of(tmp_path / "all", (0,))))
    (tmp_path / "store").write_text("not a folder")
    said = []

    def full_disk(kind, **fields):
        said.append(fields["message"])
        raise OSError(28, "No space left on device")

    looks = iter([False] * 5 + [True])
    repeated._Publisher(run, full_disk).work(SimpleNamespace(wait=lambda seconds: next(looks)))
    assert len(said) == 1
    assert next(looks, None) is None


def test_the_time_between_versions_goes_on_in_a_later_attempt(tmp_path):
    """From the job's last version; before it has one, from where its first attempt began."""
    dataset, job = dataset_of(folder_of(tmp_path / "all", (0, 1))), job_of(publish=PUBLISH | {"every_seconds": 3600})
    trained = run_of(tmp_path, "run", job, dataset)
    (trained.directory / "events.jsonl").write_text('{"time": "2026-01-01T00:00:00.000Z", "type": "state"}\n')
    assert execute(trained, start_ranks) == 0
    shutil.rmtree(trained.store_url)
    newest, aside = latest_valid(trained.checkpoints).path, tmp_path / "aside"
    told = []

    def publish_if_due(attempt):
        run = run_of(tmp_path, "run", job, dataset, attempt=attempt)
        repeated._Publisher(run, lambda kind, **fields: told.append(fields["step"])).publish_if_due()
        return run

    newest.rename(aside)
    run = publish_if_due(2)
    assert told == [latest_valid(run.checkpoints).step]
    aside.rename(newest)
    publish_if_due(3)
    assert len(told) == 1


def follow_on_ranks(directory, dataset, job, folder):
    """The whole loop on every rank; rank 0 lets the files appear."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = OnePassData.of(directory, dataset, job)
    trainer = trainer_of(job, data, backend="reference", dtype=torch.float64)
    writer = threading.Thread(target=grow, args=(folder,))
    if rank == 0:
        writer.start()
    trainer.train()
    if rank == 0:
        writer.join()
    rows = {name: gather_table(trainer.sharded, name) for name in data.tables}
    state = {name: ids.state() for name, ids in trainer.dynamic_rows.ids.items()}
    found = {name: one.rows for name, one in rows.items()} if rank == 0 else None
    return found, state, trainer.position.place, trainer.history


def grow(folder):
    for number in range(1, 4):
        time.sleep(0.3)
        put(folder, number)
    (folder / END).touch()


def test_two_ranks_take_the_files_that_rank_0_finds(tmp_path, ranks):
    """The same ids, rows and progressive figures as on one rank, while files appear."""
    job = job_of(checkpoint={"every_seconds": 0.2})
    dataset = dataset_of(folder_of(tmp_path / "one", range(1), ended=False))
    with single_rank_group():
        directory = prepare(dataset, job, tmp_path / "data").directory
        expected, state, place, history = follow_on_ranks(directory, dataset, job, tmp_path / "one")
    dataset = dataset_of(folder_of(tmp_path / "two", range(1), ended=False))
    split = job.model_copy(update={"sharding": {"item": "row_wise", "user": "table_wise"}})
    directory = prepare(dataset, split, tmp_path / "data-2").directory
    (found, mine, there, told), (_, other, also, _) = ranks(2).run(
        follow_on_ranks, directory, dataset, split, tmp_path / "two"
    )
    assert place == there == also
    assert place["is_end"]
    for table, of_table in state.items():
        for name, value in of_table.items():
            assert np.array_equal(value, mine[table][name]), name
            assert np.array_equal(value, other[table][name]), name
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < 1e-7, name
    assert [one["examples"] for one in told[:-1]] == [512, 488]
    for ours, theirs in zip(told, history, strict=True):
        assert ours.pop("split") == theirs.pop("split")
        assert ours == pytest.approx(theirs, rel=1e-6)
