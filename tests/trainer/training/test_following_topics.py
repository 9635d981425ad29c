"""Jobs that follow a topic: kills while messages come, bad messages, ranks; brokers that stay away."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from benchmarks.support.gathered import gather_table
from tests.support import forked
from tests.support.trained_runs import run_of
from tests.trainer.training.test_following import PUBLISH, job_of, lead_and_die, occurrences, rows_of, served
from tests.trainer.training.test_one_pass import assert_same_bits, dataset_of, left_by
from tests.trainer.trainings import trainer_of
from trainer.checkpoint.format import latest_valid
from trainer.data.errors import DataError
from trainer.data.one_pass import topic_rows, windows
from trainer.data.one_pass.data import OnePassData, segments_file
from trainer.data.one_pass.position import Place
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.topics import kafka
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.spec import DatasetSpec

COLUMNS = {"user": "int64", "item": "string", "recent": "list<string>", "click": "int64"}
MESSAGE_ROWS, FILE_ROWS, NUM_FILES = 25, 250, 8
BEGINNING = Place()


def messages_of(number):
    """The rows of a file as JSON Lines, some in each message."""
    lines = [json.dumps(row).encode() for row in rows_of(number).to_pylist()]
    return [b"\n".join(lines[first : first + MESSAGE_ROWS]) for first in range(0, len(lines), MESSAGE_ROWS)]


def topic_dataset(uri, **changes):
    document = dataset_of("/nowhere").model_dump(mode="json", exclude_defaults=True)
    return DatasetSpec.model_validate(document | {"uri": uri, "messages": {"columns": COLUMNS}} | changes)


def topic_job(max_rows=NUM_FILES * FILE_ROWS, follow=None, **changes):
    return job_of({"until": None, "max_rows": max_rows, "poll_seconds": 0.05} | (follow or {}), **changes)


def put(broker, topic, numbers):
    for number in numbers:
        broker.send(topic, number % 2, messages_of(number))


@pytest.mark.slow
@pytest.mark.process
def test_a_run_that_is_killed_while_messages_come_has_every_row_once(tmp_path, broker):
    """Killed in a step and while a checkpoint is written; it takes the steps of one that was not, and counts alike."""
    topic = broker.topic(2)
    dataset = topic_dataset(broker.uri(topic), max_bad_rows=0.001)
    job = topic_job(publish=PUBLISH, tables={"item": {"capacity": 400}, "user": {"capacity": 90}})
    journal = segments_file(run_of(tmp_path / "killed", "run", job, dataset).data)
    put(broker, topic, range(2))
    broker.send(topic, 0, [b"not JSON", None, b'{"user": 1, "item": "i1", "click": 7}'])
    for attempt, where in enumerate([("step", 13), ("checkpoint", 4)], start=1):
        run = run_of(tmp_path / "killed", "run", job, dataset, attempt=attempt)
        process = forked.start(lead_and_die, run.directory, where, log=tmp_path / "log.txt")
        while not journal.exists() or len(journal.read_text().splitlines()) <= attempt:
            assert process.is_alive(), (tmp_path / "log.txt").read_text()
            time.sleep(0.02)
        put(broker, topic, range(3 * attempt - 1, 3 * attempt + 2))
        process.join()
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    run = run_of(tmp_path / "killed", "run", job, dataset, attempt=3)
    assert execute(run, start_ranks) == 0
    assert served(run)[0] == occurrences()
    place = latest_valid(run.checkpoints).extra["position"]["place"]
    assert (place["rows"], place["bad"]) == (NUM_FILES * FILE_ROWS, 2)
    # Now all messages are there; which of them make a segment is as it was when they came.
    whole = run_of(tmp_path / "whole", "run", job, dataset)
    prepare(dataset, job, whole.data)
    shutil.copy(journal, segments_file(whole.data))
    assert execute(whole, start_ranks) == 0
    assert len(journal.read_text().splitlines()) > 3
    assert_same_bits(left_by(run), left_by(whole))


@pytest.mark.slow
def test_brokers_that_stay_away_end_the_attempt_and_a_retry_goes_on(tmp_path, small, own_broker, monkeypatch):
    monkeypatch.setattr("trainer.training.loop.FOLLOWING_PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(kafka, "_ANSWER_SECONDS", 0.3)
    topic = own_broker.topic(2)
    dataset = topic_dataset(own_broker.uri(topic))
    put(own_broker, topic, range(2))
    job = topic_job(3 * FILE_ROWS, follow={"away_seconds": 1.0})
    run = run_of(tmp_path, "run", job, dataset)
    steps = 2 * FILE_ROWS // 32

    def told():
        is_there = (run.directory / "events.jsonl").exists()
        return is_there and any(one["step"] == steps for one in small.events(run.directory, "progress"))

    away = own_broker.away()
    with small.meanwhile(told, away.__enter__):
        assert execute(run, start_ranks) != 0
    away.__exit__(None, None, None)
    error = small.events(run.directory, "error")[-1]
    assert error["code"] == "data_away"
    assert "the brokers did not answer for 1 seconds" in error["message"]
    progress = small.events(run.directory, "progress")[-1]
    assert (progress["messages_behind"], progress["bad_rows"]) == (0, 0)
    put(own_broker, topic, [2])
    run = run_of(tmp_path, "run", job, dataset, attempt=2)
    assert execute(run, start_ranks) == 0
    assert latest_valid(run.checkpoints).extra["position"]["place"]["rows"] == 3 * FILE_ROWS


def batches_of(tmp_path, dataset, job, start=BEGINNING):
    """Places after each batch, and its labels."""
    data = OnePassData.of(prepare(dataset, job, tmp_path / "data").directory, dataset, job)
    data.begin(start)
    with contextlib.closing(data.train_batches(0, -(-start.examples[0] // job.batch_size))) as batches:
        found = [(batch.place, batch.labels.tolist()) for batch in batches]
    return found, [data.notes.get() for _ in range(data.notes.qsize())]


def test_bad_rows_are_left_out_up_to_a_share_of_each_block(tmp_path, own_broker, monkeypatch):
    """The topic, the partition and the offset of each are told; without max_bad_rows the first one ends the job."""
    topic = own_broker.topic(1)
    uri = own_broker.uri(topic)
    rows = [{"user": 1, "item": "a", "recent": [], "click": n % 2} for n in range(20)]
    sent = [json.dumps(row).encode() for row in rows]
    sent[3], sent[11], sent[17] = b"no", json.dumps({**rows[11], "click": 2}).encode(), b'{"click": null}'
    own_broker.send(topic, 0, sent)
    job = topic_job(17, batch_size=4)
    found, notes = batches_of(tmp_path, topic_dataset(uri, max_bad_rows=0.5), job)
    last = found[-1][0]
    assert (last.rows, last.bad, last.bad_of_block, last.is_end) == (17, 3, 3, True)
    (note,) = [one for one in notes if "bad rows" in one]
    assert note.startswith(
        f"{uri}: 3 bad rows of segment 0 were left out: {uri}, partition 0, offset 3: cannot be read: "
    )
    assert f"{topic}, partition 0, offset 11, column 'click': label that is neither 0 nor 1 (2)" in note
    with pytest.raises(DataError, match=rf"{topic}: a row is bad: .*, partition 0, offset 3: .*max_bad_rows"):
        batches_of(tmp_path, topic_dataset(uri), job)
    monkeypatch.setattr(topic_rows, "BLOCK_ROWS", 40)
    with pytest.raises(DataError, match=r"3 rows since row 0 are bad, max_bad_rows allows 5.00% of each 40: "):
        batches_of(tmp_path, topic_dataset(uri, max_bad_rows=0.05), job)


def test_labels_as_text_are_numbers_as_in_files(tmp_path, own_broker):
    topic = own_broker.topic(1)
    rows = [{"user": 1, "item": "a", "recent": [], "click": label} for label in ("1", "yes", "0", "1")]
    own_broker.send(topic, 0, [json.dumps(row).encode() for row in rows])
    messages = {"columns": COLUMNS | {"click": "string"}}
    dataset = topic_dataset(own_broker.uri(topic), messages=messages, max_bad_rows=0.5)
    found, _ = batches_of(tmp_path, dataset, topic_job(3, batch_size=1))
    assert sorted(label for _, labels in found for label in labels) == [0.0, 1.0, 1.0]
    assert found[-1][0].bad == 1


def test_the_next_block_has_a_share_of_its_own(tmp_path, own_broker):
    rows = topic_rows.TopicRows(type("Plan", (), {"dataset": topic_dataset("kafka://a:1/b", max_bad_rows=0.01)})())
    place = rows.count(Place(), 98_500, 1_000)
    assert rows.count(place, 100, 900) == Place(rows=98_600, bad=1_900, bad_of_block=900)
    with pytest.raises(DataError, match="1,001 rows since row 0 are bad"):
        rows.count(place, 0, 1)


def test_a_filter_and_arrow_messages(tmp_path, own_broker, monkeypatch):
    """A window that ends inside a segment: reading goes on behind it."""
    monkeypatch.setattr(windows, "WINDOW_ROWS", 50)
    monkeypatch.setattr(kafka, "BLOCK_MESSAGES", 2)
    topic = own_broker.topic(1)
    table, sent = rows_of(0), []
    for first in range(0, FILE_ROWS, MESSAGE_ROWS):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(first, MESSAGE_ROWS))
        sent.append(sink.getvalue().to_pybytes())
    own_broker.send(topic, 0, sent)
    messages = {"format": "arrow", "columns": COLUMNS}
    dataset = topic_dataset(own_broker.uri(topic), messages=messages, filter="user > 0")
    expected = [row["click"] for row in table.to_pylist() if row["user"] is not None and row["user"] > 0]
    job = topic_job(len(expected), batch_size=16)
    found, _ = batches_of(tmp_path, dataset, job)
    assert sorted(label for _, labels in found for label in labels) == sorted(expected)
    number = next(n for n, (place, _) in enumerate(found) if place.row)
    place = found[number][0]
    again, _ = batches_of(tmp_path, dataset, job, place)
    # From the window of the next row on, whose first batch may begin inside it.
    assert again[-1][1] == found[-1][1]
    assert place.file == 0


def follow_on_ranks(directory, dataset, job):
    data = OnePassData.of(directory, dataset, job)
    trainer = trainer_of(job, data, backend="reference", dtype=torch.float64)
    trainer.train()
    rows = {name: gather_table(trainer.sharded, name) for name in data.tables}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = {name: one.rows for name, one in rows.items()} if is_first else None
    return found, {name: ids.state() for name, ids in trainer.dynamic_rows.ids.items()}, trainer.position.place


@pytest.mark.slow
def test_two_ranks_read_the_segments_that_rank_0_decides_on(tmp_path, own_broker, ranks):
    topic = own_broker.topic(2)
    put(own_broker, topic, range(2))
    dataset, job = topic_dataset(own_broker.uri(topic)), topic_job(2 * FILE_ROWS)
    with single_rank_group():
        directory = prepare(dataset, job, tmp_path / "data").directory
        expected, state, place = follow_on_ranks(directory, dataset, job)
    directory = prepare(dataset, job, tmp_path / "data-2").directory
    (found, mine, there), (_, other, also) = ranks(2).run(follow_on_ranks, directory, dataset, job)
    assert place == there == also
    assert place["is_end"]
    for table, of_table in state.items():
        for name, value in of_table.items():
            assert np.array_equal(value, mine[table][name]), name
            assert np.array_equal(value, other[table][name]), name
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < 1e-7, name
