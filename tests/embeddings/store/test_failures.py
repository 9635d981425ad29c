"""What the embedded store survives: kill -9 at every point of a publication, a full disk, damaged files, races."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embeddings.durable_files import file_sha256
from embeddings.store import CorruptStore, Store, StoreError, StoreFull, open_store
from embeddings.store import version as store_version
from embeddings.store.collection import directory as store_directory
from embeddings.store.files import StoreBusy, decode_document, writer_lock
from embeddings.store.manifest import VersionManifest
from embeddings.vectors.item_vectors import ItemVectors
from tests.embeddings.store import store_scenarios as scenarios

ROOT = Path(__file__).resolve().parents[3]


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", scenarios.__name__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def run(*arguments: object) -> str:
    process = start(*arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output.strip()


def leftovers(root: Path) -> list[str]:
    """Files that no version, view or pointer of the store accounts for."""
    return [str(path.relative_to(root)) for path in root.rglob(".*")]


def assert_whole(root: Path, served: dict[str, np.ndarray]) -> str:
    """The store opens, serves one of the versions in ``served``, all of it, and every version it lists reads. Returns
    which is current."""
    collection = open_store(root).collection("items")
    reader = collection.open()
    ids = np.arange(scenarios.NUM_ITEMS)
    status, vectors = reader.lookup(ids)
    assert (status == 1).all()
    if reader.version in served:
        np.testing.assert_array_equal(vectors, served[reader.version])
    assert collection.view_transform("items_rff", vectors).shape == (len(ids), 2 * scenarios.DIM)
    for manifest in collection.versions():
        if manifest["state"] != "expired":
            collection.open(manifest["version"]).lookup(ids)
    return reader.version


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process, unlike a lost machine, does not need the disk's
    fsync."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="evenkeel-test-") as directory:
        yield Path(directory)


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("became", ["published", "held"])
def test_a_version_that_a_torn_backup_lost_gives_its_state_to_no_other(tmp_path: Path, became: str) -> None:
    """A file copy that took the versions before, and the pointer and the marks after a publication."""
    collection = open_store(tmp_path).collection("items")
    ids = np.arange(10)
    rows = np.eye(10, dtype=np.float32)
    first = collection.write(ItemVectors(ids, rows))
    collection.publish(first, None)
    lost = collection.write(ItemVectors(ids, rows), parent=first)
    collection.publish(lost, first) if became == "published" else collection.hold(lost, ["shaken"])
    shutil.rmtree(tmp_path / "collections" / "items" / "versions" / lost)
    restored = open_store(tmp_path).collection("items")
    assert restored.open().version == first, "the one before is served"
    candidate = restored.write(ItemVectors(ids, 2 * rows), parent=first)
    assert candidate != lost
    assert restored.manifest(candidate)["state"] == "candidate", "nobody has judged it"
    assert restored.open().version == first


@pytest.mark.process
@pytest.mark.slow
def test_killed_at_every_point_of_a_publication(memory_path: Path) -> None:
    num_points = int(run("kill", memory_path))
    # Items, frequencies, manifest, directory, CURRENT, two retention marks and removals, each with several points.
    assert num_points > 40, num_points
    complete = open_store(memory_path / str(num_points)).collection("items")
    expected = {f"v{number:06d}": open_vectors(memory_path / "template", number) for number in (1, 3)}
    expected["v000004"] = complete.open("v000004").vectors.copy()
    ends = []
    for point in range(num_points):
        root = memory_path / str(point)
        ends.append(assert_whole(root, expected))
        # The retried run ends what the killed one began, once, and nothing lies about afterwards.
        end = scenarios.refresh(root, 3, "v000003", "job-3")
        assert (end.status, end.version) == ("published", "v000004"), (point, end.reasons)
        assert assert_whole(root, expected) == "v000004"
        assert [m["version"] for m in open_store(root).collection("items").versions() if m["job"] == "job-3"] == [
            "v000004"
        ]
        open_store(root).collection("items").clean()
        assert leftovers(root) == []
    switch = ends.index("v000004")
    assert set(ends[:switch]) == {"v000003"}
    assert set(ends[switch:]) == {"v000004"}


def open_vectors(root: Path, number: int) -> np.ndarray:
    vectors: np.ndarray = open_store(root).collection("items").open(f"v{number:06d}").vectors.copy()
    return vectors


# --- full disk -------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("num_bytes", [0, 100, 1000, 4000])
def test_a_file_size_limit_leaves_what_is_served(tmp_path: Path, num_bytes: int) -> None:
    scenarios.prepare(tmp_path)
    served = {"v000003": open_vectors(tmp_path, 3)}
    output = run("limit", tmp_path, num_bytes)
    assert output.startswith("full: ")
    assert "File too large" in output
    assert "what is served is unchanged" in output
    assert assert_whole(tmp_path, served) == "v000003"
    assert leftovers(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.process
def test_a_full_disk_at_every_free_page(small_disk: Path) -> None:
    """With 0, 1, 2, ... free pages the disk becomes full at another write each time; at the end there is room."""
    root = small_disk / "store"
    scenarios.prepare(root)
    served = {"v000003": open_vectors(root, 3)}
    num_full = 0
    for num_pages in range(40):
        ballast = small_disk / "ballast"
        free = os.statvfs(small_disk).f_bavail - num_pages
        ballast.write_bytes(bytes(max(free, 0) * os.statvfs(small_disk).f_frsize))
        end = failure = None
        try:
            end = scenarios.refresh(root, 3, "v000003", "job-3")
        except StoreFull as error:
            failure = error
        ballast.unlink()
        if end is not None:
            assert end.status == "published"
            break
        num_full += 1
        assert "No space left on device" in str(failure)
        assert assert_whole(root, served) in ("v000003", "v000004")
    assert num_full > 2
    assert open_store(root).collection("items").current() == "v000004"
    open_store(root).collection("items").clean()
    assert leftovers(root) == []


# --- damage ----------------------------------------------------------------------------------------------------------


def damaged(tmp_path: Path, name: str, change: str) -> Store:
    scenarios.prepare(tmp_path)
    (path,) = tmp_path.glob(f"collections/items/{name}")
    content = bytearray(path.read_bytes())
    if change == "gone":
        path.unlink()
    elif change == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif change == "empty":
        path.write_bytes(b"")
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)
    return open_store(tmp_path)


@pytest.mark.parametrize("change", ["flipped", "truncated", "empty", "gone"])
@pytest.mark.parametrize("name", ["versions/v000003/items.arrow", "versions/v000003/manifest.json"])
def test_a_damaged_version_is_not_served(tmp_path: Path, name: str, change: str) -> None:
    collection = damaged(tmp_path, name, change).collection("items")
    with pytest.raises(CorruptStore, match=rf"(?s){name}.*(promote another version|restore it from a backup)"):
        collection.open("v000003")
    # What was served before it is served instead: the anchor, which retention keeps.
    assert collection.open().version == "v000001"
    assert collection.current() == "v000003"
    # The remedy works.
    collection.promote("v000001", "the current one is damaged")
    assert collection.open().version == "v000001"


def test_a_damaged_version_raises_an_alert_until_it_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scenarios.prepare(tmp_path)
    (path,) = tmp_path.glob("collections/items/versions/v000003/items.arrow")
    whole = path.read_bytes()
    store = damaged_at(path)
    collection = store.collection("items")
    assert store.damaged() == {}
    for _ in range(3):
        assert collection.open().version == "v000001"
    (alert,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert alert.name == "evenkeel.store"
    assert "version v000003 is damaged" in alert.getMessage()
    assert "sha256" in store.damaged()["items"]["v000003"]
    flags = {manifest["version"]: manifest["damaged"] for manifest in collection.versions()}
    assert flags["v000001"] is None
    assert "sha256" in flags["v000003"]
    path.write_bytes(whole)
    os.utime(path, ns=(1, 1))
    assert collection.open().version == "v000003"
    assert store.damaged() == {}
    assert collection.manifest("v000003")["damaged"] is None


def test_nothing_whole_is_left(tmp_path: Path) -> None:
    scenarios.prepare(tmp_path)
    for path in tmp_path.glob("collections/items/versions/*/items.arrow"):
        store = damaged_at(path)
    with pytest.raises(CorruptStore, match="v000003"):
        store.collection("items").open()


def damaged_at(path: Path) -> Store:
    """The store with one bit of a file flipped."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    return open_store(path.parents[4])


@pytest.mark.parametrize("change", ["flipped", "truncated", "empty"])
def test_a_damaged_pointer_is_told(tmp_path: Path, change: str) -> None:
    collection = damaged(tmp_path, "CURRENT", change).collection("items")
    for call in (collection.current, collection.open, lambda: collection.promote("v000001", "try")):
        with pytest.raises(CorruptStore, match="CURRENT"):
            call()


@pytest.mark.parametrize("change", ["flipped", "truncated", "empty", "gone"])
def test_damaged_frequencies_are_not_used(tmp_path: Path, change: str) -> None:
    collection = damaged(tmp_path, "views/items_rff/g0001.arrow", change).collection("items")
    _, vectors = collection.open().lookup([1, 2])
    with pytest.raises(CorruptStore, match=r"g0001\.arrow"):
        collection.view_transform("items_rff", vectors)


def test_every_flipped_byte_of_a_version_is_noticed(tmp_path: Path) -> None:
    scenarios.prepare(tmp_path)
    path = tmp_path / "collections/items/versions/v000003/items.arrow"
    content = path.read_bytes()
    for position in np.linspace(0, len(content) - 1, 60).astype(int):
        flipped = bytearray(content)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(CorruptStore):
            open_store(tmp_path).collection("items").open("v000003")
    path.write_bytes(content)
    open_store(tmp_path).collection("items").open("v000003")


@pytest.mark.parametrize("name", ["CURRENT", "versions/v000003/manifest.json", "views/items_rff/g0001.json"])
def test_every_flipped_byte_of_a_document_is_noticed(tmp_path: Path, name: str) -> None:
    scenarios.prepare(tmp_path)
    path = tmp_path / "collections/items" / name
    content = path.read_bytes()
    document = decode_document(content, path)
    for position in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 1
        if content[position : position + 1].isdigit() and _same_document(bytes(flipped), document):
            # The last of 16 digits, which is of no number of its own: nothing is damaged.
            continue
        with pytest.raises(CorruptStore, match="checksum does not match"):
            decode_document(bytes(flipped), path)


def _same_document(content: bytes, document: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(content)["document"] == document)
    except (ValueError, KeyError):
        return False


# --- races -----------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("_attempt", range(3))
def test_of_two_racing_publishers_one_wins(tmp_path: Path, _attempt: int) -> None:
    scenarios.prepare(tmp_path)
    ends = json.loads(run("race", tmp_path))
    assert sorted(status for status, _, _ in ends) == ["held", "published"]
    ((_, winner, _),) = [end for end in ends if end[0] == "published"]
    ((_, loser, reasons),) = [end for end in ends if end[0] == "held"]
    assert f"version {winner} of 'items' is current, not v000003" in reasons[0]
    collection = open_store(tmp_path).collection("items")
    assert collection.current() == winner
    assert collection.manifest(loser)["state"] == "held"
    assert leftovers(tmp_path) == []


@pytest.mark.long
@pytest.mark.process
@pytest.mark.slow
def test_readers_see_whole_versions_through_many_switches(memory_path: Path) -> None:
    """EVENKEEL_TEST_SWITCHES says through how many."""
    num_switches = int(os.environ.get("EVENKEEL_TEST_SWITCHES", "100"))
    store = open_store(memory_path)
    collection = store.collection("items")

    def publish(number: int) -> None:
        items = ItemVectors(np.arange(500), np.full((500, 16), number, dtype=np.float32))
        version = collection.write(items, parent=collection.current())
        assert version == f"v{number:06d}"
        collection.publish(version, collection.current())
        collection.retain(2)

    publish(1)
    readers = [start("read", memory_path) for _ in range(2)]
    errors: list[BaseException] = []
    stop = threading.Event()

    def read_in_this_process() -> None:
        try:
            while not stop.is_set():
                reader = collection.open()
                _, vectors = reader.lookup(np.arange(500))
                assert (vectors == int(reader.version[1:])).all()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read_in_this_process)
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        thread.start()
        number, deadline = 1, time.monotonic() + 300
        # A busy machine may let a reader sleep through most of them: until each has followed.
        while number < num_switches + 1 or len(list(memory_path.glob("enough-*"))) < len(readers):
            assert time.monotonic() < deadline
            number += 1
            publish(number)
    finally:
        stop.set()
        (memory_path / "stop").touch()
        outputs = [reader.communicate(timeout=300)[0] for reader in readers]
        thread.join()
    assert errors == []
    for reader, output in zip(readers, outputs, strict=True):
        assert reader.returncode == 0, output
        num_reads, latest, num_seen = json.loads(output)
        # They follow, and see the last one at the end.
        assert latest == number
        assert num_seen >= scenarios.ENOUGH
        assert num_reads >= num_seen


def test_a_version_that_expires_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading the pointer and opening the files, a switch and a clean-up may pass: the reader takes the new
    one."""
    scenarios.prepare(tmp_path)
    reader_class = store_directory.VersionReader
    opened = []

    def slow_reader(directory: Path, manifest: VersionManifest) -> Any:
        opened.append(manifest.version)
        if len(opened) == 1:
            monkeypatch.setattr(store_directory, "VersionReader", reader_class)
            assert scenarios.refresh(tmp_path, 3, "v000003", "job-3").status == "published"
            assert not (directory / "items.arrow").exists()
            monkeypatch.setattr(store_directory, "VersionReader", slow_reader)
        return reader_class(directory, manifest)

    monkeypatch.setattr(store_directory, "VersionReader", slow_reader)
    assert open_store(tmp_path).collection("items").open().version == "v000004"
    assert opened == ["v000003", "v000004"]


def test_a_stuck_writer_is_told(tmp_path: Path) -> None:
    lock = tmp_path / "LOCK"
    with writer_lock(lock), pytest.raises(StoreBusy, match="another process has kept the writer lock"):
        with writer_lock(lock, timeout_seconds=0.05):
            pass
    with writer_lock(lock, timeout_seconds=0.05):
        pass


def test_errors_are_value_errors_that_pickle() -> None:
    import pickle

    for kind in [StoreError, *StoreError.__subclasses__()]:
        error = pickle.loads(pickle.dumps(kind("what, where, remedy")))
        assert isinstance(error, ValueError)
        assert (type(error), str(error)) == (kind, "what, where, remedy")


def test_many_readers_after_a_switch_hash_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of gigabytes takes seconds to hash: once, not once for each request that waits."""
    writer = open_store(tmp_path).collection("items")
    writer.publish(writer.write(ItemVectors(np.arange(9), np.ones((9, 4)))), None)
    hashed: list[Path] = []
    together = threading.Barrier(8)

    def slow_sha256(path: Path) -> str:
        hashed.append(path)
        time.sleep(0.05)  # time enough for the others to come
        return file_sha256(path)

    monkeypatch.setattr(store_version, "file_sha256", slow_sha256)
    monkeypatch.setattr(store_version, "_verified", set())
    collection = open_store(tmp_path).collection("items")

    def read() -> None:
        together.wait(300)
        assert collection.open().lookup([3])[0][0]

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(hashed) == 1
