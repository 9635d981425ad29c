"""Preparation by tasks on one and on two simulated hosts: nodes of a real Ray cluster, each pinned to one processor.

The log of ``benchmarks.prepare`` is prepared by a driver and a Ray node on processor 0, then by the same driver with a
second node on processor 1 (``taskset``). The two hosts share this machine's disk, memory bus and operating system, and
exchange results through one directory, so no network is measured. Needs two processors and a checkout. One JSON object
per line:

=====================  ==========================================================================================
``seconds``            from the specs to the prepared data on disk, without the start of Ray
``leader_seconds``     processor seconds of the driver
``host_seconds``       processor seconds of each node's processes meanwhile
``ratio``              seconds with one host / seconds with two
``processor_ratio``    the same for processor seconds of leader + busiest host, which other programs hardly change
=====================  ==========================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.prepare import log_specs, write_log
from benchmarks.support.harness import parse
from trainer.data.prepare.encode import SPAN_ROWS


class _Measured:
    """The hosts of a run, with the processor seconds of their processes."""

    def __init__(self, hosts: Any, nodes: Sequence[int]):
        self._hosts, self._nodes = hosts, nodes
        self.storage, self.threads = hosts.storage, hosts.threads
        self.seconds: list[float] = []
        self.began = 0.0

    @contextlib.contextmanager
    def runner(self, setting: Any, log: Callable[[str], Any]) -> Iterator[Any]:
        with self._hosts.runner(setting, log) as runner:
            self.began = time.perf_counter()
            before = [_processor_seconds(node) for node in self._nodes]
            yield runner
            self.seconds = [_processor_seconds(node) - then for node, then in zip(self._nodes, before, strict=True)]


def _processor_seconds(pid: int) -> float:
    node = psutil.Process(pid)
    total = 0.0
    for process in [node, *node.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def lead(directory: Path, span_rows: int, nodes: Sequence[int]) -> dict[str, Any]:
    """Prepare like the driver of a run in ``directory``."""
    from trainer.data.prepare.by_tasks import assembly
    from trainer.data.prepare.preparation import prepare
    from trainer.launch.tasks_on_ray import HostsOfCluster
    from trainer.runs.directory import read_run

    assembly.SPAN_ROWS = span_rows
    run = read_run(directory)
    hosts = _Measured(HostsOfCluster(run), nodes)
    processor = time.process_time()
    prepare(run.dataset, run.job, run.data, threads=1, hosts=hosts, log=lambda message: print(message, file=sys.stderr))
    return {
        "seconds": round(time.perf_counter() - hosts.began, 1),
        "leader_seconds": round(time.process_time() - processor, 1),
        "host_seconds": [round(one, 1) for one in hosts.seconds],
    }


def measured(path: Path, num_hosts: int, span_rows: int) -> dict[str, Any]:
    """Prepare the log on a cluster of ``num_hosts`` nodes."""
    from tests.support.ray_cluster import Cluster
    from trainer.runs.directory import write_run

    dataset, job = log_specs(path, num_workers=2, cpus_per_worker=1)
    cluster = Cluster()
    cluster.environment["EVENKEEL_CACHE"] = str(path.parent / "cache")
    try:
        cluster.start_head(num_cpus=0)
        # A single node claims two CPUs, since preparation uses no tasks with one; it is still pinned to one processor.
        nodes = [cluster.start_node(num_cpus=2 if num_hosts == 1 else 1).pid for _ in range(num_hosts)]
        for processor, node in enumerate(nodes):
            for process in [psutil.Process(node), *psutil.Process(node).children(recursive=True)]:
                subprocess.run(["taskset", "-acp", str(processor), str(process.pid)], check=True, capture_output=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            run = write_run(
                Path(folder) / "run",
                run_id="hosts",
                job=job,
                dataset=dataset,
                store_url=f"{folder}/store",
                ray_address=f"127.0.0.1:{cluster.port}",
            )
            command = [
                "taskset",
                "-c",
                "0",
                sys.executable,
                "-m",
                "benchmarks.prepare_hosts",
                "--lead",
                str(run),
                str(span_rows),
            ]
            done = subprocess.run(
                [*command, *map(str, nodes)], env=cluster.environment, check=True, stdout=subprocess.PIPE, text=True
            )
    finally:
        cluster.stop()
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ids", type=int, default=500_000, help="distinct ids of each column")
    parser.add_argument("--folder", type=Path, help="where the log is written, once for each size; default: temporary")
    parser.add_argument("--span-rows", type=int, default=SPAN_ROWS, help="rows that a task reads")
    parser.add_argument("--lead", nargs="+", help=argparse.SUPPRESS)
    options = parse(parser, rows=4_000_000)
    if options.lead is not None:
        print(json.dumps(lead(Path(options.lead[0]), int(options.lead[1]), [int(pid) for pid in options.lead[2:]])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        path = (options.folder or Path(temporary)) / f"log-{options.rows}-{options.ids}.parquet"
        if not path.exists():
            write_log(path.with_suffix(".partial"), options.rows, options.ids)
            os.replace(path.with_suffix(".partial"), path)
        found = {}
        for num_hosts in (1, 2):
            found[num_hosts] = measured(path, num_hosts, options.span_rows)
            print(json.dumps({"hosts": num_hosts, "rows": options.rows, **found[num_hosts]}), flush=True)
        busiest = {number: one["leader_seconds"] + max(one["host_seconds"]) for number, one in found.items()}
        ratios = found[1]["seconds"] / found[2]["seconds"], busiest[1] / busiest[2]
        print(json.dumps({"ratio": round(ratios[0], 2), "processor_ratio": round(ratios[1], 2)}), flush=True)


if __name__ == "__main__":
    main()
