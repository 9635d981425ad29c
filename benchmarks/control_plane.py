"""The control plane while a run trains: lists of jobs, vectors under load, start, memory, import.

``python -m benchmarks.control_plane`` creates its own EVENKEEL_HOME, and trains in it while it measures. The benchmark
prints a JSON line for each case. ``--pace 0 3 10`` instead gives the ranks each of these nicenesses in turn. For each
niceness it measures the seconds of a job while busy loops run, and lists of jobs while a job of two ranks trains.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.harness import say
from benchmarks.support.serving import serving
from embeddings.store import default_view, open_store
from embeddings.vectors.item_vectors import ItemVectors

NUM_JOBS = 1000
NUM_ITEMS = 200_000
DIM = 64
IDS = 100
RATE = 300
NUM_CLIENTS = 8
ENDED = ("cancelled", "failed", "succeeded")
PACE_EPOCHS, BUSY_LOOPS = 6, (0, 1, 2, 4)
LISTS_PER_SECOND, NUM_LISTS = 50, 600
SECONDS = float(os.environ.get("EVENKEEL_BENCH_SECONDS", "30"))


def report(case: str, **figures: float | str) -> None:
    load = round(os.getloadavg()[0], 1)  # of the machine, this benchmark's own included
    say({"bench": "control_plane", "case": case, **figures, "load": load})


def job(name: str, epochs: int, ranks: int = 1) -> dict[str, Any]:
    return {
        "name": name,
        "dataset": {"name": "clicks"},
        "model": {"kind": "two_tower", "embedding_dim": 16, "hidden": [32]},
        "epochs": epochs,
        "batch_size": 512,
        "resources": {"num_workers": ranks},
    }


def dataset(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows = 200_000
    limits = {"user": 5000, "item": 2000, "click": 2}
    columns = {name: rng.integers(0, limit, rows) for name, limit in limits.items()}
    pq.write_table(pa.table(columns), folder / "clicks.parquet")
    return {
        "name": "clicks",
        "uri": str(folder / "clicks.parquet"),
        "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"column": "click"},
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"p{percent}_ms": round(1000 * ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))], 2)
        for percent in (50, 95, 99)
    }


def timed(call: Callable[[], httpx.Response]) -> float:
    begun = time.perf_counter()
    call().raise_for_status()
    return time.perf_counter() - begun


def imports() -> None:
    """Measure the wall time of an import in a fresh interpreter, less that of just the interpreter."""

    def once(statement: str) -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        return time.perf_counter() - begun

    pairs = [(once("import service.app"), once("pass")) for _ in range(5)]
    report("import service.app", seconds=round(statistics.median(ours - bare for ours, bare in pairs), 2))


def first_job(folder: Path) -> None:
    """Measure the time from an empty EVENKEEL_HOME to the first accepted job."""
    begun = time.monotonic()
    with serving(folder / "home") as (url, key, _):
        http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        http.post("/v1/datasets", json=dataset(folder)).raise_for_status()
        accepted = http.post("/v1/jobs", json=job("first", 1)).raise_for_status().json()["id"]
        report("serve to first job accepted", seconds=round(time.monotonic() - begun, 2))
        end(http, accepted)  # the next measurement needs the machine to itself


def idle_memory(folder: Path) -> None:
    with serving(folder / "home", "--role", "api") as (url, key, pid):
        httpx.get(f"{url}/v1/jobs", headers={"Authorization": f"Bearer {key}"}, timeout=60).raise_for_status()
        time.sleep(5)
        report("idle api", megabytes=round(psutil.Process(pid).memory_full_info().uss / 1e6))


def many_jobs(home: Path, number_of_jobs: int = NUM_JOBS) -> None:
    """Copy the only existing job into many ended jobs, with metrics."""
    with contextlib.closing(sqlite3.connect(home / "evenkeel.db")) as database, database:
        names = [row[1] for row in database.execute("PRAGMA table_info(job)")]
        one = dict(zip(names, database.execute("SELECT * FROM job LIMIT 1").fetchone(), strict=True))
        for number in range(number_of_jobs):
            copy = {**one, "id": f"job_{number:019d}", "state": "succeeded", "released": 1}
            marks = ", ".join("?" * len(copy))
            database.execute(f"INSERT INTO job ({', '.join(copy)}) VALUES ({marks})", list(copy.values()))
            for epoch in range(4):
                values = (copy["id"], epoch, "validation", json.dumps({"auc": 0.7, "logloss": 0.5}))
                database.execute('INSERT INTO job_metric (job_id, epoch, split, "values") VALUES (?, ?, ?, ?)', values)


def publish(home: Path) -> None:
    collection = open_store(home / "store").collection("items")
    vectors = np.random.default_rng(1).standard_normal((NUM_ITEMS, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    collection.create_view(default_view("items"), dim_in=DIM, anchor_generation=1)
    version = collection.write(ItemVectors(np.arange(NUM_ITEMS), vectors), parent=None)
    collection.publish(version, None)


def under_training(folder: Path) -> None:
    """Measure lists and vectors on one worker while a job trains."""
    home = folder / "home"
    publish(home)
    with serving(home) as (url, key, _):
        http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        running = http.post("/v1/jobs", json=job("beside", 1000)).raise_for_status().json()["id"]
        try:
            await_progress(http, running)
            lists(http, "beside a run")
            vectors(url, key)
            assert http.get(f"/v1/jobs/{running}").json()["state"] == "running"
        finally:
            end(http, running)
        lists(http, "alone")


def await_progress(http: httpx.Client, job_id: str) -> None:
    while not (shown := http.get(f"/v1/jobs/{job_id}").json())["progress"]:
        if shown["state"] in ENDED:
            raise RuntimeError(f"the run to measure beside is {shown['state']}: {shown['error']}")
        time.sleep(0.5)


def end(http: httpx.Client, job_id: str) -> None:
    http.post(f"/v1/jobs/{job_id}/cancel")
    while http.get(f"/v1/jobs/{job_id}").json()["state"] not in ENDED:
        time.sleep(0.5)


def lists(http: httpx.Client, beside: str) -> None:
    """Measure lists of 1000 jobs, in pages of the greatest and of the usual length."""
    for limit in (50, 200):
        taken = [timed(lambda limit=limit: http.get("/v1/jobs", params={"limit": limit})) for _ in range(100)]  # type: ignore[misc]
        report(f"list {limit} of {NUM_JOBS} jobs, {beside}", **quantiles(taken))


def vectors(url: str, key: str) -> None:
    """Measure RATE requests a second of IDS random ids, as Arrow.

    http.client sends them from prepared bodies: client and service share the machine, so computation of the client
    would count as the service's time.
    """
    taken: list[float] = []
    lock = threading.Lock()
    end = time.monotonic() + SECONDS
    headers = {"Authorization": f"Bearer {key}", "Accept": "application/vnd.apache.arrow.stream"}

    def client(number: int) -> None:
        rng = np.random.default_rng(number)
        bodies = [json.dumps({"ids": rng.integers(0, NUM_ITEMS, IDS).tolist()}) for _ in range(200)]
        with contextlib.closing(HTTPConnection(url.removeprefix("http://"), timeout=60)) as http:
            due = time.monotonic() + number / RATE
            for body in itertools.cycle(bodies):
                time.sleep(max(0.0, due - time.monotonic()))
                if (begun := time.monotonic()) >= end:
                    return
                http.request("POST", "/v1/collections/items/vectors", body, headers)
                answer = http.getresponse()
                read = answer.read()
                took = time.monotonic() - begun
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status}: {read[:500]!r}")
                with lock:
                    taken.append(took)
                due = max(due + NUM_CLIENTS / RATE, time.monotonic() - 1)

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        for one in [threads.submit(client, number) for number in range(NUM_CLIENTS)]:
            one.result()
    rate = round(len(taken) / SECONDS)
    report(f"{IDS} ids of {NUM_ITEMS}, beside a run", requests_per_second=rate, wanted=RATE, **quantiles(taken))


def pace(folder: Path, niceness: list[int]) -> None:
    """For each niceness of ranks measure a job while busy loops run, and lists while a job of two ranks trains."""
    with contextlib.ExitStack() as services:
        clients = {}
        for number in niceness:
            (own := folder / str(number)).mkdir()
            url, key, _ = services.enter_context(serving(own / "home", EVENKEEL_RANK_NICENESS=str(number)))
            http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120)
            http.post("/v1/datasets", json=dataset(own)).raise_for_status()
            seconds_of_job(http, 1)  # the process that forks runs has then done its imports
            clients[number] = http
        for loops in BUSY_LOOPS:
            for number, http in clients.items():
                with busy(loops):
                    seconds = round(seconds_of_job(http, PACE_EPOCHS), 1)
                report(f"a job beside {loops} busy loops, niceness {number}", seconds=seconds)
        for number, http in clients.items():
            report(f"20 jobs listed, niceness {number}", **quantiles(paced_lists(http)))
            running = http.post("/v1/jobs", json=job("beside", 1000, 2)).raise_for_status().json()["id"]
            await_progress(http, running)
            report(f"20 jobs listed beside two ranks, niceness {number}", **quantiles(paced_lists(http)))
            end(http, running)


def seconds_of_job(http: httpx.Client, epochs: int) -> float:
    begun = time.monotonic()
    job_id = http.post("/v1/jobs", json=job("pace", epochs)).raise_for_status().json()["id"]
    while (shown := http.get(f"/v1/jobs/{job_id}").json())["state"] not in ENDED:
        time.sleep(0.1)
    if shown["state"] != "succeeded":
        raise RuntimeError(f"the job is {shown['state']}: {shown['error']}")
    return time.monotonic() - begun


def paced_lists(http: httpx.Client) -> list[float]:
    taken, due = [], time.monotonic()
    for _ in range(NUM_LISTS):
        time.sleep(max(0.0, due - time.monotonic()))
        taken.append(timed(lambda: http.get("/v1/jobs", params={"limit": 20})))
        due += 1 / LISTS_PER_SECOND
    return taken


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep processors busy by other programs, each in a session of its own."""
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command, start_new_session=True) for _ in range(loops)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pace", type=int, nargs="+", metavar="NICENESS", help="nicenesses of ranks, at least 0")
    options = parser.parse_args()
    if options.pace:
        with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as name:
            pace(Path(name), options.pace)
        return
    imports()
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as name:
        folder = Path(name)
        first_job(folder)
        idle_memory(folder)
        many_jobs(folder / "home")
        under_training(folder)


if __name__ == "__main__":
    main()
