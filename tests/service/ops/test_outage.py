"""``evenkeel serve --role vectors`` while the database is away: known keys go on, unknown ones come back later."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy.engine import make_url

from service.client import Client, ProblemError
from service.identity.keys import KNOWN_KEYS_FILE, load_known
from tests.service import published, serving
from tests.service.starting_postgres import refuse
from tests.support.free_ports import free_port

pytestmark = pytest.mark.process

OUTAGE_SECONDS = float(os.environ.get("EVENKEEL_TEST_OUTAGE_SECONDS", "4"))
"""The long test: 300. Requests go on for all of it, at up to RATE in a second."""
RATE = 100
NUM_THREADS = 4


class Proxy:
    """A TCP proxy before the database. ``cut``: connections end and new ones are refused. ``hanging``: new ones are
    taken and never answered, which is what a lost host looks like. ``starting``: they are told that it starts up."""

    def __init__(self, host: str, port: int):
        self._target = (host, port)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.hanging = self.starting = False
        self.port = free_port()  # it comes back to it
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept()

    def _accept(self) -> None:
        threading.Thread(target=self._take, args=(self._listener,), daemon=True).start()

    def _take(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(near)
            if self.hanging:
                continue
            if self.starting:
                refuse(near)
                self._close(near)
                continue
            far = socket.create_connection(self._target)
            with self._lock:
                self._open.add(far)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        self._close(source, sink)

    def _close(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            with self._lock:
                self._open.discard(end)

    def end_connections(self) -> None:
        with self._lock:
            ends = list(self._open)
        self._close(*ends)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.end_connections()

    def restore(self) -> None:
        self.cut()
        self.hanging = self.starting = False
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept()


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    url = make_url(database_url)
    proxy = Proxy(url.host or "127.0.0.1", url.port or 5432)
    yield proxy
    proxy.cut()


@pytest.fixture
def proxied_url(database_url: str, proxy: Proxy) -> str:
    url = make_url(database_url).set(host="127.0.0.1", port=proxy.port)
    return url.render_as_string(hide_password=False)


def load(url: str, key: str, seconds: float) -> tuple[int, list[str]]:
    """Requests for ``seconds``, and one at least, by each of NUM_THREADS clients, RATE a second at most in all: (how
    many, what failed)."""

    def fetch() -> tuple[int, list[str]]:
        count, failed = 0, []
        with Client(url, key, timeout_seconds=300) as client:
            due = time.monotonic()
            end = due + seconds
            while count == 0 or time.monotonic() < end:
                try:
                    got = client.vectors("items", [10, 20, 11, 10])
                    if got.found.tolist() != [True, True, False, True]:
                        failed.append(f"wrong: {got.status}")
                except Exception as error:
                    failed.append(repr(error))
                count += 1
                due = max(due + NUM_THREADS / RATE, time.monotonic() - 1)
                time.sleep(max(0.0, due - time.monotonic()))
        return count, failed

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        rounds = [one.result() for one in [threads.submit(fetch) for _ in range(NUM_THREADS)]]
    return sum(count for count, _ in rounds), [what for _, failed in rounds for what in failed]


def ask(url: str, key: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/v1/collections/items/vectors", json={"ids": [10]}, headers=headers, timeout=300)


def eventually(url: str, key: str, status: int) -> httpx.Response:
    deadline = time.monotonic() + 300
    while (answer := ask(url, key)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    return answer


@pytest.mark.long
@pytest.mark.timeout(OUTAGE_SECONDS + 300)
@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
@pytest.mark.parametrize("kind", ["refused", "silent", "starting"])
def test_vectors_are_served_while_postgresql_is_away(
    tmp_path: Path, database_url: str, proxied_url: str, proxy: Proxy, kind: str
) -> None:
    """Ray and scheduler are not there to begin with: this role needs none."""
    with serving.serving(tmp_path, "api", EVENKEEL_DATABASE_URL=database_url) as api:
        published.publish(api.settings)
        with Client(api.url, api.key) as admin:
            reader = admin.create_key("reader", ["features:read"])["key"]
            late = admin.create_key("late", ["features:read"])
            keys = (api.key, reader)
            with serving.serving(tmp_path, "vectors", "--workers", "2", EVENKEEL_DATABASE_URL=proxied_url) as served:
                # The worker that answers knows the keys that were there when it started, used or not.
                count, failed = load(served.url, keys[0], 0.5)
                assert (count > 0, failed) == (True, [])
                known = tmp_path / "home" / KNOWN_KEYS_FILE
                deadline = time.monotonic() + 300
                while not known.exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                if kind == "silent":
                    proxy.hanging = True
                    proxy.end_connections()
                elif kind == "starting":
                    proxy.starting = True
                    proxy.end_connections()
                else:
                    proxy.cut()
                seconds = OUTAGE_SECONDS if kind == "refused" else min(OUTAGE_SECONDS, 4)
                with ThreadPoolExecutor(1) as thread:
                    under_load = thread.submit(load, served.url, reader, seconds)
                    unknown = ask(served.url, "ek_00000000_unknown")
                    ready = httpx.get(f"{served.url}/readyz", timeout=300)
                    metrics = httpx.get(f"{served.url}/metrics", timeout=300)
                    count, failed = under_load.result()
                print(f"database {kind} for {seconds:.0f} s: {count} requests, {len(failed)} failed")
                assert failed == []
                assert count >= NUM_THREADS
                assert unknown.status_code == 503
                assert unknown.headers["retry-after"].isdigit()
                assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
                assert metrics.status_code == 200
                admin.revoke_key(late["id"])
                made = admin.create_key("new", ["features:read"])["key"]
                proxy.restore()
                # Back, each worker by itself: a new key is known, a revoked one is not, a wrong one is told so.
                eventually(served.url, made, 200)
                eventually(served.url, late["key"], 401)
                eventually(served.url, "ek_00000000_unknown", 401)


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_start_without_the_database_serves_the_keys_known_last(
    tmp_path: Path, database_url: str, proxied_url: str, proxy: Proxy
) -> None:
    with serving.serving(tmp_path, "vectors", EVENKEEL_DATABASE_URL=database_url) as served:
        published.publish(served.settings)
        key = served.key
        assert ask(served.url, key).status_code == 200
        file = tmp_path / "home" / KNOWN_KEYS_FILE
        deadline = time.monotonic() + 300
        while not file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert file.stat().st_mode & 0o077 == 0
    assert key not in file.read_text()
    proxy.cut()
    with serving.serving(tmp_path, "vectors", EVENKEEL_DATABASE_URL=proxied_url) as served:
        assert ask(served.url, key).status_code == 200
        assert ask(served.url, key + "x").status_code == 503
    # What was confirmed too long ago counts no more; a file that is not whole is none.
    file.write_text(json.dumps({**json.loads(file.read_text()), "confirmed_at": time.time() - 8 * 24 * 3600}))
    with serving.serving(tmp_path, "vectors", EVENKEEL_DATABASE_URL=proxied_url) as served:
        assert ask(served.url, key).status_code == 503
    file.write_text(file.read_text()[:-9])
    assert load_known(file).principals == {}


def test_client_names_the_remedy_when_the_database_is_away(tmp_path: Path) -> None:
    url = "postgresql+asyncpg://postgres@127.0.0.1:1/none"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "admin.key").write_text("ek_0_0")
    with serving.serving(tmp_path, "vectors", EVENKEEL_DATABASE_URL=url) as served:
        published.publish(served.settings)
        with Client(served.url, "ek_0_0") as client, pytest.raises(ProblemError) as caught:
            client.vectors("items", [10])
    assert caught.value.status == 503
    assert "database" in caught.value.message
