"""Our tables under TorchRec's DistributedModelParallel and its pipeline on one GPU, compared with TorchRec's.

`python -m benchmarks.gpu.torchrec --device cuda --out FILE`. Needs only torch, torchrec, fbgemm_gpu, triton and numpy:
it has its own copy of the few lines of :mod:`trainer` that wrap a model. FILE is written after each check, with the end
of the traceback if the check failed. `--device cpu` is for trying it out, with few rows.

* ``one_rank``: AdamAR and SSE, tables whole, by gloo and by NCCL: rows and state end as those of plain torch on the
  CPU without TorchRec; they are the same bits in a second run and in TrainPipelineSparseDist.
* ``two_ranks``: two ranks on this GPU, by gloo, tables whole or split by row: rows and state end as on one rank.
* ``steps``: whole steps in TrainPipelineSparseDist, ours and TorchRec's with FBGEMM's fused optimizer, interleaved in
  one process. ``ratio`` is our time for a step over theirs; ``thread_ms`` is the processor time that the thread of the
  loop takes for one (waiting for the device included), ``process_ms`` that of all threads (backward has its own).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fbgemm_gpu
import torch
import torch.multiprocessing

from benchmarks.gpu.torchrec.results import one_rank, two_ranks
from benchmarks.gpu.torchrec.steps import CASES, WARM_STEPS, steps
from benchmarks.gpu.torchrec.training import last_lines, quiet

CHECKS = ("one_rank", "two_ranks", "steps")


def versions() -> dict[str, str]:
    """Return the packages' own ``__version__``: they may not be installed under their names."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("torch", "torchrec", "triton", "numpy"):
        with contextlib.suppress(ImportError):
            found[package] = str(importlib.import_module(package).__version__)
    found["fbgemm"] = f"{fbgemm_gpu.__version__} {getattr(fbgemm_gpu, '__variant__', '')}".strip()
    return found


def plan_of(options: Any) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield (name, check) of each requested check."""
    if "one_rank" in options.only:
        for process_group in ("gloo", "nccl") if options.where.type == "cuda" else ("gloo",):
            yield f"one_rank {process_group}", partial(one_rank, options, process_group)
    if "two_ranks" in options.only:
        yield "two_ranks gloo", partial(two_ranks, options)
    if "steps" in options.only:
        for case in CASES:
            sized = replace(case, num_rows=options.rows or case.num_rows, batch_size=options.batch or case.batch_size)
            yield f"steps {sized}", partial(steps, options, sized)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("triton", "cpu", "reference"), help="default: the device's own")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS)
    parser.add_argument("--steps", type=int, default=30, help="steps of check one_rank")
    parser.add_argument("--small-rows", type=int, default=2000, help="rows where results are compared")
    parser.add_argument("--small-batch", type=int, default=256)
    parser.add_argument("--rows", type=int, default=0, help="rows of a table where steps are timed")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-steps", type=int, default=20)
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    quiet()
    options.where = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    if options.where.type == "cuda":
        torch.cuda.set_device(options.where)
    for library in ("GLOO", "NCCL"):
        # All ranks are on this machine, so loopback is enough.
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "versions": versions(), "checks": {},
    }  # fmt: skip
    for name, check in plan_of(options):
        began = time.perf_counter()
        try:
            found = check()
        except Exception:
            found = {"passed": False, "failed": last_lines()}
        found["seconds"] = round(time.perf_counter() - began, 1)
        report["checks"][name] = found
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({name: found}), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return 0 if all(found["passed"] for found in report["checks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
