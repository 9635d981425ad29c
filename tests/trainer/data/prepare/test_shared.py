"""Runs of one host that would prepare the same data prepare them once."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.trainer.data.prepare.cases import Case, contents, specs
from tests.trainer.data.prepare.cases import write_rows as write_new_rows
from trainer.data.prepare import encode
from trainer.data.prepare.preparation import BAD_ROWS, prepare
from trainer.data.prepare.shared import SharedPreparedData, shared_on_host
from trainer.spec import parse_job

CASE = Case(bad_rows=True, num_rows=120)


@pytest.fixture
def readings(monkeypatch) -> list[int]:
    """Of each time that the rows are read an entry."""
    found: list[int] = []
    original = encode._EncodedWriter.encoded

    def counted(self):
        found.append(self.num_read)
        return original(self)

    monkeypatch.setattr(encode._EncodedWriter, "encoded", counted)
    return found


def write_rows(case: Case, folder: Path) -> None:
    """Write the rows of a case, as of yesterday: what was changed just now is shared with nobody."""
    write_new_rows(case, folder)
    for path in folder.rglob("*.parquet"):
        os.utime(path, ns=(time.time_ns() - 86_400 * 10**9,) * 2)


def all_of(folder: Path) -> dict[str, bytes]:
    found = contents(folder / "data")
    if (folder / BAD_ROWS).exists():
        found[BAD_ROWS] = (folder / BAD_ROWS).read_bytes()
    return found


def test_many_runs_at_once_over_one_file_prepare_it_once(tmp_path, readings):
    write_rows(CASE, tmp_path)
    dataset, job = specs(CASE, tmp_path)
    shared = SharedPreparedData(tmp_path / "shared")
    said: list[str] = []

    def run(number: int) -> None:
        # A job of another name and with other training is one of the same data.
        other = job.model_copy(update={"name": f"job-{number}", "epochs": number + 1})
        folder = tmp_path / f"run-{number}"
        prepare(dataset, other, folder / "data", threads=1, shared=shared, log=said.append)

    runs = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for one in runs:
        one.start()
    for one in runs:
        one.join()
    assert readings == [120]
    assert said.count("prepared data of another run of this host are used") == 7
    expected = all_of(tmp_path / "run-0")
    assert all(all_of(tmp_path / f"run-{number}") == expected for number in range(1, 8))
    column = [(tmp_path / f"run-{number}" / "data" / "train" / "user.bin").stat() for number in (3, 7)]
    assert column[0].st_ino == column[1].st_ino, "the disk holds them once"


@pytest.mark.slow
def test_what_makes_other_data_is_prepared_anew(tmp_path, readings):
    """One after the other over one file: each has the bytes that it has alone."""
    case = dataclasses.replace(CASE, joined=False, history=False, weighted=False)
    write_rows(case, tmp_path)
    dataset, job = specs(case, tmp_path)
    ids = {name: one for name, one in dataset.features.items() if one.type == "id"}
    pairs = dataset.model_copy(update={"features": ids})
    shared = SharedPreparedData(tmp_path / "shared")
    changes = (
        (dataset, {}),
        (dataset, {"batch_size": 64}),
        (dataset, {"seed": 7}),
        (dataset, {"evaluation": {"split": {"kind": "time"}}}),
        (dataset, {"evaluation": {"split": {"kind": "per_user_last"}}}),
        (dataset, {"evaluation": {"metrics": ["auc", "gauc"]}}),
        (dataset, {"tables": {"item": {"capacity": 20}}}),
        (dataset.model_copy(update={"max_bad_rows": 0.4}), {}),
        (pairs, {"model": {"kind": "two_tower"}}),
        (pairs, {"model": {"kind": "bpr", "loss": "bpr"}}),
        (pairs, {"model": {"kind": "sasrec", "loss": "bce"}}),
        (pairs, {"model": {"kind": "item2vec"}}),
        (pairs, {"model": {"kind": "dnn"}}),
    )
    for number, (rows, change) in enumerate(changes):
        changed = parse_job(job.model_dump(mode="json", exclude_unset=True) | change).against(rows)
        folder, alone = tmp_path / f"run-{number}", tmp_path / f"alone-{number}"
        prepare(rows, changed, folder / "data", threads=1, shared=shared)
        prepare(rows, changed, alone / "data", threads=1)
        assert all_of(folder) == all_of(alone), change
    before = len(readings)
    os.utime(tmp_path / "rows" / "b.parquet", (1, 1))
    prepare(dataset, job, tmp_path / "touched" / "data", threads=1, shared=shared)
    assert len(readings) == before + 1


def test_what_is_damaged_or_was_evicted_is_prepared_again(tmp_path, readings):
    write_rows(CASE, tmp_path)
    shared = SharedPreparedData(tmp_path / "shared")
    prepare(*specs(CASE, tmp_path), tmp_path / "first" / "data", threads=1, shared=shared)
    expected = all_of(tmp_path / "first")
    file = max((tmp_path / "shared" / "files").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.unlink()
    file.write_bytes(content)
    prepare(*specs(CASE, tmp_path), tmp_path / "second" / "data", threads=1, shared=shared)
    assert (all_of(tmp_path / "second"), len(readings)) == (expected, 2)

    # Room for one of two: the one that was used longest ago goes, its runs keep what they have.
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "shared" / "files").iterdir())
    small = SharedPreparedData(tmp_path / "shared", num_bytes + num_bytes // 4)
    other = dataclasses.replace(CASE, split="time")
    prepare(*specs(other, tmp_path), tmp_path / "third" / "data", threads=1, shared=small)
    assert sum(path.stat().st_size for path in (tmp_path / "shared" / "files").iterdir()) <= small._cache.limit_bytes
    prepare(*specs(other, tmp_path), tmp_path / "fourth" / "data", threads=1, shared=small)
    assert len(readings) == 3
    prepare(*specs(CASE, tmp_path), tmp_path / "fifth" / "data", threads=1, shared=small)
    assert (all_of(tmp_path / "fifth"), all_of(tmp_path / "first"), len(readings)) == (expected, expected, 4)
    assert small.clean() > 0
    assert list((tmp_path / "shared" / "files").iterdir()) == []
    assert all_of(tmp_path / "first") == expected


def test_a_tenant_takes_nothing_of_another_nor_a_release_of_the_one_before(tmp_path, readings, monkeypatch):
    write_rows(CASE, tmp_path)
    for number, (owner, release) in enumerate((("a", "1"), ("b", "1"), ("a", "1"), ("a", "2"), ("b", "1"))):
        monkeypatch.setattr("importlib.metadata.version", lambda name, release=release: release)
        shared = SharedPreparedData(tmp_path / "shared", owner=owner)
        prepare(*specs(CASE, tmp_path), tmp_path / f"{number}" / "data", threads=1, shared=shared)
    assert len(readings) == 3


def changed_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = encode._EncodedWriter.encoded

    def encoded(self):
        path.touch()
        return original(self)

    monkeypatch.setattr(encode._EncodedWriter, "encoded", encoded)


@pytest.mark.parametrize("file", ["rows/b.parquet", "attributes.parquet"])
def test_rows_that_change_while_they_are_read_are_shared_with_nobody(file, tmp_path, monkeypatch):
    write_rows(CASE, tmp_path)
    shared, before = SharedPreparedData(tmp_path / "shared"), (tmp_path / file).stat()
    with monkeypatch.context() as patch:
        changed_meanwhile(tmp_path / file, patch)
        prepare(*specs(CASE, tmp_path), tmp_path / "first" / "data", threads=1, shared=shared)
    # With the time that they had, as a restored copy of them has: what is known by it was read of others.
    os.utime(tmp_path / file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert list((tmp_path / "shared").glob("*.json")) == []
    prepare(*specs(CASE, tmp_path), tmp_path / "second" / "data", threads=1, shared=shared)
    assert len(list((tmp_path / "shared").glob("*.json"))) == 1
    # Changed just before: the plan may have read of a joined file what it was.
    (tmp_path / file).touch()
    prepare(*specs(CASE, tmp_path), tmp_path / "third" / "data", threads=1, shared=shared)
    assert len(list((tmp_path / "shared").glob("*.json"))) == 1


def test_a_process_that_ends_while_it_keeps_data_leaves_nothing_that_is_taken(tmp_path, readings, monkeypatch):
    write_rows(CASE, tmp_path)
    shared = SharedPreparedData(tmp_path / "shared")

    class Killed(BaseException):
        pass

    adopted: list[Path] = []
    original = shared._cache.adopt

    def adopt(path: Path, *arguments: object, **options: object) -> None:
        if len(adopted) == 3:
            raise Killed
        adopted.append(path)
        original(path, *arguments, **options)

    monkeypatch.setattr(shared._cache, "adopt", adopt)
    with pytest.raises(Killed):
        prepare(*specs(CASE, tmp_path), tmp_path / "first" / "data", threads=1, shared=shared)
    assert list((tmp_path / "shared" / "files").iterdir()) != []
    other = SharedPreparedData(tmp_path / "shared")
    prepare(*specs(CASE, tmp_path), tmp_path / "second" / "data", threads=1, shared=other)
    assert (len(readings), all_of(tmp_path / "second")) == (2, all_of(tmp_path / "first"))


def test_nobody_waits_for_data_that_there_is_no_room_for(tmp_path):
    (tmp_path / "column").write_bytes(b"12345")
    shared = SharedPreparedData(tmp_path / "shared", limit_bytes=4)
    with shared.only_one("key", print):
        shared.keep("key", {"column": tmp_path / "column"})
    said: list[str] = []
    with shared.only_one("key", said.append), shared.only_one("key", said.append):
        assert not shared.take("key", tmp_path)
    assert said == []
    # With more room it is shared as any other.
    larger = SharedPreparedData(tmp_path / "shared", limit_bytes=5)
    larger.keep("key", {"column": tmp_path / "column"})
    (tmp_path / "taken").mkdir()
    assert larger.take("key", tmp_path / "taken")


def test_the_environment_says_what_is_shared_and_where(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "cache"))
    assert shared_on_host("store", tmp_path, said.append) is None
    monkeypatch.delenv("EVENKEEL_PREPARED_BYTES")
    assert shared_on_host("store", tmp_path, said.append) is not None
    assert said == []
    # On another file system the files would be copies.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        assert shared_on_host("store", Path(elsewhere), said.append) is None
        assert "Invalid cross-device link" in said.pop()
        assert list(Path(elsewhere).iterdir()) == []
    # Where another user could write records that runs would believe, and where nothing can be made, jobs go on alone.
    (tmp_path / "cache" / "prepared").chmod(0o777)
    assert shared_on_host("store", tmp_path, said.append) is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "file"))
    assert shared_on_host("store", tmp_path, said.append) is None
    assert len(said) == 2
    assert "prepared: remove it, or set EVENKEEL_CACHE to another folder" in said[0]
    monkeypatch.setenv("EVENKEEL_PREPARED_BYTES", "much")
    with pytest.raises(ValueError, match="EVENKEEL_PREPARED_BYTES is 'much': write a number of bytes"):
        shared_on_host("store", tmp_path, said.append)
