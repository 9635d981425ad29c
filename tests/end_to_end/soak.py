"""The soak: two services on one home, schedules that fire every minute, real runs, readers; and kills.

``make soak`` (30 minutes, a hundred kills) or ``.venv/bin/python -m tests.end_to_end.soak --minutes M --kills N``. Ends
with a JSON object of what was done and seen, and exit code 1 if a promise was broken:

- no job is lost: each firing that started has its job, each job ends, and each ends as succeeded;
- none runs twice: no two attempts of a job are alive at once, each published one version;
- no orphan: once all jobs have ended, no process of any run is left;
- no version is torn: every version passes its checksums, every answer to the readers is whole;
- memory is flat: of the process that serves vectors throughout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from embeddings.store import Store, open_store
from service.client import Client
from service.client.http import ProblemError, ServiceError
from tests.service import serving
from tests.support.told_clock import ToldClock
from trainer.runs.protocol import RUN_DIR_VARIABLE

COLLECTION = "soaked"
NUM_ITEMS = 300
TERMINAL = ("succeeded", "failed", "cancelled")


class Server:
    """A service process that can be killed and started again. ``real``: see tests/service/serving.py."""

    def __init__(self, role: str, environment: dict[str, str], log: Path, real: bool):
        self.role = role
        self._environment = environment
        self._log = log
        self._real = real
        self.start()

    def start(self) -> None:
        arguments = ["serve", "--role", self.role, "--port", "0"]
        self.process = serving.start_command(arguments, self._environment, self._log, self._real)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found is not None, "the service did not say where it listens"
        self.url = found[0]

    def kill(self) -> None:
        self.process.kill()
        self._gone()

    def stop(self) -> None:
        self.process.terminate()
        self._gone()

    def _gone(self) -> None:
        self.process.wait(300)
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclasses.dataclass
class Seen:
    """What the soak did and saw."""

    kills: Counter[str] = dataclasses.field(default_factory=Counter)
    broken: list[str] = dataclasses.field(default_factory=list)
    fetches: int = 0
    versions_read: set[str] = dataclasses.field(default_factory=set)
    resident_mb: list[float] = dataclasses.field(default_factory=list)


class Soak:
    def __init__(self, home: Path, seed: int, real: bool):
        self.home = home
        self.real = real
        self.random = random.Random(seed)
        self.seen = Seen()
        data = home.parent / "data"
        data.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")}
        self.environment = {
            **kept, "EVENKEEL_HOME": str(home), "EVENKEEL_DATA_ROOTS": str(data), "OMP_NUM_THREADS": "1",
            "EVENKEEL_RETRY_BACKOFF_SECONDS": "0.5", "EVENKEEL_SILENCE_SECONDS": "240",
        }  # fmt: skip
        self.clocks: list[ToldClock] = []
        self.rows = data / "rows.parquet"
        write_rows(self.rows)
        self.replicas = [self.server("all", number) for number in range(2)]
        self.vectors: Server | None = None
        self.done = threading.Event()

    def server(self, role: str, number: int) -> Server:
        environment = self.environment
        if self.real:  # forks of a process that runs already take no library
            self.clocks.append(ToldClock(self.home.parent, f"clock-{role}-{number}"))
            environment = environment | self.clocks[-1].environment
        return Server(role, environment, self.home.parent / f"{role}-{number}.log", self.real)

    @property
    def key(self) -> str:
        return (self.home / "admin.key").read_text().strip()

    def client(self, timeout_seconds: float = 300.0) -> Client:
        return Client(self.random.choice(self.replicas).url, self.key, timeout_seconds=timeout_seconds)

    def asked(self, call: Callable[[Client], Any], seconds: float = 300.0) -> Any:
        """The answer of whichever replica lives."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                with self.client() as client:
                    return call(client)
            except (OSError, ServiceError) as error:
                if time.monotonic() > deadline or (isinstance(error, ProblemError) and 400 <= error.status < 500):
                    raise
                time.sleep(0.2)

    # --- the load ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.asked(lambda client: client.add_dataset(dataset(self.rows)))
        for name, cron, overlap in (("minutely", "* * * * *", "forbid"), ("often", "*/5 * * * *", "queue")):
            spec = {"name": name, "cron": cron, "overlap": overlap, "job": job(name)}
            self.asked(lambda client, spec=spec: client.add_schedule(spec))
        first = self.asked(lambda client: client.submit(job("first"), idempotency_key="first"))
        self.until(lambda: self.job(first["id"])["state"] == "succeeded", 600)
        self.vectors = self.server("vectors", 0)
        for work in (self.read, self.watch):
            threading.Thread(target=work, daemon=True).start()

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.asked(lambda client: client.job(job_id)))

    def until(self, look: Callable[[], Any], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not look():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing came within {seconds} s")
            time.sleep(0.5)

    def read(self) -> None:
        """Fetches from the process that nobody kills: every answer must be of one version, and whole."""
        assert self.vectors is not None
        ids = list(range(1, NUM_ITEMS + 1))
        with Client(self.vectors.url, self.key, timeout_seconds=300) as client:
            while not self.done.wait(0.05):
                try:
                    found = client.vectors(COLLECTION, ids)
                except (OSError, ServiceError) as error:
                    self.seen.broken.append(f"a fetch failed: {error}")
                    continue
                lengths = np.linalg.norm(found.vectors[found.found], axis=1)
                if not (found.found.all() and np.isfinite(lengths).all()):
                    self.seen.broken.append(f"a fetch from {found.version} was not whole")
                self.seen.fetches += 1
                self.seen.versions_read.add(found.version)

    def watch(self) -> None:
        """Two drivers of one run directory at once, and the memory of what serves vectors."""
        assert self.vectors is not None
        process = psutil.Process(self.vectors.process.pid)
        while not self.done.wait(1.0):
            found = self.drivers()
            if len(set(found.values())) < len(found):
                # A process that one is just starting is called as it for a moment: not for two looks.
                time.sleep(0.5)
                again = self.drivers()
                found = {pid: directory for pid, directory in found.items() if again.get(pid) == directory}
            for directory, count in Counter(found.values()).items():
                if count > 1:
                    self.seen.broken.append(f"{count} drivers of {directory} at once")
            self.seen.resident_mb.append(process.memory_info().rss / 2**20)

    # --- what is killed ----------------------------------------------------------------------------------------------

    def drivers(self) -> dict[int, str]:
        """Live main processes of runs: pid and run directory."""
        found = {}
        for process in self.parts("evenkeel-run"):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process.environ()[RUN_DIR_VARIABLE]
        return found

    def parts(self, name: str) -> list[psutil.Process]:
        """Processes of runs that are called so."""
        found = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get(RUN_DIR_VARIABLE, "").startswith(str(self.home))
                if ours and process.info["name"].startswith(name):
                    found.append(process)
        return found

    def fork_servers(self) -> list[psutil.Process]:
        """What the services fork runs from."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                of_services = "trainer.launch.fork_server" in (process.info["cmdline"] or [])
                if of_services and process.environ().get("EVENKEEL_HOME") == str(self.home):
                    found.append(process)
        return found

    def kill_something(self) -> None:
        kinds = ["service"] * 3 + ["driver"] * 3 + ["rank"] * 2 + ["fork_server"] * 2 + ["suspend"] * 2
        kinds += ["clock"] * 2 if self.clocks else []
        kind = self.random.choice(kinds)
        while not self.kill(kind):  # clocks that jump leave few firings
            if all(one["state"] in TERMINAL for one in self.jobs()):
                self.asked(lambda client: client.submit(job("another")))
            time.sleep(0.1)
        self.seen.kills[kind] += 1

    def kill(self, kind: str) -> bool:
        """Whether there was one to kill."""
        if kind == "service":
            one = self.random.choice(self.replicas)
            one.kill()
            one.start()
            return True
        if kind == "clock":
            self.random.choice(self.clocks).jump(self.random)
            return True
        found = [psutil.Process(pid) for pid in self.drivers()] if kind in ("driver", "suspend") else []
        found += self.parts("evenkeel-rank") if kind in ("rank", "suspend") else []
        found += self.fork_servers() if kind == "fork_server" else []
        if not found:
            return False
        with contextlib.suppress(psutil.Error):
            victim = self.random.choice(found)
            if kind == "suspend":
                victim.suspend()
                threading.Timer(5.0, resume, [victim]).start()
            else:
                victim.kill()
        return True

    def run(self, minutes: float, kills: int) -> None:
        started = time.monotonic()
        for number in range(kills):
            due = started + (number + self.random.random()) * minutes * 60 / kills
            time.sleep(max(0.0, due - time.monotonic()))
            self.kill_something()
        time.sleep(max(0.0, started + minutes * 60 - time.monotonic()))

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self, seconds: float = 1800.0) -> dict[str, Any]:
        """Lets everything come to its end, then looks whether the promises were kept."""
        schedules = self.asked(lambda client: client.schedules())
        for schedule in schedules:
            self.asked(lambda client, name=schedule["name"]: client.change_schedule(name, paused=True))
        self.until(lambda: all(one["state"] in TERMINAL for one in self.jobs()), seconds)
        self.done.set()
        jobs = self.jobs()
        firings = [
            firing
            for schedule in schedules
            for firing in self.asked(lambda client, name=schedule["name"]: client.firings(name))
        ]
        started = {firing["job_id"] for firing in firings if firing["outcome"] == "started"}
        broken = self.seen.broken
        of_schedules = {one["id"] for one in jobs if one["schedule"]}
        if started != of_schedules:
            broken.append(f"firings without job: {started - of_schedules}; jobs without: {of_schedules - started}")
        broken += [f"{one['id']} {one['state']}: {one['error']}" for one in jobs if one["state"] != "succeeded"]
        with contextlib.suppress(TimeoutError):  # released a moment after the end
            self.until(lambda: not self.orphans(), 120)
        broken += [f"orphan {process}" for process in self.orphans()]
        versions = self.versions(broken, {one["id"] for one in jobs})
        kept = self.seen.resident_mb
        quarter = max(1, len(kept) // 4)
        return {
            "kills": dict(self.seen.kills),
            "jobs": len(jobs),
            "attempts": sum(one["attempt"] for one in jobs),
            "firings": dict(Counter(firing["outcome"] for firing in firings)),
            "versions": versions,
            "fetches": self.seen.fetches,
            "versions_read": len(self.seen.versions_read),
            "resident_mb": {
                "first_quarter": round(float(np.median(kept[:quarter])), 1),
                "last_quarter": round(float(np.median(kept[-quarter:])), 1),
            },
            "broken": broken,
        }

    def jobs(self) -> list[dict[str, Any]]:
        return list(self.asked(lambda client: client.jobs()))

    def orphans(self) -> list[str]:
        return [f"{process.pid} {process.name()}" for process in self.parts("")]

    def versions(self, broken: list[str], jobs: set[str]) -> int:
        """Opens every version with its checksums: one of each job, none torn."""
        store: Store = open_store(self.home / "store")
        collection = store.collection(COLLECTION)
        manifests = collection.versions()
        made = Counter(manifest["job"] for manifest in manifests)
        broken += [f"{job_id} has {made[job_id]} versions" for job_id in jobs if made[job_id] != 1]
        for manifest in manifests:
            if manifest["state"] not in ("expired", "candidate"):
                try:
                    collection.open(manifest["version"])
                except (OSError, ValueError) as error:
                    broken.append(f"version {manifest['version']}: {error}")
        return len(manifests)

    def end(self) -> None:
        """Whatever happened: no process of this soak stays."""
        self.done.set()
        for server in [*self.replicas, *([self.vectors] if self.vectors is not None else [])]:
            if server.process.poll() is None:
                server.stop()
        for process in self.parts(""):
            with contextlib.suppress(psutil.Error):
                process.kill()


def resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGCONT)


def write_rows(path: Path) -> None:
    """Clicks on items of two kinds by users who like one."""
    generator = np.random.default_rng(7)
    user, item = generator.integers(1, 200, 4000), generator.integers(1, NUM_ITEMS + 1, 4000)
    item[:NUM_ITEMS] = np.arange(1, NUM_ITEMS + 1)  # each once at least
    click = ((user % 2 == item % 2) ^ (generator.random(4000) < 0.1)).astype(np.int64)
    pq.write_table(pa.table({"user": user, "item": item, "click": click}), path)


def dataset(path: Path) -> dict[str, Any]:
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return {"name": "clicks", "uri": str(path), "features": features, "label": {"column": "click"}}


def job(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "dataset": {"name": "clicks"},
        "model": {"kind": "two_tower", "embedding_dim": 8, "hidden": [16, 8]},
        "epochs": 2,
        "batch_size": 256,
        "resources": {"num_workers": 1},
        "checkpoint": {"every_steps": 5},
        "retries": 50,
        "publish": {"collection": COLLECTION, "feature": "item", "gate": {"mode": "report"}},
    }


@contextlib.contextmanager
def soaking(directory: Path, seed: int, real: bool = True) -> Iterator[Soak]:
    home = directory / "home"
    home.mkdir(parents=True)
    soak = Soak(home, seed, real)
    try:
        yield soak
    finally:
        soak.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evenkeel-soak-") as directory:
        with soaking(Path(directory), given.seed) as soak:
            soak.begin()
            soak.run(given.minutes, given.kills)
            found = soak.finish()
    print(json.dumps({"minutes": given.minutes, "seed": given.seed, **found}, indent=1))
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
