"""Chaos: three services on one PostgreSQL, one Redis and one object storage, while each of these fails in turn.

``make chaos`` (30 minutes) or ``.venv/bin/python -m tests.end_to_end.chaos --minutes M``. Prints one JSON object, with
exit code 1 if an answer was wrong or an acknowledged job was lost or doubled. The three servers are its own: they are
killed and started again, and reached over wires that are cut or hold back what they carry. In the long form each
service has a clock of its own, which jumps by hours.

Readers compare each vector with what was published: the truth is the pointer's history. Half of the minutes is the soak
(soak.py): runs, drivers and ranks that are killed or suspended.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.store import Store, default_view, open_store
from service.client import Client
from service.client.http import ProblemError, ServiceError
from tests.contracts.store_servers import CREDENTIALS, RedisServer, redis_server, s3_server
from tests.end_to_end import soak
from tests.end_to_end.soak import Server
from tests.service import databases, published, serving
from tests.service.private_postgres import PrivatePostgres, private_postgres
from tests.support.told_clock import ToldClock

IDS = np.arange(1, 51) * 10
SAME = "items_same"
"""View of the published vectors themselves."""
STALE_SECONDS = 30.0
"""Longest time after a switch in which a service may answer with the version before it."""
STREAM_SECONDS = 90.0
"""Longest life of a stream after its key: while PostgreSQL is away, keys known before go on."""
AT_ONCE = 200
LISTED = 10_000


class Wire:
    """A proxy before HOST:PORT whose connections can be cut, or held; while ``down`` it closes new ones at once."""

    def __init__(self, host: str, port: int):
        self._behind = host, port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        self.down = False
        self._open: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        self.down = True
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        time.sleep(seconds)
        self.down = False

    def hold(self, seconds: float) -> None:
        """Let connections stand without a byte, as where packets are lost."""
        self._flows.clear()
        time.sleep(seconds)
        self._flows.set()

    def close(self) -> None:
        self.cut(0)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.down:
                    near.close()
                    continue
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._behind) as far:
            self._open |= {near, far}
            back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
            back.start()
            self._carry(near, far)
            back.join()
            self._open -= {near, far}

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class Truth:
    """Which seed's vectors the collection's pointer led to, and from when on."""

    def __init__(self) -> None:
        self._history: list[tuple[float, str, int]] = []
        self._lock = threading.Lock()

    def now(self, version: str, seed: int) -> None:
        with self._lock:
            self._history.append((time.monotonic(), version, seed))

    def newest(self) -> tuple[str, int]:
        with self._lock:
            return self._history[-1][1:]

    def seeds(self, version: str, begun: float) -> set[int]:
        """Seeds that an answer may have that names this version, to a request that was sent at ``begun``."""
        with self._lock:
            ends = [at for at, _, _ in self._history[1:]] + [float("inf")]
            return {
                seed for (_, name, seed), end in zip(self._history, ends, strict=True)
                if name == version and end > begun - STALE_SECONDS
            }  # fmt: skip


class Chaos:
    def __init__(self, folder: Path, postgres: PrivatePostgres, redis: RedisServer, s3: str, seed: int, real: bool):
        self.random, self.longest_seconds = random.Random(seed), 5.0 if real else 1.0
        self.truth, self.seeds = Truth(), iter(range(1, 10**9))
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.acknowledged: dict[str, str] = {}
        self.answered: set[int] = set()
        self.beats: list[float] = []
        self.done = threading.Event()
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()
        self.begun = time.monotonic()
        self.postgres, self.redis_server, self.redis = postgres, redis, redis.client()
        self.store: Store = open_store(redis.url)
        self.wires = {
            "postgres": Wire("127.0.0.1", postgres.port),
            "redis": Wire("127.0.0.1", redis.port),
            "s3": Wire(*_address(s3)),
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")}
        (folder / "data").mkdir()
        environment = {
            **kept, **CREDENTIALS, "OMP_NUM_THREADS": "1",
            "EVENKEEL_HOME": str(folder / "home"),
            "EVENKEEL_DATA_ROOTS": f"{folder / 'data'}:s3://vectors",
            "EVENKEEL_DATABASE_URL": postgres.url.replace(str(postgres.port), str(self.wires["postgres"].port)),
            "EVENKEEL_STORE_URL": f"redis://127.0.0.1:{self.wires['redis'].port}/0",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.wires['s3'].port}",
        }  # fmt: skip
        self.publish()
        # Forks of a process that runs already take no library.
        self.clocks = [ToldClock(folder, f"clock-{number}") for number in range(3)] if real else []
        told = [environment | clock.environment for clock in self.clocks] or [environment] * 3
        self.servers = [Server("api", one, folder / f"api-{number}.log", real) for number, one in enumerate(told)]
        self.key = (folder / "home" / "admin.key").read_text().strip()
        self.client(0).add_dataset({**serving.dataset(folder / "data"), "uri": "s3://vectors/clicks.parquet"})

    def client(self, number: int) -> Client:
        """The client of one service; it is shared, because making one takes long."""
        url = self.servers[number].url
        with self._lock:
            if url not in self._clients:
                self._clients[url] = Client(url, self.key, timeout_seconds=300)
            return self._clients[url]

    # --- the load ----------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """A version of its own seed, written past the wires, as by a run elsewhere."""
        collection, seed = self.store.collection("items"), next(self.seeds)
        if not collection.exists():
            for name, kind in ((default_view("items"), "rff"), (SAME, "identity")):
                collection.create_view(name, dim_in=published.DIM, anchor_generation=1, kind=kind)
        parent = collection.current()
        version = published.write(collection, IDS, published.directions(len(IDS), seed), parent=parent)
        self.truth.now(version, seed)  # before: from the switch on, services answer with it
        collection.publish(version, parent)
        self.counts["versions"] += 1

    def read(self, number: int) -> None:
        """Fetch from one service: every answer has the vectors of what the pointer led to."""
        rng = np.random.default_rng(number)
        while not self.done.wait(0.02):
            ids, begun = rng.choice(IDS, 10), time.monotonic()
            self.counts["requests"] += 1
            try:
                found = self.client(number).vectors(ids=[int(one) for one in ids], view=SAME)
            except ProblemError as error:
                if error.status not in (429, 503):
                    self.wrong.append(f"fetch: {error.status} {error}")
                continue
            except (OSError, ServiceError):
                continue
            self.answered.add(int(time.monotonic() - self.begun))
            seeds = self.truth.seeds(found.version, begun)
            rows = [int(one) // 10 - 1 for one in ids]
            if not any(np.array_equal(found.vectors, published.directions(len(IDS), seed)[rows]) for seed in seeds):
                self.wrong.append(f"{found.version} at {begun - self.begun:.0f} s: not the vectors of seeds {seeds}")

    def submit(self, name: str) -> None:
        """Submit until acknowledged, then once more: the same job."""
        for _ in range(2):
            while not self.done.is_set():
                self.counts["requests"] += 1
                try:
                    client = self.client(self.random.randrange(3))
                    job_id = client.submit(serving.job(name), idempotency_key=name)["id"]
                except ProblemError as error:
                    if error.status not in (409, 429, 503):
                        self.wrong.append(f"submission {name}: {error.status} {error}")
                        return
                except (OSError, ServiceError):
                    pass
                else:
                    if self.acknowledged.setdefault(name, job_id) != job_id:
                        self.wrong.append(f"{name} is {job_id} and {self.acknowledged[name]}")
                    break
                time.sleep(0.2)

    def submit_steadily(self) -> None:
        number = 0
        while not self.done.wait(0.5):
            number += 1
            self.submit(f"steady-{number}")

    def submit_at_once(self, num_jobs: int) -> None:
        begun = time.monotonic()
        with ThreadPoolExecutor(num_jobs) as threads:
            list(threads.map(self.submit, [f"burst-{number}" for number in range(num_jobs)]))
        self.counts["burst_seconds"] = round(time.monotonic() - begun)

    def shout(self) -> None:
        """Post a long document of wrong keys to one service, and ask all of them whether they live."""
        document = {f"wrong{number}": 0 for number in range(40_000)}
        while not self.done.wait(1):
            self.counts["requests"] += 1
            try:
                self.client(self.random.randrange(3)).submit(document)
            except ProblemError as error:
                if error.status not in (413, 422, 429, 503):
                    self.wrong.append(f"wrong keys: {error.status} {error}")
            except (OSError, ServiceError):
                pass
            else:
                self.wrong.append("wrong keys were taken")

    def beat(self, number: int) -> None:
        """Note how long one service takes to say that it lives, beside all that is asked of it."""
        while not self.done.wait(0.1):
            began = time.monotonic()
            with contextlib.suppress(OSError, ServiceError):
                self.client(number).request("GET", "/healthz", prefix="")
                self.beats.append(time.monotonic() - began)

    def rotate(self) -> None:
        """Rotate the key of an open stream: the stream ends, and the new secret is known everywhere."""
        while not self.done.wait(1):
            with contextlib.suppress(OSError, ServiceError):
                admin = self.client(0)
                job = next(iter(self.acknowledged.values()), None)
                if job is None:
                    continue
                key = admin.create_key("reader", ["jobs:read"])
                stream = threading.Thread(target=self._follow, args=(key["key"], job), daemon=True)
                stream.start()
                time.sleep(self.random.uniform(0, 2))
                fresh = admin.rotate_key(key["id"], overlap_seconds=0)["key"]
                self.counts["rotations"] += 1
                stream.join(STREAM_SECONDS)
                if stream.is_alive():
                    self.wrong.append(f"a stream of {key['id']} outlived its key")
                with Client(self.servers[1].url, fresh, timeout_seconds=300) as client:
                    try:
                        client.job(job)
                    except ProblemError as error:
                        if error.status not in (429, 503):
                            self.wrong.append(f"a new secret: {error.status} {error}")

    def _follow(self, secret: str, job: str) -> None:
        with contextlib.suppress(OSError, ServiceError):
            with Client(self.servers[2].url, secret, timeout_seconds=300) as client:
                for _ in client.events(job):
                    pass

    # --- what fails --------------------------------------------------------------------------------------------------

    def a_while(self) -> float:
        return self.longest_seconds * self.random.uniform(0.1, 1)

    def kill(self) -> None:
        server = self.random.choice(self.servers)
        server.kill()
        server.start()

    def stand_still(self) -> None:
        process = self.random.choice(self.servers).process
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(self.a_while())
        os.kill(process.pid, signal.SIGCONT)

    def cut(self, name: str) -> None:
        self.wires[name].cut(self.a_while())

    def hold(self, name: str) -> None:
        self.wires[name].hold(self.a_while())

    def crash_postgres(self) -> None:
        self.postgres.crash()
        time.sleep(self.a_while())
        self.postgres.start()

    def kill_redis(self) -> None:
        self.redis_server.kill()
        time.sleep(self.a_while())
        self.redis_server.start()
        while self.redis.info("persistence")["loading"]:
            time.sleep(0.05)

    def jump(self) -> None:
        self.random.choice(self.clocks).jump(self.random)

    def go_back(self) -> None:
        """Redis as it was two versions ago, as after a restart from an old dump; then a publication."""
        keys = list(self.redis.scan_iter(count=1000))
        dump = {key: (self.redis.dump(key), max(0, self.redis.pttl(key))) for key in keys}
        version, seed = self.truth.newest()
        self.publish()
        self.publish()
        time.sleep(1)
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.flushdb()
        for key, (value, left) in dump.items():
            if value is not None:
                pipeline.restore(key, left, value)
        pipeline.execute()
        self.truth.now(version, seed)
        self.publish()

    def fail_for(self, minutes: float) -> None:
        kinds: dict[str, Callable[[], None]] = {
            "kill": self.kill, "stand_still": self.stand_still, "publish": self.publish, "go_back": self.go_back,
            "crash_postgres": self.crash_postgres, "kill_redis": self.kill_redis,
            **{f"cut_{name}": functools.partial(self.cut, name) for name in self.wires},
            **{f"hold_{name}": functools.partial(self.hold, name) for name in self.wires},
            **({"jump": self.jump} if self.clocks else {}),
        }  # fmt: skip
        end, order = time.monotonic() + 60 * minutes, list(kinds)
        while order and (time.monotonic() < end or not set(kinds) <= set(self.faults)):
            for kind in self.random.sample(order, len(order)):
                kinds[kind]()
                self.faults[kind] += 1
                time.sleep(self.a_while() / 3)

    # --- the end -----------------------------------------------------------------------------------------------------

    def run(self, minutes: float, at_once: int = AT_ONCE) -> dict[str, Any]:
        work: list[Callable[[], None]] = [functools.partial(self.read, number) for number in range(3)]
        work += [functools.partial(self.beat, number) for number in range(3)]
        work += [self.shout, self.rotate, self.submit_steadily, functools.partial(self.submit_at_once, at_once)]
        self.begun = time.monotonic()
        threads = [threading.Thread(target=self._noting, args=(one,), daemon=True) for one in work]
        for thread in threads:
            thread.start()
        self.fail_for(minutes)
        threads[-1].join(600)
        seconds = int(time.monotonic() - self.begun)
        self.done.set()
        for thread in threads:
            thread.join(120)
        self.fill()
        found = self.listed()
        self.stop()
        lost = [name for name, job_id in self.acknowledged.items() if job_id not in found.get(name, [])]
        doubled = [name for name, ids in found.items() if len(ids) > 1 and name != "filler"]
        return {
            "requests": self.counts["requests"], "wrong": len(self.wrong), "examples": self.wrong[:5],
            "minutes_without_answers": round((seconds - len(self.answered & set(range(seconds)))) / 60, 2),
            "acknowledged": len(self.acknowledged), "lost": len(lost), "doubled": len(doubled),
            "listed": sum(map(len, found.values())), "list_seconds": self.counts["list_seconds"],
            "burst_seconds": self.counts["burst_seconds"], "versions": self.counts["versions"],
            "rotations": self.counts["rotations"],
            "liveness_p99_seconds": round(float(np.quantile(self.beats, 0.99)), 2),
            "faults": dict(self.faults),
        }  # fmt: skip

    def _noting(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a load that ended would check nothing
            self.wrong.append(f"{work}: {error!r}")

    def fill(self) -> None:
        """Jobs until there are LISTED, as copies of one."""
        databases.execute(
            self.postgres.url,
            "INSERT INTO job SELECT (jsonb_populate_record(one,"
            " jsonb_build_object('id', 'job_' || lpad(number::text, 20, '0'), 'name', 'filler'))).*"
            f" FROM job one, generate_series(1, {LISTED}) number WHERE one.id = (SELECT min(id) FROM job)",
        )

    def listed(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        begun = time.monotonic()
        for job in self.client(0).jobs():
            found.setdefault(job["name"], []).append(job["id"])
        self.counts["list_seconds"] = round(time.monotonic() - begun)
        if len(found["filler"]) != LISTED or len(set(found["filler"])) != LISTED:
            self.wrong.append(f"{len(found['filler'])} of {LISTED} jobs were listed")
        return found

    def stop(self) -> None:
        """Every service ends when it is asked to."""
        for client in self._clients.values():
            client.close()
        for server in self.servers:
            try:
                server.stop()
            except subprocess.TimeoutExpired:
                self.wrong.append(f"{server.url} did not end")

    def end(self) -> None:
        self.done.set()
        for server in self.servers:
            if server.process.poll() is None:
                server.kill()
        for wire in self.wires.values():
            wire.close()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    return host, int(port)


@contextlib.contextmanager
def chaos(folder: Path, seed: int, real: bool = True) -> Iterator[Chaos]:
    os.environ.update(CREDENTIALS)
    (folder / "redis").mkdir()
    written = ("--appendonly", "yes", "--appendfsync", "always")
    with (
        private_postgres() as postgres,
        redis_server(folder / "redis", *written) as redis,
        s3_server() as s3,
        contextlib.ExitStack() as last,
    ):
        files = pa.fs.S3FileSystem(endpoint_override=s3, scheme="http")
        rows = pa.table({"user": [1, 2, 3], "item": [3, 4, 3], "click": [0, 1, 1]})
        pq.write_table(rows, "vectors/clicks.parquet", filesystem=files)
        one = Chaos(folder, postgres, redis, s3, seed, real)
        last.callback(one.end)
        yield one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evenkeel-chaos-") as directory, chaos(Path(directory), given.seed) as one:
        found = one.run(given.minutes / 2)
    with tempfile.TemporaryDirectory(prefix="evenkeel-soak-") as directory:
        with soak.soaking(Path(directory), given.seed) as runs:
            runs.begin()
            runs.run(given.minutes / 2, max(1, int(given.minutes * 2)))
            of_runs = runs.finish()
    print(json.dumps({"minutes": given.minutes, "seed": given.seed, **found, "runs": of_runs}))
    return 1 if found["wrong"] or found["lost"] or found["doubled"] or of_runs["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
