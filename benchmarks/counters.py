"""What the compiled kernels execute: instructions, simulated branches that go wrong and cache misses, by callgrind.

Counts do not depend on what else the machine does, and need no hardware counters, which guests often lack; they need
valgrind. It knows no AVX-512, so the kernels are compiled for Haswell (vectors of 8 floats): a row of 64 takes 8
vectors where AVX-512 takes 4. Prefetches are ignored, so a miss is a line that has to come from beyond a cache, in time
or not: ``d1`` beyond 48 KB, ``ll`` beyond 32 MB, both cold but for one step before. Counts for each row and id are of
compiled code, ``around_instructions`` those of interpreter, torch and autograd. One thread, one step of each case.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from benchmarks.harness import Workload
from embeddings.config import SSEConfig, TableConfig
from embeddings.optim import SGD, AdamAR, RowOptimizer
from embeddings.tables import EmbeddingTables

# What valgrind's processor can do.
TARGET = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt,+f16c"}
CACHES = ("--D1=49152,12,64", "--LL=33554432,16,64")
# valgrind/callgrind.h
_BASE = (ord("C") << 24) | (ord("T") << 16)
ZERO, DUMP_AT, START, STOP = _BASE + 1, _BASE + 3, _BASE + 4, _BASE + 5
# Events of callgrind, and what they are called here.
EVENTS = {"Ir": "instructions", "Bc": "branches", "Bcm": "mispredicted", "D1m": "d1", "DLm": "ll"}
WARM_STEPS = 3

binding.initialize_native_asmparser()


@intrinsic
def _emit_request(typingctx, words):  # type: ignore[no-untyped-def]
    """Valgrind's magic instructions: elsewhere they do nothing."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [data.type, word])
        code = "rolq $$3, %rdi; rolq $$13, %rdi; rolq $$61, %rdi; rolq $$51, %rdi; xchgq %rbx, %rbx"
        return builder.asm(kind, code, "={rdx},{rax},0,~{cc},~{memory}", [data, word(0)], True)

    return types.int64(words), emit


@njit
def _request(words):  # type: ignore[no-untyped-def]
    return _emit_request(words)


def request(number: int, text: bytes = b"") -> None:
    """Asks callgrind for something; without it nothing happens."""
    held = np.frombuffer(text + b"\0", dtype=np.uint8)
    _request(np.array([number, held.ctypes.data, 0, 0, 0, 0], dtype=np.uint64))


def tables_of(workload: Workload, optimizer: RowOptimizer, sse: bool = False) -> EmbeddingTables:
    configs = [TableConfig(f"t{t}", workload.num_rows, workload.dim, (f"f{t}",)) for t in range(workload.num_tables)]
    swaps = {f"f{t}": SSEConfig(0.01) for t in range(workload.num_tables)} if sse else {}
    return EmbeddingTables(configs, optimizer, sse=swaps)


def cases(workload: Workload) -> Iterator[tuple[str, Callable[[Any], Callable[[], Any]], EmbeddingTables]]:
    """For each its name and what makes, of a batch, the call that is counted."""
    grad = 1e-2 * torch.randn(workload.batch_size, workload.num_tables * workload.dim)
    lazy = AdamAR(1e-3, alpha=1e-5, moments="lazy")

    def lookup(tables: EmbeddingTables) -> Callable[[Any], Callable[[], Any]]:
        return lambda given: lambda: tables(*given)

    def update(tables: EmbeddingTables, part: str) -> Callable[[Any], Callable[[], Any]]:
        def make(given: Any) -> Callable[[], Any]:
            if part == "backward":
                output = tables(*given)
                return lambda: output.backward(grad)
            tables(*given).backward(grad)
            if part == "sort":
                return lambda: tables._kernel._entries(tables._records)  # type: ignore[attr-defined]
            return lambda: tables.step(tables.completed_steps + 1)

        return make

    for name, optimizer in {"plain": SGD(0.1), "adam_ar lazy": lazy, "adam_ar dense": AdamAR(1e-3, alpha=1e-5)}.items():
        tables = tables_of(workload, optimizer)
        for _ in range(WARM_STEPS):
            tables(*workload.sampler(1)()).backward(grad)
            tables.step(tables.completed_steps + 1)
        # As after many steps: no row has been idle for long, so that dense moments are read with every row.
        tables.layout.last_steps.fill_(tables.completed_steps)
        yield f"lookup {name}", lookup(tables), tables
        if name != "plain":
            for part in ("backward", "sort", "sort and update"):
                yield f"{part} {name}", update(tables, part), tables
    swapping = tables_of(workload, SGD(0.1), sse=True)
    yield "lookup plain, SSE", lookup(swapping), swapping


def count(workload: Workload) -> None:
    """Runs each case once before it is counted once, on fresh ids."""
    torch.set_num_threads(1)
    draw = workload.sampler()
    for name, make, tables in cases(workload):
        # Compiled, and loaded, before anything is counted.
        make(draw())()
        tables.discard()
        before, given = make(draw()), draw()
        request(START)
        before()
        request(STOP)
        tables.discard()
        rows = sum(len(torch.unique(ids)) for ids in given[0].view(workload.num_tables, -1))
        call = make(given)
        request(START)
        request(ZERO)
        call()
        request(DUMP_AT, json.dumps({"case": name, "rows": rows}).encode())
        request(STOP)
        tables.discard()


def totals(dump: Path) -> tuple[dict[str, Any], dict[str, dict[str, int]]]:
    """The case of a dump of callgrind, and its counts in compiled code (of no object file) and around it."""
    case: dict[str, Any] = {}
    events: list[str] = []
    names: dict[str, str] = {}
    found = {where: dict.fromkeys(EVENTS.values(), 0) for where in ("compiled", "around")}
    where, inclusive = "around", False
    for row in dump.read_text().splitlines():
        key, equals, value = row.partition("=")
        if row.startswith("desc: Trigger:"):
            case = json.loads(row[row.index("{") : row.rindex("}") + 1])
        elif row.startswith("events:"):
            events = row.split()[1:]
        elif equals and key == "ob":
            number, _, name = value.partition(" ")
            names[number] = name or names.get(number, "")
            where = "compiled" if names[number] == "???" else "around"
        elif equals and key == "cob":
            number, _, name = value.partition(" ")
            names[number] = name or names.get(number, "")
        elif equals and key == "calls":
            inclusive = True
        elif events and row[:1] in "+-*0123456789" and row:
            if not inclusive:
                for event, cost in zip(events, map(int, row.split()[1:]), strict=False):
                    plain = {"D1mr": "D1m", "D1mw": "D1m", "DLmr": "DLm", "DLmw": "DLm"}.get(event, event)
                    if plain in EVENTS:
                        found[where][EVENTS[plain]] += cost
            inclusive = False
    return case, found


def run(workload: Workload) -> None:
    """Compiles for valgrind's processor, counts, and prints a line for each case."""
    environment = {**os.environ, **TARGET, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.counters", "--child", str(workload)]
    subprocess.run(command, env=environment, check=True)
    with tempfile.TemporaryDirectory(prefix="evenkeel-counters-") as folder:
        out = Path(folder) / "out"
        tool = [
            "valgrind",
            "--tool=callgrind",
            "-q",
            "--instr-atstart=no",
            "--cache-sim=yes",
            "--branch-sim=yes",
            *CACHES,
        ]
        subprocess.run([*tool, f"--callgrind-out-file={out}", *command], env=environment, check=True)
        ids = workload.num_tables * workload.batch_size
        for dump in sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:])):
            case, found = totals(dump)
            if not case:
                continue
            line = {"bench": "counters", "workload": str(workload), **case, "ids": ids}
            line["per_id"] = {name: round(number / ids, 3) for name, number in found["compiled"].items()}
            line["per_row"] = {name: round(number / case["rows"], 3) for name, number in found["compiled"].items()}
            line["around_instructions"] = found["around"]["instructions"]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, *shape = options.child.split()
        count(Workload(kind, *(int(part[1:]) for part in shape)))
    elif shutil.which("valgrind") is None:
        print(json.dumps({"bench": "counters", "skipped": "no valgrind here: install it to count instructions"}))
    else:
        for kind in ("zipf", "uniform"):
            run(Workload(kind, 8, options.rows, options.dim, 4096))
