"""Cost of a network between two ranks: the same step in shared memory, over loopback, and between two hosts.

Hosts are namespaces of this machine that a pair of virtual links and a bridge connect (``tests.hosts.net``: root,
iproute2), so both share its processor, and a link costs only copies or, with a limit of ``tc``, its rate. Run from a
checkout. Each output line has the milliseconds of a step in case ``ranks`` of benchmarks.scaling, with its plan: 2
ranks of a thread each, all groups alive, in turns. ``sent_bytes`` is what a host's link counted in a step, headers
included, ``wire_ms`` the time that these bytes take at the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.harness import MIN_ITERATIONS, Workload, say

NUM_FEATURES, NUM_ROWS, DIM, BATCH_SIZE = 8, 200_000, 64, 4096
STEPS_AT_ONCE, WARM_UP = 5, 3
RANKS = 2
COUNTER = "/sys/class/net/eth0/statistics/tx_bytes"
UNLIMITED, LIMIT, LIMIT_BITS = "100gbit", "1gbit", 1e9


def serve_rank(rank: int, store: str, plan: str) -> None:
    """Train as one rank: for each line of standard input STEPS_AT_ONCE steps, whose seconds go to standard output."""
    from benchmarks.scaling import SummedTraining
    from benchmarks.sse import batches, rank_process
    from trainer.launch.worker import steady_memory

    told = sys.stdout
    sys.stdout = sys.stderr
    with rank_process(rank, RANKS, store):
        workload = Workload("zipf", NUM_FEATURES, NUM_ROWS, DIM, BATCH_SIZE)
        training, source = SummedTraining(workload, None, plan), batches(workload)
        with steady_memory():
            for _ in sys.stdin:
                ready = [next(source)[0] for _ in range(STEPS_AT_ONCE)]
                training.step_with_loss(ready[0])  # untimed: ranks wait for each other and warm their caches
                start = time.perf_counter()
                for batch in ready[1:]:
                    training.step_with_loss(batch)
                print((time.perf_counter() - start) / (len(ready) - 1), file=told, flush=True)


class Group:
    """Ranks on hosts, which wait for :meth:`step`."""

    def __init__(self, hosts: Sequence[Any], port: int, plan: str, **environment: str):
        self._ranks = [
            subprocess.Popen(
                host.command(
                    sys.executable, "-m", "benchmarks.hosts", "--rank", str(rank), "--plan", plan,
                    "--store", f"tcp://{hosts[0].address}:{port}",
                    PYTHONPATH=str(Path(__file__).resolve().parents[1]), **environment,
                ),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip

    def step(self) -> float:
        """Return the milliseconds of a step on the slower rank."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("\n")
        return 1e3 * max(float(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


@contextlib.contextmanager
def groups(plan: str) -> Iterator[tuple[Any, dict[str, Group]]]:
    """Yield two hosts, and a dict from name to the group on these hosts."""
    from tests.hosts.net import network

    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-", dir="/tmp") as folder:
        with network(Path(folder), "one", "other") as net, contextlib.ExitStack() as ends:
            here, there = net["one"], net["other"]
            found = {
                "shared memory": Group((here, here), 29500, plan),
                "loopback": Group((here, here), 29501, plan, EVENKEEL_HOST_MEMORY="0"),
                "hosts": Group((here, there), 29502, plan),
            }
            for group in found.values():
                ends.callback(group.close)
            yield net, found


def measure(plan: str, iterations: int) -> list[dict[str, Any]]:
    """Print and return the lines of a plan."""
    names = ["shared memory", "loopback", "hosts", f"hosts, {LIMIT}"]
    times, sent = np.empty((iterations, len(names))), []
    with groups(plan) as (net, found):
        for i in range(-WARM_UP, iterations):
            for j in range(len(names)):
                j = (i + j) % len(names)
                limited = names[j].endswith(LIMIT)
                net.limit(LIMIT if limited else UNLIMITED)
                before = _counted(net)
                taken = found["hosts" if limited else names[j]].step()
                if i >= 0:
                    times[i, j] = taken
                    sent += [(_counted(net) - before) / STEPS_AT_ONCE] * limited
    num_bytes = float(np.median(sent))
    wire_ms = 1e3 * 8 * num_bytes / LIMIT_BITS
    lines = []
    for j, name in enumerate(names):
        low, middle, high = np.percentile(times[:, j], [25, 50, 75])
        lines.append(
            say({
                "bench": "hosts", "case": f"{plan} {name}", "ms": round(middle, 2), "iqr_ms": round(high - low, 2),
                "best_ms": round(float(times[:, j].min()), 2),
                "times_loopback": round(float(np.median(times[:, j] / times[:, 1])), 2),
                "sent_bytes": round(num_bytes) if "hosts" in name else 0,
                "wire_ms": round(wire_ms, 2) if name.endswith(LIMIT) else None, "iterations": iterations,
            })
        )  # fmt: skip
    return lines


def _counted(net: Any) -> int:
    return int(net["one"].run("cat", COUNTER).stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=21)
    parser.add_argument("--plan", default="row_wise", help="sharding of the tables, or planner")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        serve_rank(options.rank, options.store, options.plan)
    elif options.iterations < MIN_ITERATIONS:
        parser.error(f"a median of {options.iterations} is not reliable: take at least {MIN_ITERATIONS}")
    else:
        measure(options.plan, options.iterations)
