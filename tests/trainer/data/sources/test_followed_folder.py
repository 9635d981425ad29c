"""Files of a folder that is followed: their order, files that are late, torn, gone or changed, and the end."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.errors import DataError
from trainer.data.sources import followed_folder
from trainer.data.sources.followed_folder import EndOfFolder, FollowedFolder, Taken, first_file
from trainer.spec import Follow


def put(folder, name, rows=3):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"item": list(range(rows))}), folder / name)
    return folder / name


@pytest.fixture
def notes():
    return []


@pytest.fixture
def following(tmp_path, notes):
    def make(**settings):
        return FollowedFolder(str(tmp_path), Follow(**settings), notes.append)

    return make


def names(folder, start=0):
    """Names of the files that can be read now."""
    found = []
    while (taken := folder.next(start + len(found))) is not None:
        assert taken.number == start + len(found)
        found.append(taken.name)
    return found


def test_files_come_in_the_order_of_their_paths_and_those_of_others_are_passed_over(tmp_path, following):
    for name in ("day=2/a.parquet", "day=1/b.parquet", "day=1/_temporary/c.parquet", ".d.parquet", "e.parquet.tmp"):
        put(tmp_path, name)
    folder = following()
    assert names(folder) == ["day=1/b.parquet", "day=2/a.parquet"]
    put(tmp_path, "day=3/a.parquet")
    assert names(folder, 2) == ["day=3/a.parquet"]
    # A number that was asked for before is the same file.
    assert folder.next(1).name == "day=2/a.parquet"


def test_a_late_file_is_told_of_once_and_not_read(tmp_path, following, notes):
    put(tmp_path, "b.parquet")
    folder = following()
    assert names(folder) == ["b.parquet"]
    put(tmp_path, "a.parquet")
    put(tmp_path, "c.parquet")
    assert names(folder, 1) == ["c.parquet"]
    assert notes == ["not read, because it sorts before b.parquet and appeared after the reading of that: a.parquet"]
    assert folder.figures(1) == {"files": 1, "files_behind": 0, "seconds_behind": 0.0, "late_files": 1}


def test_a_late_file_can_be_refused(tmp_path, following):
    put(tmp_path, "b.parquet")
    folder = following(late="refuse")
    assert names(folder) == ["b.parquet"]
    put(tmp_path, "a.parquet")
    with pytest.raises(
        DataError, match=r"a.parquet: appeared after the reading of b.parquet.*dataset.follow.late to report"
    ):
        folder.next(1)


@pytest.mark.parametrize("late", ["report", "refuse"])
def test_a_file_that_is_late_is_told_of_although_it_was_told_of_before_as_torn(
    tmp_path, following, notes, monkeypatch, late
):
    """Its owner has removed it, as the log says, and writes it again. One that changes once it is read is told of."""
    monkeypatch.setattr(followed_folder, "UNREADABLE_SECONDS", 0.0)
    (tmp_path / "a.parquet").write_bytes(b"PAR1torn")
    put(tmp_path, "b.parquet").write_bytes(b"PAR1torn")
    folder = following(late=late)
    assert names(folder) == names(folder) == []
    (tmp_path / "a.parquet").unlink()
    assert names(folder) == names(folder) == []
    assert len(notes) == 2
    put(tmp_path, "b.parquet")
    assert names(folder) == ["b.parquet"]
    put(tmp_path, "b.parquet", rows=1)
    put(tmp_path, "a.parquet")
    if late == "refuse":
        with pytest.raises(DataError, match=r"a.parquet: appeared after the reading of b.parquet"):
            folder.next(1)
    else:
        assert folder.next(1) is None
        assert [note.rpartition(": ")[2] for note in notes[2:]] == ["a.parquet", "b.parquet"]
        assert folder.figures(1)["late_files"] == 1


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_without_its_end_is_waited_for_and_told_of_after_a_while(tmp_path, following, notes, monkeypatch, size):
    path = put(tmp_path, "a.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    put(tmp_path, "b.parquet")
    folder = following()
    assert names(folder) == []
    assert notes == []
    monkeypatch.setattr(followed_folder, "UNREADABLE_SECONDS", 0.0)
    assert names(folder) == names(folder) == []
    (note,) = notes
    assert note.startswith("a.parquet cannot be opened, and the files after it wait: ")
    assert folder.figures(0)["files_behind"] == 2
    path.write_bytes(whole)
    assert names(folder) == ["a.parquet", "b.parquet"]


def test_a_file_that_is_torn_although_the_end_is_marked_is_refused(tmp_path, following):
    path = put(tmp_path, "a.parquet")
    path.write_bytes(path.read_bytes()[:100])
    (tmp_path / "_END").touch()
    with pytest.raises(DataError, match=r"a.parquet: cannot be read as Parquet"):
        following(until="_END").next(0)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a.parquet: is empty"):
        following(until="_END").next(0)


def test_it_ends_behind_the_last_file_once_it_is_marked(tmp_path, following, monkeypatch):
    """A file that came before the marker is read, also where the look at the folder saw only the marker."""
    put(tmp_path, "a.parquet")
    folder = following(until="_END")
    assert names(folder) == ["a.parquet"]
    (tmp_path / "_END").touch()
    looks, listed = [], followed_folder.listed

    def hasty(uri, **settings):
        looks.append(uri)
        if len(looks) == 1:
            found = listed(uri, **settings)
            put(tmp_path, "b.parquet")
            return found
        return listed(uri, **settings)

    monkeypatch.setattr(followed_folder, "listed", hasty)
    assert folder.next(1).name == "b.parquet"
    with pytest.raises(EndOfFolder):
        folder.next(2)


def test_a_file_settles_before_it_is_read_unless_the_end_is_marked(tmp_path, following):
    path = put(tmp_path, "a.parquet")
    folder = following(until="_END", settle_seconds=60)
    assert folder.next(0) is None
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 61))
    assert folder.next(0).name == "a.parquet"
    put(tmp_path, "b.parquet")
    assert folder.next(1) is None
    (tmp_path / "_END").touch()
    assert folder.next(1).name == "b.parquet"


def test_files_that_change_or_go_after_they_were_read_are_told_of(tmp_path, following, notes):
    for name in ("a.parquet", "b.parquet", "c.parquet"):
        put(tmp_path, name)
    folder = following()
    assert len(names(folder)) == 3
    put(tmp_path, "a.parquet", rows=1)
    (tmp_path / "b.parquet").unlink()
    assert names(folder, 3) == names(folder, 3) == []
    assert notes == [
        "removed while or after it was read: b.parquet",
        "changed after its reading began, and is not read again: a.parquet",
    ]
    # One that comes back under its name has been read.
    put(tmp_path, "b.parquet")
    assert names(folder, 3) == []
    assert "b.parquet" in notes[-1]


def test_what_is_taken_away_at_any_moment_is_not_there(tmp_path, following, notes, monkeypatch):
    """A folder while the others are looked at, and a file whose turn has come."""
    logs, away = tmp_path / "logs", tmp_path / "away"
    for day in (1, 2):
        put(logs, f"day={day}/a.parquet")
    folder = FollowedFolder(str(logs), Follow(), notes.append)
    assert len(names(folder)) == 2
    scandir, is_whole = os.scandir, folder._is_whole

    def hasty(path):
        if str(path).endswith("day=1"):
            os.rename(path, away)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", hasty)
    assert names(folder, 2) == []
    assert notes == ["removed while or after it was read: day=1/a.parquet"]
    last = put(logs, "day=3/a.parquet")
    monkeypatch.setattr(folder, "_is_whole", lambda *of: (is_whole(*of), last.unlink(missing_ok=True))[0])
    assert names(folder, 2) == names(folder, 2) == []


def test_what_was_read_goes_on_from_a_checkpoint(tmp_path, following, notes):
    """Files that are gone are forgotten, but for the last two: one may be read in part, one says who is late."""
    for name in "abcde":
        put(tmp_path, f"{name}.parquet")
    folder = following()
    assert len(names(folder)) == 5
    for name in "abd":
        (tmp_path / f"{name}.parquet").unlink()
    folder.next(5)
    known = folder.pieces_until(3)
    assert [(one.number, one.name) for one in known] == [(2, "c.parquet"), (3, "d.parquet")]
    after = following()
    after.begin(known)
    put(tmp_path, "b.parquet")
    assert names(after, 3) == ["d.parquet", "e.parquet"]
    assert "b.parquet" in notes[-2] + notes[-1]
    # Nothing of e was trained on when the checkpoint was written.
    assert isinstance(after.next(4), Taken)


def test_how_far_behind_counts_what_is_not_begun(tmp_path, following):
    for number in range(4):
        path = put(tmp_path, f"{number}.parquet")
        os.utime(path, (0, path.stat().st_mtime - 100 + 10 * number))
    folder = following(poll_seconds=0.01)
    folder.next(0)
    folder.next(1)
    lag = folder.figures(0)
    assert (lag["files_behind"], lag["late_files"]) == (3, 0)
    assert 85 < lag["seconds_behind"] < 95
    assert folder.figures(1)["files_behind"] == 2


def test_what_cannot_be_followed_is_refused(tmp_path):
    path = put(tmp_path, "a.parquet")
    with pytest.raises(DataError, match="is a file, and files are followed in a folder"):
        first_file(str(path), Follow())
    with pytest.raises(DataError, match="no such file or directory"):
        first_file(str(tmp_path / "nowhere"), Follow())
    (tmp_path / "empty").mkdir()
    assert first_file(str(tmp_path / "empty"), Follow()) is None
    (tmp_path / "empty" / "_END").touch()
    with pytest.raises(DataError, match="has the end marker but no file"):
        first_file(str(tmp_path / "empty"), Follow(until="_END"))
    table = tmp_path / "table"
    (table / "_delta_log").mkdir(parents=True)
    pytest.importorskip("deltalake").write_deltalake(str(tmp_path / "delta"), pa.table({"item": [1]}))
    with pytest.raises(DataError, match="is a table with versions"):
        first_file(str(tmp_path / "delta"), Follow())
