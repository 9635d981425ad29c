"""Seconds until the first step of a one-pass job, and of the same job with a preparation.

``python -m benchmarks.one_pass [--full] [--rows 1000000] [--whole 1000000]``. The click log of benchmarks.prepare (26
columns of ids, half of them strings, 13 of numbers) as one Parquet file; a DCN-V2 of dim 16 with 26 dynamic tables, on
one rank of two threads, in a process of its own; case ``read``: its rows are only read and hashed. One JSON object for
each size and case:

=====================  ================================================================================================
field                  meaning
=====================  ================================================================================================
first_step_seconds     from the start of the process to the event of its first step
prepare_seconds        part of these before the rank is built: the run's phase of that name
data_bytes             size of the run's directory then: bytes written of the rows
examples_per_second    rate of training steps, for a job that runs to its end (``--whole``)
anonymous_mib          largest memory of that job's process, without memory-mapped files
total_seconds          from the start to the end of that job's process, with its evaluation
=====================  ================================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.prepare import ID_COLUMNS, NUMBER_COLUMNS, write_log
from benchmarks.support.harness import parse
from trainer.data.one_pass.data import OnePassData
from trainer.data.prepare.preparation import prepare
from trainer.runs.events import read_events
from trainer.spec import parse_dataset, parse_job

CAPACITY = 50_000
POLL_SECONDS = 0.02


def spec_of(rows: Path, one_pass: bool) -> str:
    """Return the dataset and the job as YAML."""
    features: dict[str, Any] = {name: {"type": "id"} for name in ID_COLUMNS}
    features |= {name: {"type": "dense", "transform": "log1p", "missing": 0.0} for name in NUMBER_COLUMNS}
    dataset = {"name": "log", "uri": str(rows), "features": features, "label": {"column": "click"}}
    job = {
        "name": "one-pass" if one_pass else "prepared",
        "dataset": {"name": "log", "one_pass": one_pass},
        "model": {"kind": "dcnv2", "embedding_dim": 16, "hidden": [64]},
        "optimizer": {"kind": "adagrad"},
        "tables": {name: {"capacity": CAPACITY, "admission_threshold": 2} for name in ID_COLUMNS},
        "batch_size": 8192,
        "evaluation": {"split": {"kind": "random", "validation": 0.0, "test": 0.02}},
        "resources": {"num_workers": 1, "cpus_per_worker": 2},
        "checkpoint": {"every_steps": 1_000_000},
    }
    return yaml.safe_dump_all([dataset, job])


def measured(rows: Path, folder: Path, one_pass: bool, whole: bool) -> dict[str, Any]:
    """Run a job to its first step, or to its end."""
    spec = folder / "spec.yaml"
    spec.write_text(spec_of(rows, one_pass))
    run = folder / "run"
    begun = time.monotonic()
    command = [sys.executable, "-m", "trainer.launch.in_process", str(spec), "--run-dir", str(run)]
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not any(event["type"] == "progress" for event in _events(run)):
                if process.poll() is not None:
                    raise RuntimeError((folder / "log.txt").read_text()[-2000:])
                time.sleep(POLL_SECONDS)
            found: dict[str, Any] = {"first_step_seconds": round(time.monotonic() - begun, 2)}
            prepare = next(one for one in _events(run) if one["type"] == "phase" and one["name"] == "prepare")
            found["prepare_seconds"] = round(prepare["seconds"], 2)
            found["data_bytes"] = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
            if whole:
                peak = 0
                while process.poll() is None:
                    peak = max(peak, _anonymous_mib(process.pid))
                    time.sleep(POLL_SECONDS)
                assert process.returncode == 0, (folder / "log.txt").read_text()[-2000:]
                found["anonymous_mib"] = peak
                found["total_seconds"] = round(time.monotonic() - begun, 2)
                found |= _figures(_events(run))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    return found


def read(rows: Path, folder: Path) -> dict[str, Any]:
    """Read and hash all rows in this process, without training on them."""
    dataset, job = yaml.safe_load_all(spec_of(rows, one_pass=True))
    specs = parse_dataset(dataset), parse_job(job)
    data = OnePassData.of(prepare(*specs, folder / "data").directory, *specs)
    first: float | None = None
    begun, worked = time.monotonic(), time.process_time()
    for _ in data.all_windows():
        first = time.monotonic() - begun if first is None else first
    seconds, processor = time.monotonic() - begun, time.process_time() - worked
    assert first is not None
    return {
        "first_window_seconds": round(first, 2), "seconds": round(seconds, 2), "processor_seconds": round(processor, 2)
    }  # fmt: skip


def _figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    progress = [event for event in events if event["type"] == "progress"]
    last, first = (datetime.datetime.fromisoformat(progress[place]["time"]) for place in (-1, 0))
    seconds = (last - first).total_seconds()
    auc = next(event["auc"] for event in events if event["type"] == "metric" and event["split"] == "test")
    examples = progress[-1]["examples"] - progress[0]["examples"]
    return {"examples_per_second": round(examples / seconds), "test_auc": round(auc, 4)}


def _anonymous_mib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("RssAnon:")), 0)


def _events(run: Path) -> list[dict[str, Any]]:
    return [event.fields for event in read_events(run)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--ids", type=int, default=500_000, help="distinct ids of each column")
    parser.add_argument("--whole", type=int, nargs="*", default=[], help="sizes of which jobs run to their end")
    parser.add_argument(
        "--folder", type=Path, help="where the logs are written, once for each size; default: temporary"
    )
    options = parse(parser, rows=[1_000_000, 8_000_000])
    with tempfile.TemporaryDirectory() as temporary:
        for size in options.rows:
            path = (options.folder or Path(temporary)) / f"log-{size}-{options.ids}.parquet"
            if not path.exists():
                write_log(path.with_suffix(".partial"), size, options.ids)
                os.replace(path.with_suffix(".partial"), path)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                alone = read(path, Path(folder))
            print(json.dumps({"bench": "one_pass", "case": "read", "rows": size, **alone}), flush=True)
            for one_pass in (True, False):
                with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                    found = measured(path, Path(folder), one_pass, size in options.whole)
                case = "one pass" if one_pass else "prepared"
                print(json.dumps({"bench": "one_pass", "case": case, "rows": size, **found}), flush=True)


if __name__ == "__main__":
    main()
