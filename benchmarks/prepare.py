"""Seconds and memory of preparation by part, compared with polars' coding of the same columns.

A click log is written as Parquet: 26 columns of Zipf ids (exponent 1.05; half of them strings of 8 characters) and 13
of numbers, a twentieth of them missing. Each case runs in its own process. One JSON object per line:

==========  ===========================================================================================================
case        what is timed
==========  ===========================================================================================================
``ours``    ``trainer.data.prepare`` of all columns, up to the last fsync; ``parts``: (seconds, processor seconds)
            up to each of its messages
``polars``  the same id columns, read and coded by polars, integers by dense rank and strings by Categorical, its
            fastest ways; nothing is split, counted or written
==========  ===========================================================================================================

``peak_mib`` is the peak resident memory of the process, memory-mapped files included; ``anonymous_mib`` leaves these
out. ``processor_seconds`` sum over all threads, and are more reliable if other programs use the machine. ``ratio``:
ours / polars.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.harness import parse
from trainer.data.prepare.preparation import prepare
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job

NUM_IDS, NUM_NUMBERS, EXPONENT = 26, 13, 1.05
ROW_GROUP = 1 << 18
ID_COLUMNS = [f"f{column}" for column in range(NUM_IDS)]
NUMBER_COLUMNS = [f"n{column}" for column in range(NUM_NUMBERS)]


def write_log(path: Path, num_rows: int, num_ids: int, seed: int = 0) -> None:
    """Write ``f0`` ... (even ones int64, odd ones strings), ``n0`` ... float64, and ``click`` int8."""
    generator = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, num_ids + 1, dtype=np.float64) ** -EXPONENT)
    cumulative /= cumulative[-1]
    texts = pa.array([f"{number:08x}" for number in generator.choice(1 << 32, num_ids, replace=False)])
    writer = None
    for start in range(0, num_rows, ROW_GROUP):
        count = min(ROW_GROUP, num_rows - start)
        columns: dict[str, Any] = {}
        for column, name in enumerate(ID_COLUMNS):
            ranks = np.searchsorted(cumulative, generator.random(count)).clip(max=num_ids - 1)
            ids = (ranks * 2_654_435_761 + column) % num_ids
            columns[name] = ids if column % 2 == 0 else texts.take(pa.array(ids))
        for name in NUMBER_COLUMNS:
            numbers = generator.lognormal(size=count)
            columns[name] = pa.array(numbers, mask=generator.random(count) < 0.05)
        columns["click"] = (generator.random(count) < 0.25).astype(np.int8)
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=ROW_GROUP)
    assert writer is not None
    writer.close()


def log_specs(path: Path, **resources: Any) -> tuple[DatasetSpec, JobSpec]:
    """Return the dataset of a log, and a job on it with these resources."""
    features: dict[str, Any] = {name: {"type": "id"} for name in ID_COLUMNS}
    features |= {name: {"type": "dense", "transform": "log1p"} for name in NUMBER_COLUMNS}
    dataset = {"name": "log", "uri": str(path), "features": features, "label": {"column": "click"}}
    job = {
        "name": "prepare",
        "dataset": {"name": "log"},
        "model": {"kind": "dcnv2", "embedding_dim": 16},
        "resources": resources,
        "evaluation": {"split": {"kind": "random", "validation": 0.1, "test": 0.1}},
    }
    return parse_dataset(dataset), parse_job(job)


def ours(path: Path) -> dict[str, Any]:
    """Prepare the log; return seconds by part."""
    dataset, job = log_specs(path, cpus_per_worker=len(os.sched_getaffinity(0)))
    last = _clocks()
    parts: dict[str, tuple[float, float]] = {}

    def log(message: str) -> None:
        nonlocal last
        now = _clocks()
        parts[message[:60]] = (round(now[0] - last[0], 2), round(now[1] - last[1], 2))
        last = now

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        prepare(dataset, job, Path(folder) / "data", log=log)
        log("on disk")
    return {"parts": {name: seconds for name, seconds in parts.items() if max(seconds) > 0.05}}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def polars(path: Path) -> dict[str, Any]:
    """Code all id columns by polars, column by column in one query."""
    import polars as pl

    strings = ID_COLUMNS[1::2]
    codes = [
        pl.col(name).cast(pl.Categorical).to_physical() if name in strings else pl.col(name).rank("dense")
        for name in ID_COLUMNS
    ]
    frame = pl.scan_parquet(path).select(codes).collect()
    assert frame.width == NUM_IDS
    return {}


CASES = {"ours": ours, "polars": polars}


def measured(case: str, path: Path) -> dict[str, Any]:
    """Run a case in this process; return its figures and its memory."""
    peak = {"VmRSS": 0, "RssAnon": 0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            for line in Path("/proc/self/status").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in peak:
                    peak[name] = max(peak[name], int(value.split()[0]) >> 10)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begin = _clocks()
    found = CASES[case](path)
    seconds, processor = (now - then for now, then in zip(_clocks(), begin, strict=True))
    done.set()
    watcher.join()
    times = {"seconds": round(seconds, 2), "processor_seconds": round(processor, 2)}
    return {"case": case, **times, **found, "peak_mib": peak["VmRSS"], "anonymous_mib": peak["RssAnon"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ids", type=int, default=500_000, help="distinct ids of each column")
    parser.add_argument("--case", choices=CASES, action="append", help="a case to measure (default: all)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the log is written, once for each size; default: temporary")
    parser.add_argument("--in-process", type=Path, help=argparse.SUPPRESS)
    options = parse(parser, rows=4_000_000)
    cases = options.case or list(CASES)
    if options.in_process is not None:
        print(json.dumps(measured(cases[0], options.in_process)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        path = folder / f"log-{options.rows}-{options.ids}.parquet"
        if not path.exists():
            write_log(path.with_suffix(".partial"), options.rows, options.ids)
            os.replace(path.with_suffix(".partial"), path)
        for _ in range(options.repeat):
            took = {}
            for case in cases:
                command = [sys.executable, "-m", "benchmarks.prepare", "--in-process", str(path), "--case", case]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found = json.loads(printed.splitlines()[-1])
                took[case] = found
                print(json.dumps({"rows": options.rows, **found}), flush=True)
            if len(took) == len(CASES):
                names = ("seconds", "processor_seconds")
                ratios = {name: round(took["ours"][name] / took["polars"][name], 2) for name in names}
                print(json.dumps({"case": "ratio", **ratios}), flush=True)


if __name__ == "__main__":
    main()
