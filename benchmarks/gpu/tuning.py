"""Choice of tile sizes for the Triton kernel: times of lookups and updates for each tiling.

Kernels of every way are compiled first, in parallel processes: `--warm I N` is the I-th of N.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kernels import CASES, INPUT_SETS, NUM_STEPS, Case, build, call, sampler, train, updating
from benchmarks.gpu.timing import DEVICE, interleave
from embeddings.kernels.triton.kernel import SPLIT, TILING
from embeddings.optim import SGD, AdamAR

ROOT = Path(__file__).resolve().parents[2]
WAYS = [
    {"elements": TILING.elements, "moving": TILING.moving, "rows": TILING.rows, "entries": TILING.entries}
    | {"warps": TILING.warps, "split": SPLIT}
    | change
    for change in (
        {}, {"warps": 2}, {"warps": 8}, {"elements": 512, "moving": 256}, {"elements": 2048, "moving": 1024},
        {"elements": 2048, "moving": 1024, "rows": 128, "warps": 8}, {"elements": 512, "moving": 256, "warps": 2},
        {"entries": 32}, {"entries": 128}, {"split": 8}, {"split": 32},
    )
]  # fmt: skip
SMALL_ROWS = 1000


def tile(tables: Any, way: dict[str, int]) -> None:
    tables._kernel.tiling = TILING._replace(**{name: value for name, value in way.items() if name != "split"})
    tables._kernel.split = way["split"]


def warm(cases: list[Case], index: int, count: int) -> None:
    """Compile the kernels of every ``count``-th way and case, on small tables."""
    alike = {(case.num_tables, case.dim, case.length): case for case in cases}
    for number, (case, way) in enumerate(itertools.product(alike.values(), WAYS)):
        if number % count == index:
            small = dataclasses.replace(case, num_rows=SMALL_ROWS)
            draw = sampler(small)
            for optimizer in (SGD(0.1), AdamAR(1e-3, alpha=1e-5)):
                tables = build(small, optimizer)
                tile(tables, way)
                train(tables, draw, 2)


def warm_all(cases: list[Case]) -> None:
    """Compile all of :data:`WAYS`, on every CPU."""
    count = max(1, (os.cpu_count() or 1) - 2)
    command = [sys.executable, "-m", "benchmarks.gpu.tuning", "--cases", *[str(case) for case in cases], "--warm"]
    running = [subprocess.Popen([*command, str(i), str(count)], cwd=ROOT) for i in range(count)]
    # Wait for all before a failure is raised.
    codes = [each.wait() for each in running]
    if any(codes):
        raise RuntimeError("a process that compiled the kernels of some ways of tiling failed: its error is above")


def tuned(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield an output line for each tiling: milliseconds of a plain lookup, and of AdamAR's lookup and update."""
    draw = sampler(case)
    inputs = [draw() for _ in range(INPUT_SETS)]
    grad = 1e-3 * torch.randn(case.batch_size, case.num_tables * case.dim, device=DEVICE)
    plain, tables = build(case, SGD(0.1)), build(case, AdamAR(1e-3, alpha=1e-5))
    train(tables, draw, NUM_STEPS)
    for way in WAYS:
        tile(plain, way)
        tile(tables, way)
        lookups = interleave({"plain": call(plain), "training": call(tables)}, inputs, rounds)
        update = interleave({"ours": updating(tables, grad)}, inputs, rounds, prepare={"ours": call(tables)})["ours"]
        found = {
            "bench": "tuning", "case": str(case), **way,
            "plain_ms": round(lookups["plain"].median, 4), "training_ms": round(lookups["training"].median, 4),
            "update_ms": round(update.median, 4),
        }  # fmt: skip
        print(json.dumps(found), flush=True)
        yield found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--warm", nargs=2, type=int)
    options = parser.parse_args()
    warm([case for case in CASES if str(case) in options.cases], *options.warm)
