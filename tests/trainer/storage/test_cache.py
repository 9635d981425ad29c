"""The cache of a host: whole and checked files within a limit, for several processes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from pathlib import Path

import pytest

from trainer.storage.base import FileContent, StorageError, content_of
from trainer.storage.cache import CacheFullError, DamagedFileError, HostCache, cache_of_host
from trainer.storage.shared_directory import SharedDirectory


class Mounted(SharedDirectory):
    """A directory on another file system, from which files are copied; notes what was fetched."""

    def path(self, name: str) -> None:
        return None

    def fetch(self, name: str, to: Path) -> None:
        with open(self.root / "fetched", "a") as file:
            file.write(f"{name} ")
        super().fetch(name, to)

    def fetched(self) -> list[str]:
        return (self.root / "fetched").read_text().split()


@pytest.fixture
def storage(tmp_path: Path) -> Mounted:
    (tmp_path / "there").mkdir()
    return Mounted(tmp_path / "there")


@pytest.fixture
def uses(tmp_path: Path) -> Path:
    (tmp_path / "uses").mkdir()
    return tmp_path / "uses"


def put(storage: SharedDirectory, name: str, num_bytes: int) -> FileContent:
    path = storage.root / name
    path.write_bytes(os.urandom(num_bytes))
    return content_of(path)


def test_what_was_used_longest_ago_goes_and_what_is_in_use_stays(storage: Mounted, uses: Path, tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "cache", limit_bytes=300)
    contents = {name: put(storage, name, 100) for name in "abcd"}
    for age, name in ((30, "a"), (20, "b"), (10, "c")):
        cache.link(storage, name, contents[name], uses / name)
        there = cache.folder / "files" / contents[name].sha256
        os.utime(there, (there.stat().st_mtime - age,) * 2)
    (uses / "b").unlink()
    (uses / "c").unlink()
    cache.link(storage, "d", contents["d"], uses / "d")
    assert sorted(path.name for path in (cache.folder / "files").iterdir()) == sorted(
        contents[name].sha256 for name in "acd"
    ), "a was used longest ago, but is in use"
    cache.link(storage, "c", contents["c"], uses / "c")
    assert storage.fetched() == ["a", "b", "c", "d"]
    with pytest.raises(CacheFullError, match=r"300 of at most 300 bytes are in use: set EVENKEEL_CACHE_BYTES higher"):
        cache.link(storage, "b", contents["b"], uses / "b")
    assert not (uses / "b").exists()


def test_files_are_counted_while_others_end_their_fetches(storage: Mounted, tmp_path: Path) -> None:
    cache, other = (HostCache(tmp_path / "cache") for _ in range(2))
    content, fetched, over = put(storage, "a", 100), FileContent(100, "0" * 64), threading.Event()

    def fetch() -> None:
        while not over.is_set():
            with other._fetching(fetched):
                pass

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        for _ in range(3_000):
            cache._make_room(content)
    finally:
        over.set()
        thread.join()


def test_a_file_that_was_damaged_in_the_cache_is_fetched_again(storage: Mounted, uses: Path, tmp_path: Path) -> None:
    cache, content = HostCache(tmp_path / "cache"), put(storage, "a", 100)
    cache.link(storage, "a", content, uses / "a")
    (uses / "a").unlink()
    for damage in (os.urandom(100), b"short"):
        (cache.folder / "files" / content.sha256).write_bytes(damage)
        cache.link(storage, "a", content, uses / "a")
        assert content_of(uses / "a") == content
        (uses / "a").unlink()


@pytest.mark.parametrize("kind", [Mounted, SharedDirectory])
def test_a_file_that_was_changed_in_the_storage_is_not_used(
    kind: type[SharedDirectory], uses: Path, tmp_path: Path
) -> None:
    storage = kind(tmp_path / "there")
    storage.root.mkdir()
    cache, content = HostCache(tmp_path / "cache"), put(storage, "a", 100)
    put(storage, "a", 100)
    with pytest.raises(DamagedFileError, match=r"there/a does not hold the 100 bytes that were put there"):
        cache.link(storage, "a", content, uses / "a")
    assert list(uses.iterdir()) == []
    assert list((cache.folder / "files").iterdir()) == []


def test_files_of_a_directory_on_this_file_system_are_not_copied(uses: Path, tmp_path: Path) -> None:
    storage, cache = SharedDirectory(tmp_path / "there"), HostCache(tmp_path / "cache", limit_bytes=1)
    source = tmp_path / "source"
    source.write_bytes(b"content")
    storage.put_file("a", source)
    cache.link(storage, "a", content_of(source), uses / "a")
    assert source.stat().st_ino == (storage.root / "a").stat().st_ino == (uses / "a").stat().st_ino


def test_what_was_put_is_kept_where_there_is_room(storage: Mounted, uses: Path, tmp_path: Path) -> None:
    cache, content = HostCache(tmp_path / "cache", limit_bytes=100), put(storage, "a", 100)
    shutil.copy(storage.root / "a", uses / "a")
    cache.adopt(uses / "a", content)
    cache.link(storage, "a", content, uses / "again")
    assert not (storage.root / "fetched").exists()
    cache.adopt(storage.root / "a", put(storage, "b", 1))
    assert len(list((cache.folder / "files").iterdir())) == 1, "there is no room, and the first is in use"


def _link(folder: Path, content: FileContent, to: Path) -> None:
    HostCache(folder / "cache").link(Mounted(folder / "there"), "a", content, to)


@pytest.mark.process
def test_processes_that_want_one_file_fetch_it_once(storage: Mounted, uses: Path, tmp_path: Path) -> None:
    content = put(storage, "a", 20 << 20)
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=_link, args=(tmp_path, content, uses / str(number))) for number in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * 4
    assert storage.fetched() == ["a"]
    assert len({path.stat().st_ino for path in uses.iterdir()}) == 1


class Deadly(Mounted):
    """Kills its process in the middle of a fetch."""

    def fetch(self, name: str, to: Path) -> None:
        to.write_bytes((self.root / name).read_bytes()[:50])
        os.kill(os.getpid(), 9)


@pytest.mark.process
def test_what_a_killed_process_had_begun_is_removed(storage: Mounted, uses: Path, tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "cache", limit_bytes=150)
    first, second = put(storage, "a", 100), put(storage, "b", 100)
    process = multiprocessing.get_context("fork").Process(
        target=cache.link, args=(Deadly(storage.root), "a", first, uses / "a")
    )
    process.start()
    process.join()
    assert process.exitcode == -9
    left = sorted(path.name for path in (cache.folder / "incoming").iterdir())
    assert left == [first.sha256, f"{first.sha256}.part"]
    cache.link(storage, "b", second, uses / "b")
    assert list((cache.folder / "incoming").iterdir()) == []
    assert [path.name for path in uses.iterdir()] == ["b"]


@pytest.mark.parametrize("looks", [0, 1])
def test_a_fetch_that_ends_while_another_looks_for_room_disturbs_it_not(
    looks: int, storage: Mounted, uses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``looks``: those at the other's file before it has gone."""
    cache = HostCache(tmp_path / "cache", limit_bytes=200)
    mine, other = put(storage, "a", 100), put(storage, "b", 50)
    look, done = Path.stat, []

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path == incoming:
            if len(done) == looks:
                incoming.unlink(missing_ok=True)
            done.append(path)
        return look(path, **options)

    with cache._fetching(other) as incoming, monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        cache.link(storage, "a", mine, uses / "a")
    assert done
    assert content_of(uses / "a") == mine


def test_the_host_says_where_its_cache_is_and_how_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("EVENKEEL_CACHE_BYTES", "1000")
    cache = cache_of_host()
    assert (cache.folder, cache.limit_bytes) == (tmp_path / "here", 1000)
    monkeypatch.setenv("EVENKEEL_CACHE_BYTES", "50GB")
    with pytest.raises(ValueError, match=r"EVENKEEL_CACHE_BYTES is '50GB': write a number of bytes"):
        cache_of_host()


def test_what_runs_share_is_no_use_of_a_file(
    storage: Mounted, uses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("EVENKEEL_CACHE_BYTES", "100")
    cache, contents = cache_of_host(), {name: put(storage, name, 100) for name in "ab"}
    cache.link(storage, "a", contents["a"], uses / "a")
    shared = HostCache(tmp_path / "here" / "prepared", keeps_used=False)
    shared.adopt(uses / "a", contents["a"])
    with pytest.raises(CacheFullError):
        cache.link(storage, "b", contents["b"], uses / "b")
    (uses / "a").unlink()
    cache.link(storage, "b", contents["b"], uses / "b")
    shared.take(contents["a"], uses / "a")


def test_a_cached_file_outlives_its_storage(storage: Mounted, uses: Path, tmp_path: Path) -> None:
    cache, content = HostCache(tmp_path / "cache"), put(storage, "a", 100)
    cache.link(storage, "a", content, uses / "a")
    (storage.root / "a").unlink()
    cache.link(storage, "a", content, uses / "again")
    (cache.folder / "files" / content.sha256).unlink()
    with pytest.raises(StorageError, match="there is no such file"):
        cache.link(storage, "a", content, uses / "third")
