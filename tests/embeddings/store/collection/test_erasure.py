"""Erasure: ids leave every kept version, whatever happens on the way, and do not come back by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.refresh import publish as stage
from embeddings.refresh.publish import Gate, MovingAverage, RefreshRequest, Settings, publish_candidate
from embeddings.store import Collection, CorruptStore, IdsErased, Store, StoreError, UnknownCollection, open_store
from embeddings.store.collection import erasure, writer
from embeddings.store.files import StoreBusy, replace_document, writer_lock
from embeddings.store.nearest_neighbors import NeighborSearch
from embeddings.store.tombstones import ErasedIds
from embeddings.vectors.item_vectors import CARRIED, FOUND, MISSING, ItemIdError, ItemVectors, keys_of
from tests.embeddings.store.collection import erasure_scenarios as scenarios

ROOT = Path(__file__).resolve().parents[4]


N, ERASED = scenarios.NUM_ITEMS, scenarios.ERASED


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Three published versions, one that was held, and one that is a candidate; a materialized view."""
    scenarios.prepare(tmp_path)
    return tmp_path


@pytest.fixture
def collection(root: Path) -> Collection:
    return open_store(root).collection("items")


def held_in(root: Path, rows: dict[str, np.ndarray]) -> list[str]:
    """Files of the store in which one of the rows' vectors is."""
    return [
        f"{path.relative_to(root)}: {version}"
        for path in root.rglob("*")
        if path.is_file()
        for content in [path.read_bytes()]
        for version, vectors in rows.items()
        if any(vector.tobytes() in content for vector in vectors)
    ]


def rows_of(collection: Collection, ids: Any) -> dict[str, np.ndarray]:
    """Vectors of ids in each version, and through the materialized view."""
    rows = {}
    for manifest in collection.versions():
        if manifest["state"] != "expired":
            version = manifest["version"]
            rows[version] = collection.open(version).lookup(ids)[1].copy()
            rows[f"{version} wide"] = collection.view_lookup("wide", ids, version)[1].copy()
    return rows


def assert_gone(root: Path, before: dict[str, np.ndarray]) -> None:
    """The erased ids are missing from every version, the others are as they were, and no file has the vectors."""
    collection = open_store(root).collection("items")
    everybody = np.arange(N)
    rest = np.setdiff1d(everybody, ERASED)
    for manifest in collection.versions():
        if manifest["state"] == "expired":
            continue
        version = manifest["version"]
        status, vectors = collection.open(version).lookup(everybody)
        assert (status[ERASED] == MISSING).all()
        assert not vectors[ERASED].any()
        assert (status[rest] != MISSING).all()
        np.testing.assert_array_equal(vectors[rest], before[version][rest])
        wide = collection.view_lookup("wide", everybody, version)[1]
        np.testing.assert_allclose(wide[rest], before[f"{version} wide"][rest], atol=1e-6)
        assert manifest["rows"] == len(rest)
    erased = {version: rows[ERASED] for version, rows in before.items()}
    assert held_in(root, erased) == []
    assert [note["kind"] for note in collection.erasures()] == ["erase"]
    assert "rows" in collection.erasures()[0]


# --- what is kept of ids ---------------------------------------------------------------------------------------------


@given(st.sets(st.integers(-(2**63), 2**63 - 1), max_size=20), st.sets(st.integers(-5, 40), max_size=40), st.booleans())
def test_a_set_of_hashes_is_a_set(wide: set[int], narrow: set[int], as_text: bool) -> None:
    def ids(numbers: Any) -> Any:
        return keys_of([f"id {n}" for n in numbers] if as_text else list(numbers)) if numbers else np.empty(0, np.int64)

    erased = ErasedIds().adding(ids(sorted(narrow)))
    everybody = sorted(wide | set(range(-5, 41)))
    assert erased.matches(ids(everybody)).tolist() == [n in narrow for n in everybody]
    again = ErasedIds.of(erased.as_dict())
    assert again.matches(ids(everybody)).tolist() == [n in narrow for n in everybody]
    some = sorted(narrow)[::2]
    left = again.without(ids(some))
    assert left.matches(ids(everybody)).tolist() == [n in narrow and n not in some for n in everybody]
    assert len(again.adding(ids(some))) == len(narrow)


def test_the_width_of_string_keys_does_not_matter() -> None:
    erased = ErasedIds().adding(keys_of(["a", "bc"]))
    assert erased.matches(keys_of(["a", "b", "bc", "a much longer one"])).tolist() == [True, False, True, False]
    assert erased.matches(np.array([b"a", b"bc\0\0"], dtype="S400")).tolist() == [True, True]


def test_ids_are_recorded_by_hash_alone(tmp_path: Path) -> None:
    names = [f"somebody-{number}@example.org" for number in range(30)]
    store = open_store(tmp_path)
    vectors = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    publish_candidate(store, "items", RefreshRequest(ItemVectors(names, vectors), Settings(gate=Gate("off"))))
    store.collection("items").erase(names[:2], "they asked")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"somebody-0@" not in path.read_bytes()
    assert open_store(tmp_path).collection("items").open().lookup(names[:3])[0].tolist() == [MISSING, MISSING, FOUND]


# --- erasing ---------------------------------------------------------------------------------------------------------


def test_ids_leave_every_kept_version(root: Path, collection: Collection) -> None:
    before = rows_of(collection, np.arange(N))
    states = {manifest["version"]: manifest["state"] for manifest in collection.versions()}
    assert sorted(states.values()) == ["candidate", "held", "published", "superseded", "superseded"]
    assert held_in(root, {version: rows[ERASED] for version, rows in before.items()}) != []
    done = collection.erase([*ERASED, 10**9], "they asked", key="key_1")
    assert done == {"versions": sorted(states), "rows": len(states) * len(ERASED)}
    assert_gone(root, before)
    assert {manifest["version"]: manifest["state"] for manifest in collection.versions()} == states
    (note,) = collection.erasures()
    assert (note["reason"], note["key"], note["ids"], note["rows"]) == ("they asked", "key_1", 4, done["rows"])
    # Again it does nothing, and says so.
    assert collection.erase(ERASED, "once more") == {"versions": [], "rows": 0}


def test_open_readers_finish_and_other_processes_follow(root: Path, collection: Collection) -> None:
    other = open_store(root).collection("items")
    readers = {manifest["version"]: other.open(manifest["version"]) for manifest in other.versions()}
    before = {version: reader.lookup(np.arange(N))[1].copy() for version, reader in readers.items()}
    collection.erase(ERASED, "they asked")
    # The last ones first: they are those that a collection keeps open.
    for version, reader in reversed(readers.items()):
        np.testing.assert_array_equal(reader.lookup(np.arange(N))[1], before[version])
        assert (other.open(version).lookup(ERASED)[0] == MISSING).all()
        assert other.manifest(version)["rows"] == N - len(ERASED)
    assert (other.open().lookup(ERASED)[0] == MISSING).all()


def test_readers_see_each_version_whole_while_ids_are_erased(root: Path, collection: Collection) -> None:
    other = open_store(root).collection("items")
    before = other.open().lookup(np.arange(N))[1].copy()
    stop = threading.Event()
    faults: list[Any] = []

    def read() -> None:
        try:
            while not stop.is_set():
                status, vectors = other.open().lookup(np.arange(N))
                served = status != MISSING
                np.testing.assert_array_equal(vectors[served], before[served])
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for item in range(8):
            collection.erase([item], "one by one")
    finally:
        stop.set()
        thread.join()
    assert faults == []
    assert collection.manifest()["rows"] == N - 8


def test_all_items_of_a_version_may_go(collection: Collection) -> None:
    collection.erase(np.arange(N), "everybody asked")
    assert collection.manifest()["rows"] == 0
    assert (collection.open().lookup([1, 2])[0] == MISSING).all()
    reader = collection.open()
    assert not len(NeighborSearch(reader.vectors, reader.statuses).search(np.ones(scenarios.DIM, np.float32), 10)[0])


def test_ids_are_of_the_type_that_is_served(collection: Collection) -> None:
    """Whatever a run brought whose version was held, or never judged."""
    collection.write(ItemVectors([f"item {number}" for number in range(9)], np.ones((9, scenarios.DIM), np.float32)))
    assert collection.id_type() == "int64"
    assert collection.erase([1], "they asked")["rows"] > 0
    assert collection.open().lookup([1])[0].tolist() == [MISSING]


def test_a_damaged_version_is_no_refuge(root: Path, collection: Collection) -> None:
    before = rows_of(collection, np.arange(N))
    damaged = root / "collections/items/versions/v000001/items.arrow"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    del before["v000001"], before["v000001 wide"]
    fresh = open_store(root).collection("items")
    fresh.erase(ERASED, "they asked")
    assert fresh.manifest("v000001")["state"] == "expired"
    assert_gone(root, before)


@pytest.mark.parametrize("ema", [None, MovingAverage()])
def test_a_damaged_anchor_ends_no_publishing(root: Path, collection: Collection, ema: MovingAverage | None) -> None:
    """An erasure gives up a damaged version, and it may be the one that a generation is measured by."""
    anchor = root / "collections/items/versions/v000001/items.arrow"
    anchor.write_bytes(anchor.read_bytes()[:-9])
    open_store(root).collection("items").erase(ERASED, "they asked")
    store = open_store(root)
    items = store.collection("items").open().items()
    settings = Settings(gate=Gate("off"), ema=ema)
    parent = store.collection("items").current()
    end = publish_candidate(store, "items", RefreshRequest(items, settings, parent_version=parent))
    assert (end.status, end.anchor_cosine) == ("published", None)
    note = store.collection("items").manifest()["alignment"]["note"]
    assert (note is None) if ema is not None else note.startswith("aligned onto the parent instead of the anchor")


def test_a_damaged_current_version_is_told_and_the_erasure_is_not_forgotten(root: Path, collection: Collection) -> None:
    current = root / f"collections/items/versions/{collection.current()}/items.arrow"
    content = current.read_bytes()
    before = rows_of(collection, np.arange(N))
    current.write_bytes(content[:-9])
    fresh = open_store(root).collection("items")
    with pytest.raises(CorruptStore, match="promote another version"):
        fresh.erase(ERASED, "they asked")
    assert "rows" not in fresh.erasures()[0]
    current.write_bytes(content)
    open_store(root).collection("items").clean()
    assert_gone(root, before)


@pytest.mark.parametrize(
    ("ids", "reason", "error", "message"),
    [
        ([1], "  ", ValueError, "say why"),
        ([], "none", ItemIdError, "no ids"),
        (["one"], "text", ItemIdError, "are int64, those given are string"),
        ([1.5], "half", ItemIdError, "integers or all strings"),
    ],
)
def test_what_is_refused(collection: Collection, ids: Any, reason: str, error: Any, message: str) -> None:
    for call in (collection.erase, collection.readmit):
        with pytest.raises(error, match=message):
            call(ids, reason)
    assert collection.erasures() == []


def test_a_collection_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownCollection):
        open_store(tmp_path).collection("items").erase([1], "they asked")


def test_what_an_earlier_release_left_under_way_is_finished(root: Path, collection: Collection) -> None:
    before = rows_of(collection, np.arange(N))
    known = ErasedIds().adding(keys_of(ERASED))
    note = {"at": "2026-01-01T00:00:00Z", "kind": "erase", "reason": "they asked", "key": None, "ids": len(ERASED)}
    document = {**known.as_dict(), "log": [], "pending": [note]}
    replace_document(root / "collections/items" / erasure.ERASED_FILES["items"], document)
    collection.clean()
    assert_gone(root, before)
    assert collection.erasures()[0]["rows"] == 5 * len(ERASED)


def test_two_erasers_take_turns(root: Path, collection: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "LOCK_SECONDS", 0.05)
    with writer_lock(root / "collections/items/ERASING"):
        with pytest.raises(StoreBusy):
            collection.erase(ERASED, "they asked")
    assert collection.erasures() == []


def test_retention_is_faster_than_an_erasure(
    root: Path, collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process expires a version that this one has open, while its rows are being rewritten."""
    before = rows_of(collection, np.arange(N))
    original = erasure.write_items
    written = []

    def expire_first(*arguments: Any) -> Any:
        written.append(arguments[0])
        assert len(written) < 10, "the erasure goes round and round"
        if len(written) == 2:
            assert open_store(root).collection("items").retain(1) == ["v000002"]
        return original(*arguments)

    monkeypatch.setattr(erasure, "write_items", expire_first)
    collection.erase(ERASED, "they asked")
    assert_gone(root, before)


# --- coming back -----------------------------------------------------------------------------------------------------


def publish(store: Store, seed: int, **options: Any) -> Any:
    return scenarios.publish(store, seed, **options)


def test_an_old_checkpoint_does_not_bring_them_back(root: Path, collection: Collection) -> None:
    collection.erase(ERASED, "they asked")
    for seed in (5, 6):
        end = publish(open_store(root), seed)
        assert end.status == "published", end.reasons
        status, vectors = collection.open().lookup(np.arange(N))
        assert (status[ERASED] == MISSING).all()
        assert not vectors[ERASED].any()
        manifest = collection.manifest()
        assert (manifest["erased"], manifest["missing"], manifest["rows"]) == (len(ERASED), 0, N - len(ERASED))
        assert end.metrics["coverage"] == 1.0
    assert collection.readmit([ERASED[0], 77], "they came back") == 1
    assert publish(open_store(root), 7).status == "published"
    assert collection.open().lookup(ERASED)[0].tolist() == [FOUND, MISSING, MISSING]
    assert [(note["kind"], note["ids"]) for note in collection.erasures()] == [("erase", 3), ("readmit", 1)]


def test_rows_of_erased_ids_cannot_be_written(collection: Collection) -> None:
    collection.erase(ERASED, "they asked")
    versions = len(collection.versions())
    with pytest.raises(IdsErased, match="1 of the ids were erased: leave them out, or readmit them"):
        collection.write(ItemVectors([ERASED[0], 10**6], np.ones((2, scenarios.DIM))))
    assert len(collection.versions()) == versions
    assert issubclass(IdsErased, StoreError)


@pytest.mark.parametrize("when", ["before the plan", "before it is written", "while it is written"])
def test_ids_that_are_erased_while_a_version_is_made(
    root: Path, collection: Collection, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The run has opened its parent, with the vectors in it, when somebody erases them."""
    module, name = {
        "before the plan": (stage, "eligible_rows"),
        "before it is written": (stage, "ServedRows"),
        "while it is written": (writer, "write_items"),
    }[when]
    before = rows_of(collection, np.arange(N))
    original = getattr(module, name)
    calls = []

    def erase_first(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == 1:
            open_store(root).collection("items").erase(ERASED, "just now")
        return original(*arguments)

    monkeypatch.setattr(module, name, erase_first)
    end = publish(open_store(root), 5, without=ERASED[:1])
    assert end.status == "published", end.reasons
    assert len(calls) == 2
    status, _ = collection.open().lookup([*ERASED, 5])
    assert status.tolist() == [MISSING] * 3 + [FOUND]
    assert held_in(root, {version: rows[ERASED] for version, rows in before.items()}) == []


def test_carried_items_and_ages_survive(root: Path, collection: Collection) -> None:
    publish(open_store(root), 5, without=[50, 51])
    publish(open_store(root), 6, without=[50, 51])
    collection.erase([0, 51], "they asked")
    items = collection.open().items()
    assert items.carried_for is not None
    row = int(np.flatnonzero(items.keys == 50)[0])
    assert (items.statuses[row], items.carried_for[row]) == (CARRIED, 2)
    assert collection.manifest()["carried"] == 1
    publish(open_store(root), 7, without=[50, 51])
    assert collection.open().lookup([50, 51])[0].tolist() == [CARRIED, MISSING]


def test_half_precision_versions_keep_their_bits(tmp_path: Path) -> None:
    collection = open_store(tmp_path).collection("items")
    vectors = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    version = collection.write(ItemVectors(np.arange(50), vectors), dtype="float16")
    collection.publish(version, None)
    before = collection.open().vectors.copy()
    collection.erase([3], "they asked")
    after = collection.open()
    assert (after.vectors.dtype, after.manifest.dtype) == (np.float16, "float16")
    np.testing.assert_array_equal(after.vectors, np.delete(before, 3, axis=0))


# --- kill -9 ---------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", scenarios.__name__, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process, unlike a lost machine, does not need the disk's
    fsync."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="evenkeel-test-") as directory:
        yield Path(directory)


STRIDE = 1 if os.environ.get("EVENKEEL_TEST_EVERY_POINT") else 3
"""Kill points to the next one that is tried. Five versions pass through the same ones, so a third meets each kind."""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.long
def test_killed_at_the_points_of_an_erasure(memory_path: Path) -> None:
    where = memory_path
    num_points = int(run("kill", where, STRIDE))
    # For each of five versions: rows, directory, manifest, removals; and the record before and after.
    assert num_points > 60, num_points
    before = rows_of(open_store(where / "template").collection("items"), np.arange(N))
    finishers = [
        lambda store: store.collection("items").clean(),
        lambda store: store.finish_erasures(),
        lambda store: publish(store, 5),
        lambda store: store.collection("items").erase(ERASED, "they asked"),
    ]
    recorded = 0
    for point in range(0, num_points, STRIDE):
        root = where / str(point)
        collection = open_store(root).collection("items")
        # Every version is there, whole, with the erased rows or without.
        for manifest in collection.versions():
            status, vectors = collection.open(manifest["version"]).lookup(np.arange(N))
            served = status != MISSING
            np.testing.assert_array_equal(vectors[served], before[manifest["version"]][served])
            assert set(np.flatnonzero(~served)) in (set(), set(ERASED))
        if not collection.erasures():
            # Killed before anything was recorded: nobody was promised anything.
            continue
        recorded += 1
        finishers[point % len(finishers)](open_store(root))
        open_store(root).collection("items").clean()
        collection = open_store(root).collection("items")
        for manifest in collection.versions():
            assert (collection.open(manifest["version"]).lookup(ERASED)[0] == MISSING).all()
        assert held_in(root, {version: rows[ERASED] for version, rows in before.items()}) == []
        assert list(root.rglob(".tmp-*")) == []
        assert all("rows" in note for note in collection.erasures())
    assert recorded > 50
