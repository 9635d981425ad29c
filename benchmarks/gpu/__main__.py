"""make gpu-check: tests and benchmarks on the GPU of this machine; writes docs/gpu/NAME.json.

Needs a CUDA GPU and a Python (3.11 or later) with numpy, psutil, pytest, hypothesis, triton and torch for CUDA,
whatever their versions: they are recorded. Nothing of Evenkeel need be installed: run it from the repository. Where
FBGEMM for CUDA is, its module is tested as a backend, and where Evenkeel's dependencies are, whole jobs; else it says
what was missing (:mod:`benchmarks.gpu.suites`). Lines are those of :mod:`benchmarks.gpu.kernels`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.suites import BEYOND_THE_KERNEL, KERNEL, run_suite

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("numpy", "torch", "triton", "pytest", "hypothesis", "psutil")
PACKAGES = (*NEEDED, "fbgemm-gpu")


def missing() -> list[str]:
    """Return what this machine lacks, in words."""
    lacking = [f"the Python package {name}" for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return lacking
    # Imported where it is known to be there: that it is not is to be said in words.
    import torch

    if torch.version.cuda is None:
        return [f"a build of torch for CUDA (torch {torch.__version__} is for the CPU)"]
    return [] if torch.cuda.is_available() else ["a GPU that torch can use"]


def versions() -> dict[str, str]:
    """Return the versions of Python, the packages that matter, and CUDA."""
    import torch

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of the repository, as far as it is one."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=31)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, help="file to write (default: docs/gpu/NAME.json, NAME being the GPU's)")
    options = parser.parse_args()
    lacking = missing()
    if lacking:
        print(
            f"gpu-check: this machine lacks {', '.join(lacking)}. Nothing was tested and nothing written. It needs a "
            f"CUDA GPU, and a Python with {', '.join(NEEDED)} that can use it: "
            "make gpu-check GPU_PYTHON=/path/to/python",
            file=sys.stderr,
        )
        return 1
    import torch

    from benchmarks.gpu import kernels

    name = torch.cuda.get_device_name()
    path = options.out or ROOT / "docs" / "gpu" / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")
    report: dict[str, Any] = {
        "gpu": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(), "versions": versions(),
        "num_gpus": torch.cuda.device_count(), "tests": run_suite(KERNEL),
        "suites": {name: run_suite(suite) for name, suite in BEYOND_THE_KERNEL.items()}, "lines": [],
    }  # fmt: skip
    tested = report["tests"]["outcome"] == "passed"
    if tested:
        copy = kernels.copy_bandwidth()
        report["copy_gb_per_second"] = round(copy / 1e9, 1)
        for case in kernels.CASES:
            if options.case in str(case):
                for bench in (kernels.lookups, kernels.updates):
                    report["lines"] += bench(case, copy, options.iterations)
                    torch.cuda.empty_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    outcomes = {name: suite["outcome"] for name, suite in {"tests": report["tests"], **report["suites"]}.items()}
    said = ", ".join(f"{name} {outcome}" for name, outcome in outcomes.items())
    print(f"gpu-check: {path}: {said}{'' if tested else '; nothing was timed'}")
    return 1 if not tested or "failed" in outcomes.values() else 0


if __name__ == "__main__":
    sys.exit(main())
