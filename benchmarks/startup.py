"""Waiting times of a job: seconds from submission to the first step, and from the last step to publication.

``python -m benchmarks.startup [--repeat 3] [--case ...] [--workers 1] [--ray-address HOST:PORT]``. A real service in a
temporary home gets one job at a time through its REST interface: BPR of dim 32 over 100,000 interactions of 1,000
items, which is published. Cases: ``cold``, the first job after the service's start; ``warm``, the same job again;
``refresh``, a scheduled job a day later that starts from the previous version; ``train``, the same job by
``evenkeel train``, without a service.
With an address, ranks join that Ray cluster (``ray start --head``; RAY_AUTH_TOKEN is its token). One JSON line per job;
``parts`` are the seconds of each phase, by the run's own events: see :func:`parts_of`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.support.harness import say
from benchmarks.support.serving import EVENKEEL, serving
from service.client import Client
from trainer.runs.events import read_events
from trainer.runs.protocol import PROCESS_FILE

NUM_ROWS, NUM_USERS, NUM_ITEMS, NUM_DAYS = 100_000, 5_000, 1_000, 10
FIRST_DAY = datetime.date(2026, 3, 1)
LAST_DAY = FIRST_DAY + datetime.timedelta(NUM_DAYS - 1)
"""Partition of the first job: the last day of its window."""
CASES = ("cold", "warm", "refresh", "train")
POLL_SECONDS = 0.05


def write_rows(path: Path) -> None:
    """Write rows of ten kinds of users; each kind of user takes items of its own kind.

    The rows cover one day more than the first job is trained on.
    """
    generator = np.random.default_rng(0)
    count = NUM_ROWS * (NUM_DAYS + 1) // NUM_DAYS
    user = generator.integers(0, NUM_USERS, count)
    item = generator.integers(0, NUM_ITEMS // 10, count) * 10 + user % 10
    days = np.array([FIRST_DAY + datetime.timedelta(day) for day in range(NUM_DAYS + 1)])
    date = days[np.arange(count) * (NUM_DAYS + 1) // count]
    pq.write_table(pa.table({"user": user, "item": item, "date": [str(day) for day in date]}), path)


def dataset_of(rows: Path) -> dict[str, Any]:
    return {
        "name": "interactions",
        "uri": str(rows),
        "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"negatives": {"per_positive": 1, "of": "item"}},
        "partition": "date",
    }


def job_of(**changes: Any) -> dict[str, Any]:
    document = {
        "name": "startup",
        "dataset": {"name": "interactions", "window": {"start": str(LAST_DAY), "days": NUM_DAYS}},
        "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 32},
        "optimizer": {"kind": "adam", "learning_rate": 0.005},
        "epochs": 2,
        "batch_size": 2048,
        # The gate only reports: one pass over random rows makes vectors that move a lot.
        "publish": {"collection": "items", "feature": "item", "gate": {"mode": "report"}},
    }
    return document | changes


# --- events of a run -------------------------------------------------------------------------------------------------


def parts_of(directory: Path, submitted: float, ended: float) -> dict[str, Any]:
    """Return the fields of an output line.

    The parts in order of time: ``queue`` until the process starts, ``process`` until its first event (imports),
    ``prepare``, ``cluster`` (start of Ray), ``workers`` until rank 0 runs its first line, ``build`` until its first
    batch, ``first step``, ``training`` (the rest), ``evaluation``, ``checkpoint``, ``publish``, ``end`` until the end
    is seen.
    """
    events = [event.fields for event in read_events(directory)]
    phases = [event for event in events if event["type"] == "phase"]
    steps = [_seconds(event) for event in events if event["type"] == "progress"]
    states = {event["state"]: _seconds(event) for event in events if event["type"] == "state"}
    lasted: dict[str, float] = {}
    for event in phases:
        lasted[event["name"]] = lasted.get(event["name"], 0.0) + event["seconds"]
    built = max(_seconds(event) for event in phases if event["name"] == "build")
    before = max(_seconds(event) for event in phases if event["name"] in ("prepare", "cluster"))
    started = _started(directory) or submitted
    parts = {
        "queue": started - submitted,
        "process": states["starting"] - started,
        "prepare": lasted["prepare"],
        "cluster": lasted.get("cluster", 0.0),
        "workers": built - lasted["build"] - before,
        "build": lasted["build"],
        "first step": steps[0] - built,
        "evaluation": lasted["evaluation"],
        "checkpoint": lasted["checkpoint"],
        "publish": lasted["publish"],
        "end": ended - states["succeeded"],
    }
    parts["training"] = ended - submitted - sum(parts.values())
    return {
        "submit_to_first_step_seconds": round(steps[0] - submitted, 2),
        "last_step_to_published_seconds": round(ended - steps[-1], 2),
        "total_seconds": round(ended - submitted, 2),
        "parts": {name: round(seconds, 2) for name, seconds in parts.items()},
    }


def _seconds(event: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp()


def _started(directory: Path) -> float | None:
    """Return the start time of the run's process, to a hundredth of a second; None if it is not known."""
    try:
        recorded = json.loads((directory / PROCESS_FILE).read_text("utf-8"))
    except FileNotFoundError:
        return None
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return float(booted + recorded["start_ticks"] / os.sysconf("SC_CLK_TCK"))


def line(case: str, fields: dict[str, Any]) -> None:
    say({"bench": "startup", "case": case, **fields, "load": round(os.getloadavg()[0], 1)})


# --- the cases -------------------------------------------------------------------------------------------------------


def waited_for(client: Client, home: Path, job_id: str, submitted: float) -> dict[str, Any]:
    job = client.wait(job_id, timeout_seconds=600, poll_seconds=POLL_SECONDS)
    ended = time.time()
    if job["state"] != "succeeded" or job["publication"]["status"] != "published":
        raise RuntimeError(f"job {job_id} {job['state']}: {job.get('error') or job['publication']}")
    return parts_of(home / "runs" / job_id, submitted, ended)


def served(folder: Path, cases: list[str], repeat: int, workers: int, ray_address: str | None) -> None:
    """Run cases ``cold``, ``warm`` and ``refresh`` on one service; with an address its ranks join that cluster."""
    home, resources = folder / "home", {"num_workers": workers}
    variables = {} if ray_address is None else {"EVENKEEL_RAY_ADDRESS": ray_address}
    with serving(home, **variables) as service, Client(service.url, service.key) as client:
        client.json("GET", "/jobs")  # answered once the service is ready
        client.add_dataset(dataset_of(folder / "rows.parquet"))
        for case in ("cold", *["warm"] * (repeat if "warm" in cases else 0)):
            submitted = time.time()
            fields = waited_for(
                client, home, client.submit(job_of(resources={"num_workers": workers}))["id"], submitted
            )
            if case in cases:
                line(case, fields)
        if "refresh" in cases:
            window = {"name": "interactions", "window": {"start": "{firing_date}", "days": NUM_DAYS}}
            resources = {"num_workers": workers}
            job = job_of(
                name="daily",
                resources=resources,
                dataset=window,
                init_from={"collection": "items", "version": "current"},
            )
            client.add_schedule({"name": "daily", "cron": "0 3 * * *", "timezone": "Europe/Berlin", "job": job})
            for _ in range(repeat):
                submitted = time.time()
                firing = client.trigger("daily", firing_date=str(LAST_DAY + datetime.timedelta(1)))
                line("refresh", waited_for(client, home, firing["job_id"], submitted))
    shutil.rmtree(home)


def trained(folder: Path) -> None:
    """Run case ``train``: the same job by ``evenkeel train``, from start to end of the shell command."""
    spec, directory = folder / "train.yaml", folder / "run"
    spec.write_text(yaml.safe_dump_all([dataset_of(folder / "rows.parquet"), {"spec_version": 1, **job_of()}]))
    submitted = time.time()
    subprocess.run(
        [EVENKEEL, "train", spec, "--run-dir", directory, "--store", folder / "store"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    line("train", parts_of(directory, submitted, time.time()))
    shutil.rmtree(directory)
    shutil.rmtree(folder / "store")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--repeat", type=int, default=3, help="how often each case is measured")
    parser.add_argument("--services", type=int, default=1, help="how many services are started, each with a cold job")
    parser.add_argument("--workers", type=int, default=1, help="ranks of each job of a service")
    parser.add_argument("--ray-address", help="HOST:PORT of a Ray cluster that ranks of a service's jobs join")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evenkeel-startup-") as name:
        folder = Path(name)
        write_rows(folder / "rows.parquet")
        if "train" in options.case:
            for _ in range(options.repeat):
                trained(folder)
        if set(options.case) - {"train"}:
            for _ in range(options.services):
                served(folder, options.case, options.repeat, options.workers, options.ray_address)
    return 0


if __name__ == "__main__":
    sys.exit(main())
