"""make gpu-check: tests and benchmarks on the GPU of this machine, in stages; writes docs/gpu/NAME.json after each.

Needs a CUDA GPU and a Python that pyproject.toml admits, with numpy, psutil, pytest, hypothesis, triton and torch for
CUDA, whatever their versions: they are recorded. Run it from the repository; Evenkeel does not have to be installed.
If FBGEMM for CUDA is installed, it is timed as a peer and its module is tested as a backend. If Evenkeel's dependencies
are installed, whole jobs are tested; else the report says what was missing (:mod:`benchmarks.gpu.suites`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.suites import BEYOND_THE_KERNEL, KERNEL, run_suite

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("numpy", "torch", "triton", "pytest", "hypothesis", "psutil")
PACKAGES = (*NEEDED, "fbgemm-gpu", "torchrec")
STAGES = ("tests", "suites", "lookups", "updates", "steps", "train_steps", "profile", "tuning")


def missing() -> list[str]:
    """Return a sentence on the requirements that this machine lacks."""
    lacking = [f"the Python package {name}" for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        return lacking
    # Imported only here, after the check that it is installed.
    import torch

    if torch.version.cuda is None:
        return [f"a build of torch for CUDA (torch {torch.__version__} is for the CPU)"]
    return [] if torch.cuda.is_available() else ["a GPU that torch can use"]


def commit() -> str:
    """Return the commit of the repository; empty if this folder is not a repository."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Report:
    """The results of the stages, written to disk after each result."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[str, Any] = {**head, "stages": {}, "lines": []}

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def add(self, stage: str, lines: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Run a part of a stage; record a failure and continue with the next part."""
        outcomes = self.found["stages"]
        try:
            for one in lines():
                self.found["lines"].append(one)
                self.write()
            outcomes.setdefault(stage, "passed")
        except Exception as error:
            traceback.print_exc()
            outcomes[stage] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        self.write()


def run_stages(report: Report, stages: Iterable[str], case_name: str, rounds: int) -> None:
    """Run ``stages`` in their order."""
    import torch

    from benchmarks.gpu import kernels, profile, timing, train_step, tuning

    copy = timing.copy_bandwidth()
    report.found["copy_gb_per_second"] = round(copy / 1e9, 1)
    cases = [case for case in kernels.CASES if case_name in str(case)]
    for stage in STAGES:
        if stage not in stages:
            continue
        if stage == "tests":
            report.found["tests"] = run_suite(KERNEL)
            report.found["stages"][stage] = report.found["tests"]["outcome"]
            report.write()
        elif stage == "suites":
            report.found["suites"] = {name: run_suite(suite) for name, suite in BEYOND_THE_KERNEL.items()}
            outcomes = {suite["outcome"] for suite in report.found["suites"].values()}
            report.found["stages"][stage] = "failed" if "failed" in outcomes else "passed"
            report.write()
        elif stage == "tuning":
            tuning.warm_all(cases)
            for case in cases:
                report.add(stage, partial(tuning.tuned, case, rounds))
                torch.cuda.empty_cache()
        else:
            others = {"train_steps": train_step.train_steps, "profile": profile.profile}
            bench: Callable[..., Any] = others.get(stage) or kernels.BENCHES[stage]
            for case in cases:
                arguments = (case, rounds) if stage in others else (case, copy, rounds)
                report.add(stage, partial(bench, *arguments))
                torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of eight inputs each")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGES,
        default=STAGES[:-2],
        help="default: all but the last two",
        metavar="STAGE",
    )
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

    from benchmarks.support.harness import versions

    name = torch.cuda.get_device_name()
    path = options.out or ROOT / "docs" / "gpu" / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")
    head = {
        "gpu": name, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit(),
        "versions": versions(PACKAGES) | {"cuda": str(torch.version.cuda)},
        "num_gpus": torch.cuda.device_count(),
    }  # fmt: skip
    report = Report(path, head)
    run_stages(report, options.stages, options.case, options.rounds)
    outcomes = report.found["stages"]
    print(f"gpu-check: {path}: {', '.join(f'{stage} {outcome}' for stage, outcome in outcomes.items())}")
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
