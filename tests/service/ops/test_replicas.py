"""Two API replicas on one PostgreSQL under load, one of them killed: what was acknowledged is there."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy.engine import make_url

from tests.service import serving

pytestmark = pytest.mark.slow

LOAD_SECONDS = float(os.environ.get("EVENKEEL_TEST_LOAD_SECONDS", "3"))
"""The long form: 300 (docs/guides/reliability.md, "Load")."""
RATE = 200
NUM_CLIENTS = 16


class Answer(NamedTuple):
    status: int
    body: bytes


class Load:
    """Clients that keep to a rate, as if nobody waited for anybody: what is late is made up for. One half of the
    requests submits jobs with an Idempotency-Key, of the other half each second one lists the newest 20 and each second
    one looks at a job that was submitted before. Where a replica gives no answer a request is sent again to the other,
    and the silent one is left alone for a while, as by a load balancer. What was acknowledged is remembered."""

    def __init__(self, urls: list[str], key: str):
        self.hosts = [urlsplit(url).netloc for url in urls]
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.acknowledged: dict[str, str] = {}
        self.unanswered = 0
        self.wrong: list[str] = []
        self.seconds: dict[str, list[float]] = {"submit": [], "list": [], "get": []}
        self._silent_until = dict.fromkeys(self.hosts, 0.0)
        self._newest: collections.deque[str] = collections.deque(maxlen=100)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._end = time.monotonic() + LOAD_SECONDS

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        with contextlib.ExitStack() as stack:
            connections = {
                host: stack.enter_context(contextlib.closing(HTTPConnection(host, timeout=300))) for host in self.hosts
            }
            due = time.monotonic() + seed / RATE
            while due < self._end:
                time.sleep(max(0.0, due - time.monotonic()))
                due += NUM_CLIENTS / RATE
                self._ask(connections, rng)

    def _ask(self, connections: dict[str, HTTPConnection], rng: random.Random) -> None:
        number = next(self._numbers)
        kind = ("submit", "list", "submit", "get")[number % 4]
        if kind == "get" and not self._newest:
            kind = "list"
        name = f"load-{number}"
        if kind == "submit":
            sent: tuple[Any, ...] = ("POST", "/v1/jobs", json.dumps(serving.job(name)), {"Idempotency-Key": name})
        else:
            sent = ("GET", "/v1/jobs?limit=20" if kind == "list" else f"/v1/jobs/{rng.choice(self._newest)}", None, {})
        begun = time.monotonic()
        for _ in range(6):
            heard = [host for host in self.hosts if self._silent_until[host] < time.monotonic()] or self.hosts
            answer = self._send(connections, rng.choice(heard), *sent)
            if answer is not None and answer.status not in (409, 503):
                break
            time.sleep(0.05)
        if answer is None or answer.status != (202 if kind == "submit" else 200):
            self.wrong.append(f"{kind} {name}: {answer}")
            return
        with self._lock:
            self.seconds[kind].append(time.monotonic() - begun)
            if kind == "submit":
                self.acknowledged[name] = json.loads(answer.body)["id"]
                self._newest.append(self.acknowledged[name])

    def _send(
        self, connections: dict[str, HTTPConnection], host: str, method: str, path: str, body: str | None, more: Any
    ) -> Answer | None:
        http = connections[host]
        try:
            http.request(method, path, body, self.headers | more)
            response = http.getresponse()
            return Answer(response.status, response.read())
        except (OSError, HTTPException):
            http.close()
            with self._lock:
                self.unanswered += 1
                self._silent_until[host] = time.monotonic() + 5
            return None


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(LOAD_SECONDS + 400)
@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_no_acknowledged_write_is_lost_when_a_replica_is_killed(tmp_path: Path, database_url: str) -> None:
    url = make_url(database_url).render_as_string(hide_password=False)
    with contextlib.ExitStack() as replicas:
        first = replicas.enter_context(serving.serving(tmp_path, "api", EVENKEEL_DATABASE_URL=url))
        second = replicas.enter_context(serving.serving(tmp_path, "api", EVENKEEL_DATABASE_URL=url))
        http = httpx.Client(base_url=first.url, headers={"Authorization": f"Bearer {first.key}"}, timeout=300)
        replicas.enter_context(http)
        assert http.post("/v1/datasets", json=serving.dataset(first.data)).status_code == 201
        load = Load([first.url, second.url], first.key)
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            begun = time.monotonic()
            clients = [threads.submit(load.client, seed) for seed in range(NUM_CLIENTS)]
            time.sleep(LOAD_SECONDS / 2)
            second.process.kill()
            second.process.wait()
            for client in clients:
                client.result()
            took = time.monotonic() - begun
        assert load.wrong == []
        assert load.acknowledged
        found: dict[str, list[str]] = {}
        cursor = None
        while True:
            page = http.get("/v1/jobs", params={"limit": 200} | ({"cursor": cursor} if cursor else {})).json()
            for job in page["items"]:
                found.setdefault(job["name"], []).append(job["id"])
            cursor = page["next_cursor"]
            if cursor is None:
                break
    assert {name: found.get(name) for name in load.acknowledged} == {name: [i] for name, i in load.acknowledged.items()}
    assert all(len(ids) == 1 for ids in found.values()), "one that was sent again is one job"
    for kind, seconds in load.seconds.items():
        taken = sorted(seconds)
        p50, p99 = (f"{1000 * taken[int(share * len(taken))]:.0f} ms" for share in (0.5, 0.99))
        print(f"{kind}: {len(taken)}, p50 {p50}, p99 {p99}")
    answered = sum(map(len, load.seconds.values()))
    print(
        f"{answered} requests answered in {took:.1f} s, {answered / took:.0f} a second; {len(load.acknowledged)} jobs "
        f"acknowledged and found; {load.unanswered} requests had no answer from the killed replica and were sent again"
    )
