"""Brief fetches on the event loop: which they are, that they say the same as a thread's, and when threads take over."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI

from embeddings.store import open_store
from service.api.routes.vectors import ARROW, JSON
from service.core.inline_io import InlineIO, is_local, kind_of_mount, major_faults
from service.core.settings import Settings
from tests.service import published

pytestmark = pytest.mark.anyio


class Watched(InlineIO):
    """How much was done at once."""

    def __init__(self) -> None:
        super().__init__(waits=lambda: 0)  # files are new, and in memory
        self.threads: list[threading.Thread] = []

    def call(self, work: Any) -> Any:
        self.threads.append(threading.current_thread())
        return super().call(work)


@pytest.fixture
def watched(app: FastAPI) -> Watched:
    app.state.inline_io = Watched()
    return app.state.inline_io


class Fetcher:
    """Asks, and says whether the answer was made at once."""

    def __init__(self, client: httpx.AsyncClient, watched: Watched):
        self._client = client
        self._watched = watched

    async def __call__(
        self,
        path: str = "collections/items",
        ids: Any = (10, 20),
        accept: str = ARROW,
        status: int = 200,
        **fields: Any,
    ) -> tuple[bool, bytes]:
        before = len(self._watched.threads)
        body = {"ids": list(ids), **fields}
        answer = await self._client.post(f"/v1/{path}/vectors", json=body, headers={"Accept": accept})
        assert answer.status_code == status, answer.text
        return len(self._watched.threads) > before, answer.content


@pytest.fixture
def fetch(client: httpx.AsyncClient, watched: Watched) -> Fetcher:
    return Fetcher(client, watched)


async def test_the_first_fetch_checks_and_maps_in_a_thread_and_those_after_it_need_none(
    fetch: Fetcher, watched: Watched, settings: Settings
) -> None:
    published.publish(settings, seed=1)
    (first, slow), (second, quick) = await fetch(), await fetch()
    assert (first, second) == (False, True)
    assert quick == slow
    assert watched.threads == [threading.main_thread()]
    assert (await fetch(accept=JSON))[0]
    assert (await fetch(version="v000001"))[0]
    # Whose view it is has to be found, once.
    (first, slow), (second, quick) = await fetch("views/items_rff"), await fetch("views/items_rff")
    assert (first, second) == (False, True)
    assert quick == slow
    # Another process's switch is seen, and the version that it names is opened in a thread.
    published.publish(settings, seed=2)
    (first, slow), (second, quick) = await fetch(), await fetch()
    assert (first, second) == (False, True)
    assert quick == slow
    assert (await fetch(version="v000001"))[0]


async def test_another_processs_erasure_is_seen(fetch: Fetcher, settings: Settings) -> None:
    published.publish(settings)
    await fetch()
    assert (await fetch())[0]
    published.store_at(settings).collection("items").erase([10], "asked for")
    (first, slow), (second, quick) = await fetch(accept=JSON), await fetch(accept=JSON)
    assert (first, second) == (False, True)
    assert quick == slow
    assert b'"missing"' in quick


async def test_what_takes_long_is_left_to_threads(
    fetch: Fetcher, client: httpx.AsyncClient, settings: Settings
) -> None:
    published.publish(settings)
    for name, kind in (("raw", {"kind": "identity"}), ("wide", {"kind": "rff", "dim": 4096})):
        answer = await client.post("/v1/views", json={"name": name, "collection": "items", **kind})
        assert answer.status_code == 201, answer.text
    for path in ("views/items_rff", "views/raw", "views/wide"):
        await fetch(path)
    assert (await fetch("views/items_rff", [10] * 2048))[0]  # 2^15 numbers
    assert not (await fetch("views/items_rff", [10] * 2049))[0]
    assert (await fetch("views/items_rff", [10] * 512, JSON))[0]
    assert not (await fetch("views/items_rff", [10] * 513, JSON))[0]
    assert (await fetch("views/raw", [10] * 4096))[0]
    assert (await fetch("views/wide", [10] * 8))[0]
    assert not (await fetch("views/wide", [10] * 9))[0]


async def test_products_count_where_features_are_computed(fetch: Fetcher, settings: Settings) -> None:
    """512 numbers to start from: 2^15 in the answer are 2^24 products."""
    collection = published.store_at(settings).collection("deep")
    collection.create_view("deep_rff", dim_in=512, dim=512, anchor_generation=1)
    vectors = published.directions(4, 0, dim=512)
    collection.publish(published.write(collection, [10, 20, 30, 40], vectors), None)
    await fetch("collections/deep")
    assert (await fetch("collections/deep", [10] * 16))[0]
    assert not (await fetch("collections/deep", [10] * 17))[0]


async def test_a_stored_view_is_mapped_in_a_thread(
    fetch: Fetcher, client: httpx.AsyncClient, settings: Settings
) -> None:
    published.publish(settings)
    body = {"name": "stored", "collection": "items", "kind": "rff", "dim": 32, "materialized": True}
    assert (await client.post("/v1/views", json=body)).status_code == 201
    published.publish(settings, seed=3)
    await fetch()  # opens the version, and maps nothing of that view
    (first, slow), (second, quick) = await fetch("views/stored"), await fetch("views/stored")
    assert (first, second) == (False, True)
    assert quick == slow


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("collections/items", {"ids": ["ten"]}, 422),
        ("collections/nothing", {}, 404),
        ("views/nothing", {}, 404),
        ("collections/items", {"version": "v000009"}, 404),
        ("collections/Not-A-Name", {}, 422),
    ],
)
async def test_refusals_are_the_same(fetch: Fetcher, settings: Settings, path: str, fields: Any, status: int) -> None:
    published.publish(settings)
    cold = (await fetch(path, status=status, **fields))[1]
    await fetch()
    assert (await fetch(path, status=status, **fields))[1] == cold


async def test_the_event_loop_searches_no_store_for_a_view(
    fetch: Fetcher, app: FastAPI, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not there would be searched for at each request."""
    published.publish(settings)
    searched: list[threading.Thread] = []
    collections = app.state.store.collections
    monkeypatch.setattr(
        app.state.store, "collections", lambda: [searched.append(threading.current_thread()), collections()][1]
    )
    for _ in range(2):
        await fetch("views/nothing", status=404)
    assert not (await fetch("views/items_rff"))[0]
    assert searched
    assert threading.main_thread() not in searched
    assert (await fetch("views/items_rff"))[0]


@pytest.mark.parametrize(
    ("url", "local"), [("{}", True), ("redis://127.0.0.1:6379/0", False), ("s3://bucket/store", False)]
)
def test_a_store_that_a_server_holds_is_left_to_threads(tmp_path: Path, url: str, local: bool) -> None:
    assert is_local(open_store(url.format(tmp_path / "not-yet"))) is local
    assert InlineIO(local).allowed() is local


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "cifs"])
def test_a_file_server_is_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Mounts are what the kernel says of them; a test cannot mount one."""
    mount = psutil.disk_partitions(all=True)[0]
    partitions = [
        mount._replace(mountpoint="/", fstype="ext4"), mount._replace(mountpoint=str(tmp_path / "shared"), fstype=kind)
    ]  # fmt: skip
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)
    assert is_local(open_store(tmp_path / "own"))
    assert not is_local(open_store(tmp_path / "shared" / "home" / "store"))
    (tmp_path / "own").symlink_to(tmp_path / "shared")
    assert not is_local(open_store(tmp_path / "own" / "store"))


def test_after_a_wait_for_the_disk_threads_take_over_for_longer_each_time() -> None:
    now, waits = 100.0, 0
    inline_io = InlineIO(waits=lambda: waits, clock=lambda: now)

    def rows(from_disk: int = 0) -> str:
        nonlocal waits
        waits += from_disk
        return "rows"

    def until_allowed() -> float:
        nonlocal now
        begun = now
        while not inline_io.allowed():
            now += 0.005
        return round(now - begun, 2)

    assert inline_io.call(rows) == "rows"
    assert until_allowed() == 0
    paused = []
    for _ in range(10):
        assert inline_io.call(lambda: rows(3)) == "rows"
        paused.append(until_allowed())
    assert paused == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]
    inline_io.call(rows)
    assert until_allowed() == 0
    inline_io.call(lambda: rows(1))
    assert until_allowed() == 0.01


def test_a_wait_that_ended_in_an_error_counts_too() -> None:
    waits = iter([0, 1])
    inline_io = InlineIO(waits=lambda: next(waits), clock=lambda: 100.0)
    with pytest.raises(KeyError):
        inline_io.call(lambda: {}["gone"])
    assert not inline_io.allowed()


def test_the_kernel_counts_pages_that_are_read_from_disk(tmp_path: Path) -> None:
    if kind_of_mount(tmp_path) == "tmpfs":
        pytest.skip("the temporary directory is in memory")
    file = tmp_path / "rows"
    file.write_bytes(os.urandom(2**22))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            before = major_faults()
            assert len({mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)}) > 1
            cold = major_faults()
            assert len({mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)}) > 1
            assert major_faults() == cold
    assert cold > before
