"""What was found in files is looked for again once they change, and not before."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from service.datasets.file_cache import SETTLED_SECONDS, FileCache


class Looks:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        self.number += 1
        return self.number


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file had been left alone for a while."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + int(2 * SETTLED_SECONDS * 1e9))


@pytest.mark.usefixtures("settled")
def test_a_file_is_looked_at_again_once_it_changes(tmp_path: Path) -> None:
    file, look, kept = tmp_path / "file", Looks(), FileCache[int]()
    file.write_bytes(b"one")
    assert [kept.get("a", [file], look) for _ in range(3)] == [1, 1, 1]
    assert kept.get("b", [file], look) == 2
    times = file.stat()
    file.write_bytes(b"two")  # of the same length, its time set back
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert kept.get("a", [file], look) == 3
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.replace(other, file)
    assert kept.get("a", [file], look) == 4
    assert kept.get("a", [file, other], look) == 5  # one that is not there
    assert kept.get("a", [file, other], look) == 6


def test_what_changed_a_moment_ago_is_looked_at_every_time(tmp_path: Path) -> None:
    file, look, kept = tmp_path / "file", Looks(), FileCache[int]()
    file.write_bytes(b"one")
    assert [kept.get("a", [file], look) for _ in range(3)] == [1, 2, 3]


@pytest.mark.usefixtures("settled")
def test_the_latest_are_kept_and_failures_are_not(tmp_path: Path) -> None:
    file, look, kept = tmp_path / "file", Looks(), FileCache[int](size=2)
    file.write_bytes(b"one")

    def fail() -> int:
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            kept.get("a", [file], fail)
    assert [kept.get(key, [file], look) for key in "abacab"] == [1, 2, 1, 3, 1, 4]
    assert kept.get("no files", [], look) == 5
    assert kept.get("no files", [], look) == 6
