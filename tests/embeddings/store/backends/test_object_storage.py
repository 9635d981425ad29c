"""What a store in objects survives: damage, a server that is away or hangs, and dead writers."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest

from embeddings.store import Collection, CorruptStore, StoreBusy, StoreUnavailable, open_store
from embeddings.store.backends.s3 import open_objects
from embeddings.vectors.item_vectors import ItemVectors
from tests.contracts import store_servers
from tests.embeddings.store.backends.versions import NUM_ITEMS, assert_serves, publish, vectors_of

pytestmark = pytest.mark.process


def in_objects(address: str, tmp_path: Path, mirror: str, *options: str) -> Collection:
    query = "&".join([f"endpoint_override=http://{address}", f"cache={tmp_path / mirror}", *options])
    return open_store(f"s3://vectors/{tmp_path.name}?{query}").collection("items")


def objects(address: str, tmp_path: Path) -> dict[str, str]:
    files = pafs.S3FileSystem(endpoint_override=address, scheme="http")
    found = files.get_file_info(pafs.FileSelector(f"vectors/{tmp_path.name}", recursive=True))
    return {info.path.partition("/items/")[2]: info.path for info in found if info.type == pafs.FileType.File}


def test_a_damaged_object_is_refused(s3_address: str, tmp_path: Path) -> None:
    collection = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    publish(collection, 1)
    publish(collection, 2)
    files = pafs.S3FileSystem(endpoint_override=s3_address, scheme="http")
    (path,) = [
        path for name, path in objects(s3_address, tmp_path).items() if name.startswith("versions/v000002/items")
    ]
    with files.open_input_stream(path) as source:
        content = bytearray(source.readall())
    content[len(content) // 2] ^= 0x10
    with files.open_output_stream(path) as target:
        target.write(bytes(content))
    other = in_objects(s3_address, tmp_path, "b", "follow_seconds=0")
    with pytest.raises(CorruptStore, match="sha256 is not the index's"):
        other.open("v000002")
    assert other.open().version == "v000001"
    assert "v000002" in other.damaged()
    # Readers that have the file are not concerned.
    assert_serves(collection, 2)
    # A damaged file of a mirror is fetched again.
    (file,) = (tmp_path / "b").rglob("v000001/items.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)
    again = in_objects(s3_address, tmp_path, "b")
    assert (again.open("v000001").lookup([1])[1] == 1).all()


def test_a_store_that_is_away_is_served_from_the_mirror(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in store_servers.CREDENTIALS.items():
            environment.setenv(name, value)
        with store_servers.s3_server() as address:
            collection = in_objects(address, tmp_path, "a", "follow_seconds=0")
            publish(collection, 1)
            follower = in_objects(address, tmp_path, "b", "follow_seconds=0")
            assert_serves(follower, 1)
        assert_serves(follower, 1)
        # A process that is started while the store is away, too.
        assert_serves(in_objects(address, tmp_path, "b"), 1)
        with pytest.raises(StoreUnavailable, match="is served is unchanged"):
            publish(collection, 2)
        assert collection.current() == "v000001"
        with pytest.raises(StoreUnavailable):
            in_objects(address, tmp_path, "c").current()


def test_one_waits_for_a_store_that_hangs(s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    publish(collection, 1)
    asked, over = threading.Event(), threading.Event()
    calls = []

    def hangs() -> bytes | None:
        calls.append(threading.get_ident())
        if len(calls) > 1:
            asked.set()
            over.wait(300)
        raise StoreUnavailable("it hangs")

    monkeypatch.setattr(collection._files.remote, "index", hangs)
    assert collection.current() == "v000001"
    collection._files.next_look = 0.0
    waiting = threading.Thread(target=collection.current)
    waiting.start()
    try:
        assert asked.wait(300)
        assert_serves(collection, 1)
        assert len(calls) == 2
    finally:
        over.set()
        waiting.join()


def test_an_index_that_is_old_by_the_time_of_the_lock(
    s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes share a mirror: one has read the index, and the other publishes before it gets to the lock."""
    writer = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    follower = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    publish(writer, 1)
    original = follower._files.remote.index
    read = []

    def overtaken() -> bytes | None:
        read.append(original())
        if len(read) == 1:
            writer.write(ItemVectors(np.arange(NUM_ITEMS), vectors_of(2)), parent="v000001")
        return read[-1]

    monkeypatch.setattr(follower._files.remote, "index", overtaken)
    assert follower.current() == "v000001"
    assert (writer.directory / "versions/v000002/manifest.json").exists()


def test_processes_share_a_mirror(s3_address: str, tmp_path: Path) -> None:
    """One of them has brought it up to date before the other looks."""
    first = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    late = in_objects(s3_address, tmp_path, "a", "follow_seconds=600")
    writer = in_objects(s3_address, tmp_path, "b", "follow_seconds=0")
    publish(writer, 1)
    assert_serves(late, 1)
    publish(writer, 2)
    assert first.current() == "v000002"
    assert_serves(late, 2)
    assert late.damaged() == {}


def test_a_dead_writer_of_objects_is_cleaned_up(s3_address: str, tmp_path: Path) -> None:
    collection = in_objects(s3_address, tmp_path, "a", "follow_seconds=0", "lease_seconds=6")
    publish(collection, 1)
    before = set(objects(s3_address, tmp_path))
    # What one leaves that dies between its objects and the index, and its lock.
    files = pafs.S3FileSystem(endpoint_override=s3_address, scheme="http")
    for name in ("versions/v000002/items-0123456789abcdef.arrow", "LOCK"):
        with files.open_output_stream(f"vectors/{tmp_path.name}/collections/items/{name}") as target:
            target.write(b"half")
    assert publish(collection, 2) == "v000002"
    after = set(objects(s3_address, tmp_path))
    assert "versions/v000002/items-0123456789abcdef.arrow" not in after
    assert before - after == {name for name in before if name.startswith("CURRENT-")}


def test_a_writer_that_was_stopped_before_its_commit_replaces_nothing(
    s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its last look at the clock and the put of the index another one has published."""
    slow = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    other = in_objects(s3_address, tmp_path, "b", "follow_seconds=0")
    publish(slow, 1)
    remote = slow._files.remote
    put = remote._objects.put_if_unchanged

    def stopped(name: str, data: bytes, version: Any) -> Any:
        if name == "INDEX":
            monkeypatch.undo()
            # Its lock was given up for dead.
            monkeypatch.setattr("embeddings.store.backends.s3.Objects.acquire", lambda self, token: True)
            publish(other, 2)
            monkeypatch.undo()
        return put(name, data, version)

    monkeypatch.setattr(remote._objects, "put_if_unchanged", stopped)
    with pytest.raises(StoreBusy, match="another process has published meanwhile"):
        publish(slow, 3)
    assert_serves(slow, 2)
    assert_serves(in_objects(s3_address, tmp_path, "c"), 2)
    assert publish(slow, 4) == "v000003"


def test_a_put_whose_answer_was_lost_is_known_by_its_content(s3_address: str, tmp_path: Path) -> None:
    storage = in_objects(s3_address, tmp_path, "a")._files.remote._objects
    first = storage.put_if_unchanged("one", b"1", None)
    assert first is not None
    assert storage.put_if_unchanged("one", b"2", None) is None
    second = storage.put_if_unchanged("one", b"2", first)
    assert second is not None
    # Sent again: what it replaced is not there any more, and what it put is.
    assert storage.put_if_unchanged("one", b"2", first) == second
    assert storage.put_if_unchanged("one", b"3", first) is None
    assert storage.read("one") == b"2"


def test_the_lock_of_objects(s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (in_objects(s3_address, tmp_path, name, "lease_seconds=20")._files.remote for name in ("a", "b"))
    clock = [0.0]
    monkeypatch.setattr("embeddings.store.backends.s3.now", lambda: clock[0])
    assert one.acquire("one")
    assert not two.acquire("two")
    clock[0] = 15.0
    one.renew("one")
    clock[0] = 30.0
    # It was seen to be renewed, so that it counts from now.
    assert not two.acquire("two")
    clock[0] = 51.0
    assert two.acquire("two")
    with pytest.raises(StoreBusy, match="another writer holds the lock"):
        one.renew("one")
    one.release("one")
    assert not one.acquire("one")
    two.release("two")
    assert one.acquire("one")


def test_keys_of_a_profile(s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = store_servers.CREDENTIALS
    for name in keys:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    file.write_text(
        f"[work]\naws_access_key_id = {keys['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {keys['AWS_SECRET_ACCESS_KEY']}\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "work")
    publish(in_objects(s3_address, tmp_path, "a"), 1)
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(StoreUnavailable, match="other"):
        publish(in_objects(s3_address, tmp_path, "b"), 2)
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    with pytest.raises(StoreUnavailable, match="pip install boto3, or set AWS_ACCESS_KEY_ID"):
        publish(in_objects(s3_address, tmp_path, "c"), 2)


def test_a_writer_whose_lease_ended_removes_no_objects(s3_address: str, tmp_path: Path) -> None:
    """What it would take for leftovers may be another writer's, who has not committed yet."""
    collection = in_objects(s3_address, tmp_path, "a")
    publish(collection, 1)
    before, remote = set(objects(s3_address, tmp_path)), collection._files.remote
    with remote.lock() as lease:
        lease.renewed_at -= 3600.0
        with pytest.raises(StoreBusy, match="away for longer"):
            remote.sweep(set(), lease)
    assert set(objects(s3_address, tmp_path)) == before


def test_what_cannot_be_removed_after_a_commit_fails_nothing(
    s3_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collection = in_objects(s3_address, tmp_path, "a", "follow_seconds=0")
    publish(collection, 1)
    publish(collection, 2)

    def away(named: set[str], lease: Any) -> None:
        raise StoreUnavailable("gone for a moment")

    monkeypatch.setattr(collection._files.remote, "sweep", away)
    publish(collection, 3)
    assert "the next writer removes what is left over: gone for a moment" in caplog.text
    assert_serves(in_objects(s3_address, tmp_path, "b"), 3)
    # Of an erasure it is told: rows that were to go are there still.
    with pytest.raises(StoreUnavailable, match=r"no longer served, but objects with their rows .*erase them again"):
        collection.erase([5], "they asked")
    old = {name for name in objects(s3_address, tmp_path) if name.startswith("versions/") and "items-" in name}
    monkeypatch.undo()
    assert collection.erase([5], "they asked") == {"versions": [], "rows": 0}
    new = {name for name in objects(s3_address, tmp_path) if name.startswith("versions/") and "items-" in name}
    assert len(new) == 3 < len(old)


def test_the_remedy_of_a_url_without_a_bucket_has_its_scheme() -> None:
    with pytest.raises(ValueError, match="write gs://BUCKET/PREFIX, and credentials"):
        open_objects("gs:///prefix")


def test_a_bucket_that_is_not_there(s3_address: str, tmp_path: Path) -> None:
    url = f"s3://nowhere/x?endpoint_override=http://{s3_address}&cache={tmp_path}"
    with pytest.raises(StoreUnavailable, match="the bucket exists"):
        publish(open_store(url).collection("items"), 1)
