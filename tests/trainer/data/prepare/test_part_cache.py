"""A preparation that was killed goes on with what it had saved, and writes the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.trainer.data.prepare.cases import Case, contents, prepared_bytes, specs, write_rows
from trainer.data.columns import vocabulary
from trainer.data.errors import DataError
from trainer.data.prepare import encode, examples, progress
from trainer.data.prepare.coding import CodedColumn
from trainer.data.prepare.part_cache import PartCache, part_cache
from trainer.data.prepare.preparation import BAD_ROWS, prepare
from trainer.data.sources.source import Source
from trainer.runs.directory import DATA_PARTS
from trainer.spec import DatasetSpec, JobSpec

CASE = Case(bad_rows=True, split="time", num_rows=240)


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    make_small(monkeypatch.setattr)


def make_small(set_attribute: Callable[..., None], ids_bytes: int = 1 << 29) -> None:
    """Make of the rows six chunks, saved after each second one."""
    set_attribute(Source.stream, "__defaults__", (41,))
    set_attribute(vocabulary, "_LEAST_MERGE", 9)
    set_attribute(encode, "PART_ROWS", 80)
    set_attribute(encode, "IDS_BYTES", ids_bytes)


@pytest.fixture
def rows(tmp_path) -> Path:
    write_rows(CASE, tmp_path)
    return tmp_path


def prepare_and_die(
    specs_of_run: tuple[DatasetSpec, JobSpec], directory: Path, death: tuple[type, str, int], ids_bytes: int
) -> None:
    """Prepare until the end of a call of a method, counted from 1, which kills the process."""
    owner, method, calls = death
    make_small(setattr, ids_bytes)
    done = 0
    original = getattr(owner, method)

    def deadly(self, *args, **options):
        nonlocal done
        found = original(self, *args, **options)
        done += 1
        if done == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, method, deadly)
    prepare(*specs_of_run, directory, threads=1)


def kill(case: Case, folder: Path, directory: Path, death: tuple[type, str, int], ids_bytes: int = 1 << 29) -> None:
    """Have a process prepare ``directory`` and be killed."""
    log = folder / "killed.log"
    process = forked.start(prepare_and_die, specs(case, folder), directory, death, ids_bytes, log=log)
    process.join()
    assert process.exitcode == -signal.SIGKILL, log.read_text()
    assert not directory.exists()


def finished(case: Case, folder: Path, directory: Path) -> tuple[dict[str, bytes], list[str]]:
    """Prepare to the end; return the files, and what was said."""
    dataset, job = specs(case, folder)
    said: list[str] = []
    prepare(dataset, job, directory, threads=2, log=said.append)
    assert not (directory.parent / DATA_PARTS).exists()
    found = contents(directory)
    if (directory.parent / BAD_ROWS).exists():
        found[BAD_ROWS] = (directory.parent / BAD_ROWS).read_bytes()
    return found, said


@pytest.mark.process
@pytest.mark.parametrize(
    ("format_", "ids_bytes", "which"),
    [("parquet", 1 << 29, range(5)), ("csv", 1 << 29, (1,)), ("feather", 400, (2, 4))],
    ids=["parquet", "csv", "feather-400"],
)
def test_what_a_killed_process_saved_is_not_read_again(format_, ids_bytes, which, tmp_path, monkeypatch):
    """Each end once; of another format one after which rows are passed over, of ids on disk those with more of them."""
    case = Case(format=format_, bad_rows=True, split="time", num_rows=240)
    write_rows(case, tmp_path)
    expected = prepared_bytes(case, tmp_path, 1)
    monkeypatch.setattr(encode, "IDS_BYTES", ids_bytes)
    # (method, calls of it until the end, rows that are not read again)
    deaths = (
        (encode._EncodedWriter, "append", 2, 0),  # nothing was saved
        (PartCache, "save", 1, 80),
        (encode._EncodedWriter, "append", 4, 80),  # more was written than was saved
        (PartCache, "save", 3, 240),
        (CodedColumn, "finish", 2, 240),
    )
    for number in which:
        owner, method, calls, least = deaths[number]
        directory = tmp_path / f"killed-{number}" / "data"
        kill(case, tmp_path, directory, (owner, method, calls), ids_bytes)
        found, said = finished(case, tmp_path, directory)
        assert found == expected
        rows = [int(one.split()[2]) for one in said if "an earlier attempt" in one]
        assert rows == [] if least == 0 else rows[0] >= least


@pytest.mark.process
def test_killed_twice(rows):
    expected = prepared_bytes(CASE, rows, 1)
    directory = rows / "killed" / "data"
    kill(CASE, rows, directory, (PartCache, "save", 1))
    kill(CASE, rows, directory, (encode._EncodedWriter, "append", 3))
    found, said = finished(CASE, rows, directory)
    assert found == expected
    assert any("continues after" in one for one in said)


@pytest.mark.process
def test_rows_that_changed_are_read_from_the_beginning(rows):
    directory = rows / "killed" / "data"
    kill(CASE, rows, directory, (PartCache, "save", 2))
    os.utime(next((rows / "rows").iterdir()), ns=(1, 1))
    _, said = finished(CASE, rows, directory)
    assert not any("continues after" in one for one in said)


@pytest.mark.process
@pytest.mark.parametrize("name", ["value-0", "parts.json"])
def test_parts_that_are_not_what_was_saved_are_read_again(name, rows):
    expected = prepared_bytes(CASE, rows, 1)
    directory = rows / "killed" / "data"
    kill(CASE, rows, directory, (PartCache, "save", 2))
    os.truncate(directory.parent / DATA_PARTS / name, 100)
    found, said = finished(CASE, rows, directory)
    assert found == expected
    assert not any("continues after" in one for one in said)


def flip_a_bit(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.process
@pytest.mark.parametrize("death", [(PartCache, "save", 2), (CodedColumn, "finish", 2)], ids=["reading", "finishing"])
def test_a_bit_that_flipped_is_found_and_all_is_read_again(death, rows):
    """In each file in turn, of those that a preparation which goes on would use; of those that both have in one."""
    expected = prepared_bytes(CASE, rows, 1)
    killed = rows / "killed" / "data"
    kill(CASE, rows, killed, death)
    kept = sorted(path.name for path in (killed.parent / DATA_PARTS).iterdir() if path.stat().st_size)
    assert {"parts.json", "bad-rows-0", "table-0.places", *(f"value-{number}" for number in range(4))} <= {*kept}
    coded = [name for name in kept if name.endswith(".coded")]
    assert bool(coded) == (death[0] is CodedColumn)
    for name in [*coded, f"{coded[0]}.crc32"] if coded else kept:
        directory = rows / "flipped" / name / "data"
        shutil.copytree(killed.parent, directory.parent)
        path = directory.parent / DATA_PARTS / name
        flip_a_bit(path, path.stat().st_size // 3)
        found, said = finished(CASE, rows, directory)
        assert found == expected, name
        assert not any("continues after" in one for one in said), name


@pytest.mark.process
def test_what_was_written_after_the_last_save_may_be_anything(rows):
    directory = rows / "killed" / "data"
    kill(CASE, rows, directory, (PartCache, "save", 2))
    for path in (directory.parent / DATA_PARTS).iterdir():
        if path.name.partition("-")[0] in ("value", "column", "table"):
            path.write_bytes(path.read_bytes() + b"torn")
    found, said = finished(CASE, rows, directory)
    assert found == prepared_bytes(CASE, rows, 1)
    assert any("continues after" in one for one in said)


def test_an_error_leaves_what_was_saved_and_only_that(rows, monkeypatch):
    dataset, job = specs(CASE, rows)
    directory = rows / "one" / "data"

    def full(self, durable):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(CodedColumn, "finish", full)
        with pytest.raises(DataError, match="No space left on device"):
            prepare(dataset, job, directory)
        assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == [DATA_PARTS]
        patch.setattr(encode, "PART_ROWS", 1000)
        with pytest.raises(DataError, match="No space left on device"):
            prepare(dataset, job, rows / "other" / "data")
        assert [path.name for path in (rows / "other").iterdir()] == [BAD_ROWS]
    found, said = finished(CASE, rows, directory)
    assert found == prepared_bytes(CASE, rows, 1)
    assert any("continues after" in one for one in said)


def test_parts_that_another_process_is_at_are_left_alone(rows):
    dataset, job = specs(CASE, rows)
    directory = rows / "one" / "data"
    with part_cache(directory, "another", rows / "unused") as other:
        appender = other.appender("numbers", "int64")
        prepare(dataset, job, directory)
        assert appender.path.exists()
    assert contents(directory)
    assert not (directory.parent / DATA_PARTS).exists()


def test_progress_says_parts_and_rates(rows, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS", -1.0)
    _, said = finished(CASE, rows, rows / "one" / "data")
    assert said[0].startswith("read and coded 41 of 240 rows, part 1 of 3, ")
    assert said[0].endswith(" rows a second")
    assert [one for one in said if "240 of 240 rows, part 3 of 3" in one]


def test_figures_say_how_far_reading_and_writing_are(rows, monkeypatch):
    monkeypatch.setattr(progress, "REPORT_SECONDS", -1.0)
    monkeypatch.setattr(examples, "CHUNK_ROWS", 100)
    told: list[dict[str, Any]] = []
    prepare(*specs(CASE, rows), rows / "one" / "data", report=lambda **figures: told.append(figures))
    read, written = [[one for one in told if one["stage"] == stage] for stage in ("read", "write")]
    assert told == [*read, *written]
    # A chunk of 41 rows ends with its row group, of 80.
    assert [one["rows"] for one in read] == [41, 80, 121, 162, 203, 240]
    assert {one["total_rows"] for one in read} == {240}
    good = written[-1]["total_rows"]
    assert 200 < good < 240, "bad rows are not written"
    assert [one["rows"] for one in written] == [100, 200, good]
    assert all(one["rows_per_second"] > 0 for one in told)


def test_a_format_that_does_not_say_its_rows_has_no_total(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "REPORT_SECONDS", -1.0)
    case = Case(format="csv")
    write_rows(case, tmp_path)
    told: list[dict[str, Any]] = []
    prepare(*specs(case, tmp_path), tmp_path / "data", report=lambda **figures: told.append(figures))
    assert {one["total_rows"] for one in told if one["stage"] == "read"} == {None}


def test_a_preparation_of_less_than_a_second_reports_nothing(rows, monkeypatch):
    monkeypatch.setattr(progress, "REPORT_SECONDS", 600.0)
    told: list[dict[str, Any]] = []
    prepare(*specs(CASE, rows), rows / "one" / "data", report=lambda **figures: told.append(figures))
    assert told == []
