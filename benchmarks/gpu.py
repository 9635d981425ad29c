"""make gpu-check: tests and benchmarks of the Triton kernel on the GPU of this machine; writes docs/gpu/NAME.json.

Needs a CUDA GPU and a Python (3.11 or later) with numpy, pytest, hypothesis, torch for CUDA and triton, whatever their
versions: they are recorded. Nothing of Evenkeel need be installed: run it from the repository. Lines are those of
:mod:`benchmarks.gpu_kernels`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("numpy", "torch", "triton", "pytest", "hypothesis")
PACKAGES = (*NEEDED, "fbgemm-gpu")
TESTS = "tests/embeddings/test_triton.py"


def missing() -> list[str]:
    """What this machine lacks, in words."""
    lacking = [f"the Python package {name}" for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return lacking
    # Imported where it is known to be there: that it is not is to be said in words.
    import torch

    if torch.version.cuda is None:
        return [f"a build of torch for CUDA (torch {torch.__version__} is for the CPU)"]
    return [] if torch.cuda.is_available() else ["a GPU that torch can use"]


def run_tests() -> dict[str, Any]:
    """The kernel tests on the GPU, in a process of their own."""
    # Without the repository's pytest settings: they name plugins and make warnings of other versions errors.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)]
    # What kernels compile to is tested against the locked version of Triton, not against this machine's.
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-k", "not compiles", TESTS]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    return {"passed": done.returncode == 0, "counts": counts}


def versions() -> dict[str, str]:
    """Python, packages that matter, CUDA."""
    import torch

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the repository, as far as it is one."""
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

    from benchmarks import gpu_kernels

    name = torch.cuda.get_device_name()
    path = options.out or ROOT / "docs" / "gpu" / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")
    report: dict[str, Any] = {
        "gpu": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(), "versions": versions(),
        "tests": run_tests(), "lines": [],
    }  # fmt: skip
    if report["tests"]["passed"]:
        copy = gpu_kernels.copy_bandwidth()
        report["copy_gb_per_second"] = round(copy / 1e9, 1)
        for case in gpu_kernels.CASES:
            if options.case in str(case):
                for bench in (gpu_kernels.lookups, gpu_kernels.updates):
                    report["lines"] += bench(case, copy, options.iterations)
                    torch.cuda.empty_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"gpu-check: {path}", "" if report["tests"]["passed"] else "(tests failed: nothing was timed)")
    return 0 if report["tests"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
