"""A preparation by tasks writes the bytes of one process, whichever host performs them, in any order."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.trainer.data.prepare.cases import Case, contents, prepared_bytes, specs, write_rows
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns import numeric, vocabulary
from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.errors import DataError
from trainer.data.prepare import drift, encode, examples, numbers, table_rows
from trainer.data.prepare.by_tasks import assembly, stages, tasks
from trainer.data.prepare.by_tasks.assembly import forget_parts
from trainer.data.prepare.by_tasks.stages import perform
from trainer.data.prepare.by_tasks.tasks import Setting, Task
from trainer.data.prepare.encode import Span, cut_spans
from trainer.data.prepare.preparation import prepare
from trainer.data.sources.source import Source
from trainer.launch.driver import execute
from trainer.runs.directory import TASK_RESULTS
from trainer.spec import parse_dataset, parse_job
from trainer.storage.base import StorageError
from trainer.storage.storage_registry import open_storage

CHUNK = 41


class Killed(BaseException):
    """Stands for the end of the process."""


class HostsHere:
    """Performs tasks in this process, in an order of its own; ``killed_after`` so many it dies."""

    threads = 1

    def __init__(self, folder: Path, seed: int = 0, killed_after: int | None = None):
        self.folder, self.storage = folder, (folder / "storage").as_uri()
        self.performed: list[str] = []
        self.said: list[str] = []
        self._random, self._killed_after = random.Random(seed), killed_after
        (folder / "work").mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def runner(self, setting: Setting, log: Callable[[str], Any]) -> Iterator[HostsHere]:
        self._setting = setting
        yield self

    def run(self, asked: Sequence[Task], done: Callable[[Task], None]) -> None:
        failed: dict[int, DataError] = {}
        for place in self._random.sample(range(len(asked)), len(asked)):
            if len(self.performed) == self._killed_after:
                raise Killed
            try:
                perform(self._setting, asked[place], self.folder / "work")
            except DataError as error:
                failed[place] = error
                continue
            self.performed.append(asked[place].name)
            done(asked[place])
        if failed:
            raise failed[min(failed)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, tmp_path):
    """Many spans, chunks, merges and pieces where data are small."""
    monkeypatch.setattr(Source.stream, "__defaults__", (CHUNK,))
    monkeypatch.setattr(vocabulary, "_LEAST_MERGE", 9)
    for module in (examples, stages):
        monkeypatch.setattr(module, "CHUNK_ROWS", 53)
    monkeypatch.setattr(table_rows, "_PIECE_ROWS", 64)
    monkeypatch.setattr(numbers, "_PIECE_VALUES", 64)
    monkeypatch.setattr(assembly, "SPAN_ROWS", 2 * CHUNK)
    monkeypatch.setattr(drift, "_SAMPLE_ROWS", 60)
    monkeypatch.setattr(numeric, "_PIECE_ROWS", 50)
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "cache"))


def by_tasks(case: Case, folder: Path, hosts: HostsHere) -> dict[str, bytes]:
    """Prepare a case; return its files, or the error as one."""
    return prepared_bytes(case, folder, into=hosts.folder, hosts=hosts, log=hosts.said.append)


CASES = st.builds(
    Case,
    format=st.sampled_from(("parquet", "parquet", "feather")),
    label=st.sampled_from(("column", "rule", "value")),
    split=st.sampled_from(("random", "time", "column")),
    joined=st.booleans(),
    history=st.just(False),
    weighted=st.booleans(),
    bad_rows=st.booleans(),
    warm_start=st.booleans(),
    capacity=st.booleans(),
    strings=st.booleans(),
    vectors=st.booleans(),
    filtered=st.booleans(),
    num_rows=st.integers(100, 250),
    seed=st.integers(0, 1 << 20),
)


EVERYTHING = Case(
    history=False,
    split="time",
    bad_rows=True,
    warm_start=True,
    vectors=True,
    filtered=True,
    calendar=True,
    num_rows=200,
)


@pytest.mark.slow
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES, ids_bytes=st.sampled_from((400, 1 << 29)))
@example(case=EVERYTHING, ids_bytes=400)
def test_tasks_in_any_order_write_the_bytes_of_one_process(case, ids_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    write_rows(case, folder)
    expected = prepared_bytes(case, folder, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "IDS_BYTES", ids_bytes)
        hosts = HostsHere(folder / "tasks", seed=case.seed)
        assert by_tasks(case, folder, hosts) == expected
    assert case is not EVERYTHING or "error" not in expected
    if "error" not in expected:
        assert len([name for name in hosts.performed if name.startswith("rows-")]) > 1


def test_tasks_read_integers_as_the_text_that_the_job_goes_on_from(tmp_path):
    table = pa.table({"item": [n % 9 for n in range(200)], "click": [n % 2 for n in range(200)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    dataset = parse_dataset(
        {
            "name": "clicks",
            "uri": str(tmp_path / "rows.parquet"),
            "features": {"item": {"type": "id"}},
            "label": {"column": "click"},
        }
    )
    job = parse_job({"name": "job", "dataset": {"name": "clicks"}, "model": {"kind": "dnn"}, "batch_size": 64})
    base, hosts = {"item": IdMap(pa.array(["x", "7"], pa.large_string()))}, HostsHere(tmp_path / "tasks")
    alone = prepare(dataset, job, tmp_path / "alone", base_vocabulary=base, threads=1)
    data = prepare(dataset, job, tmp_path / "data", base_vocabulary=base, threads=1, hosts=hosts)
    assert any(name.startswith("table-") for name in hosts.performed)
    assert contents(data.directory) == contents(alone.directory)
    assert data.vocabulary("item").to_pylist() == ["x", "7", "0", "1", "2", "3", "4", "5", "6", "8"]


ROWS = Case(history=False, bad_rows=True, split="time", num_rows=230)


@pytest.mark.slow
def test_what_was_done_before_the_end_of_the_process_is_not_done_again(tmp_path):
    write_rows(ROWS, tmp_path)
    expected = prepared_bytes(ROWS, tmp_path, 1)
    first = HostsHere(tmp_path / "tasks", killed_after=7)
    with pytest.raises(Killed):
        by_tasks(ROWS, tmp_path, first)
    assert not (first.folder / "data").exists()
    second = HostsHere(tmp_path / "tasks")
    assert by_tasks(ROWS, tmp_path, second) == expected
    assert len(first.performed) == 7
    assert not set(first.performed) & set(second.performed)
    # Of another preparation nothing is used, and nothing stays.
    other = dataclasses.replace(ROWS, split="random")
    third = HostsHere(tmp_path / "tasks")
    (third.folder / "data").rename(tmp_path / "before")
    assert by_tasks(other, tmp_path, third) == prepared_bytes(other, tmp_path, into=tmp_path / "other")
    assert len(third.performed) == len(first.performed) + len(second.performed)
    storage = open_storage(third.storage)
    assert {one.name.split("/")[1] for one in storage.list("parts/")} == {third._setting.prefix.split("/")[1]}
    forget_parts(storage)
    assert storage.list("parts/") == []


@pytest.mark.process
def test_a_driver_hands_its_run_to_hosts_and_leaves_nothing_of_theirs(make_run, small, tmp_path, monkeypatch):
    monkeypatch.setattr(assembly, "SPAN_ROWS", 1500)
    monkeypatch.setattr(Source.stream, "__defaults__", (500,))
    hosts, run = HostsHere(tmp_path / "tasks"), make_run()
    seen: list[bytes] = []

    def ranks(run_of_driver) -> None:
        seen.append((run_of_driver.data / "train" / "user.bin").read_bytes())
        raise RuntimeError("lost")

    assert execute(run, ranks, hosts) != 0
    alone = prepare(run.dataset, run.job, tmp_path / "alone", threads=1)
    assert seen == [(alone.directory / "train" / "user.bin").read_bytes()]
    assert [name for name in hosts.performed if name.startswith("read-")]
    assert open_storage(hosts.storage).list("") == []
    # The run's own storage is not where these hosts have theirs: nothing of the run is removed.
    assert PreparedData.fingerprint_of(run.data) == PreparedData.fingerprint_of(tmp_path / "alone")


def test_what_retention_removes_of_a_run_is_what_tasks_have_made():
    assert tasks.PARTS == TASK_RESULTS


def test_a_damaged_result_is_said_and_made_again_by_the_next_attempt(tmp_path):
    write_rows(ROWS, tmp_path)
    first = HostsHere(tmp_path / "tasks", killed_after=3)
    with pytest.raises(Killed):
        by_tasks(ROWS, tmp_path, first)
    folders = first._setting.folders()
    (damaged, *_), folder = first.performed, folders.read(first.performed[0])
    path = open_storage(first.storage).path(f"{first._setting.prefix}/files/{folder.token}/column-0")
    assert path is not None
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    second = HostsHere(tmp_path / "tasks")
    with pytest.raises(StorageError, match="does not hold the"):
        by_tasks(ROWS, tmp_path, second)
    third = HostsHere(tmp_path / "tasks")
    assert by_tasks(ROWS, tmp_path, third) == prepared_bytes(ROWS, tmp_path, 1)
    assert damaged in third.performed


def test_a_host_that_sees_other_files_prepares_nothing(tmp_path):
    write_rows(ROWS, tmp_path)
    hosts = HostsHere(tmp_path / "tasks", killed_after=0)
    with pytest.raises(Killed):
        by_tasks(ROWS, tmp_path, hosts)
    tasks._planned.cache_clear()
    os.utime(tmp_path / "rows" / "b.parquet", (1, 1))
    with pytest.raises(DataError, match=r"sees other files .*let all hosts mount the same directory"):
        perform(hosts._setting, Task("read", 0, [(0, 0), (0, 41)]), tmp_path)


@pytest.mark.parametrize(
    ("why", "case"),
    [
        ("histories", Case(num_rows=100)),
        ("drawn negatives", Case(history=False, label="negatives", num_rows=100)),
        ("evaluation.split.kind: per_user_last", Case(history=False, split="per_user_last", num_rows=100)),
        ("what users had in training", Case(history=False, model="bpr", num_rows=100)),
        ("sequences", Case(history=False, model="sasrec", num_rows=100)),
        ("the types of CSV", Case(history=False, format="csv", num_rows=100)),
    ],
)
def test_what_needs_all_rows_is_prepared_without_tasks_and_told(why, case, tmp_path):
    write_rows(case, tmp_path)
    hosts = HostsHere(tmp_path / "tasks")
    assert "error" not in by_tasks(case, tmp_path, hosts)
    assert hosts.performed == []
    assert f"prepares on this host: {why} need all rows" in hosts.said


def test_an_item_table_is_read_by_each_task_and_one_pass_by_none(tmp_path):
    """One pass reads no row before it trains; numbers and vectors of items are found by each task."""
    write_rows(Case(history=False), tmp_path)
    dataset, job = specs(Case(history=False, model="bpr"), tmp_path)
    rng = np.random.default_rng(0)
    items = {"item": [f"i{number}" for number in range(50)], "size": rng.random(50), "v": rng.random((50, 2)).tolist()}
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    features = {"size": {"type": "dense"}, "v": {"type": "vector", "dim": 2}}
    table = {"uri": str(tmp_path / "items.parquet"), "features": features}
    with_items = parse_dataset(dataset.model_dump(mode="json", exclude_unset=True) | {"items": table})
    document = job.model_dump(mode="json", exclude_unset=True)
    towers = parse_job(document | {"model": {"kind": "two_tower"}}).against(with_items)
    hosts = HostsHere(tmp_path / "tasks")
    prepare(with_items, towers, tmp_path / "alone", threads=1)
    prepare(with_items, towers, tmp_path / "data", threads=1, hosts=hosts)
    assert contents(tmp_path / "data") == contents(tmp_path / "alone")
    assert [name for name in hosts.performed if name.startswith("rows-")]
    one_pass = parse_job(
        document
        | {"model": {"kind": "dcnv2"}, "dataset": {"name": "rows", "one_pass": True}}
        | {"optimizer": {"kind": "adam"}}
        | {"tables": {name: {"capacity": 100} for name in ("user", "item")}}
    ).against(dataset)
    hosts = HostsHere(tmp_path / "none")
    prepare(dataset, one_pass, tmp_path / "one-pass", threads=1, hosts=hosts)
    assert hosts.performed == []


@pytest.mark.parametrize(("prefix", "num_items"), [("other", 50), ("i", 12)])
def test_a_joined_file_that_lacks_rows_is_told_of_as_by_one_process(tmp_path, prefix, num_items):
    """One that has no key is refused, one that lacks most of them is a warning, with the first keys of all spans."""
    write_rows(Case(history=False), tmp_path)
    dataset, job = specs(Case(history=False), tmp_path)
    brands = {"item": [f"{prefix}{number}" for number in range(num_items)], "brand": [1] * num_items}
    pq.write_table(pa.table(brands), tmp_path / "brands.parquet")
    brand = {"type": "id", "join": {"uri": str(tmp_path / "brands.parquet"), "on": "item", "column": "brand"}}
    document = dataset.model_dump(mode="json", exclude_unset=True)
    joined = parse_dataset(document | {"features": document["features"] | {"brand": brand}})

    def told(name: str, **hosts: Any) -> object:
        try:
            return prepare(joined, job, tmp_path / name, threads=1, **hosts).warnings
        except DataError as error:
            return str(error)

    alone = told("alone")
    assert ("joins 0 of" in alone) if prefix == "other" else len(alone) == 1
    assert told("data", hosts=HostsHere(tmp_path / "tasks")) == alone


def test_spans_hold_all_rows_in_their_order_and_cut_chunks_nowhere(tmp_path):
    for name, count in (("a", 100), ("b", 10), ("c", 20), ("d", 0), ("e", 95)):
        pq.write_table(pa.table({"x": range(count)}), tmp_path / f"{name}.parquet", row_group_size=7)
    source = Source(str(tmp_path))
    spans = cut_spans(source, 41)
    assert spans == [
        Span((0, 0), (0, 41)),
        Span((0, 41), (0, 82)),
        Span((0, 82), (1, 10)),
        Span((2, 0), (2, 20)),
        Span((4, 0), (4, 41)),
        Span((4, 41), (4, 82)),
        Span((4, 82), (4, 95)),
    ]
    whole = [(chunk.file, chunk.rows.tolist(), chunk.batch) for chunk in source.stream(["x"], 41)]
    cut = [
        (chunk.file, chunk.rows.tolist(), chunk.batch)
        for span in spans
        for chunk in source.stream(["x"], 41, start=span.start, stop=span.stop)
    ]
    assert [one[:2] for one in cut] == [one[:2] for one in whole]
    assert all(left[2].equals(right[2]) for left, right in zip(cut, whole, strict=True))
