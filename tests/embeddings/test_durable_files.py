"""Files and folders appear whole or not at all, and nothing is left where they do not."""

from __future__ import annotations

import doctest
import json
import os
from pathlib import Path

import pytest

from embeddings import durable_files
from embeddings.durable_files import appearing, fsync_tree, make_directory, write_file, write_json


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_and_a_broken_write_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_file(file, b"old")

    def broken() -> None:
        with appearing(file) as place:
            place.write_bytes(b"ne")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        broken()
    assert (file.read_bytes(), names(tmp_path)) == (b"old", ["a.txt"])
    with appearing(file) as place:
        place.write_bytes(b"new")
        assert file.read_bytes() == b"old"
    assert (file.read_bytes(), names(tmp_path)) == (b"new", ["a.txt"])


def test_a_folder_appears_with_all_that_is_in_it(tmp_path: Path) -> None:
    with appearing(tmp_path / "run") as place:
        place.mkdir()
        (place / "part").write_bytes(b"1")
        assert not (tmp_path / "run").exists()
    assert (tmp_path / "run" / "part").read_bytes() == b"1"
    with pytest.raises(OSError, match="not empty"), appearing(tmp_path / "run") as place:
        place.mkdir()
    assert names(tmp_path) == ["run"]


def test_what_the_fence_raises_leaves_what_was_there(tmp_path: Path) -> None:
    def lost() -> None:
        raise PermissionError("another has the lease")

    write_json(tmp_path / "a.json", [1])
    with pytest.raises(PermissionError, match="another has the lease"):
        write_json(tmp_path / "a.json", [2], fence=lost)
    assert (json.loads((tmp_path / "a.json").read_text()), names(tmp_path)) == ([1], ["a.json"])


def test_a_secret_is_its_owners_from_the_first_byte_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (modes.append(os.stat(a).st_mode & 0o777), rename(a, b)))
    write_file(tmp_path / "key", b"secret", mode=0o600)
    assert modes == [0o600]
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("durable", [True, False])
def test_everything_is_on_disk_before_the_switch_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    seen: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append("folder" if path == tmp_path else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", lambda a, b: (seen.append("switch"), rename(a, b)))
    write_file(tmp_path / "a", b"x", durable=durable)
    assert seen == (["file", "switch", "folder"] if durable else ["switch"])


def test_every_file_and_folder_of_a_tree_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_directory(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "c").write_bytes(b"x")
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync_tree(tmp_path / "a")
    assert synced == {str(tmp_path / part) for part in ("a", "a/b", "a/b/c")}


def test_the_example_runs(tmp_path: Path) -> None:
    found = doctest.testmod(durable_files, extraglobs={"directory": tmp_path})
    assert (found.attempted > 0, found.failed) == (True, 0)
