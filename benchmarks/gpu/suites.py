"""Tests that need a GPU, each run by `python -m benchmarks.gpu` in its own process, and their outcomes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
_FBGEMM = (
    "import torch, fbgemm_gpu\n"
    "torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2, dtype=torch.int32, device='cuda'))\n"
    # The other contract suites in their folder are of stores.
    "import pyarrow, redis\n"
)


@dataclass(frozen=True)
class Suite:
    """``arguments`` of pytest; ``probe``: code that fails if the tests' imports are not installed.

    ``is_parallel``: True to run tests in parallel, if pytest-xdist is installed.
    """

    arguments: tuple[str, ...]
    probe: str = ""
    is_parallel: bool = False


KERNEL = Suite(
    # Tests of compiled code need the locked version of Triton, not this machine's.
    ("-k", "not compiles", "tests/embeddings/kernels/test_triton.py"),
    is_parallel=True,
)
BEYOND_THE_KERNEL = {
    "fbgemm_module": Suite(
        (
            "-k",
            "fbgemm_held or fbgemm_cached or test_fbgemm_module",
            "tests/contracts/test_embedding_kernel.py",
            "tests/embeddings/kernels/test_fbgemm_module.py",
        ),
        _FBGEMM,
    ),
    "jobs": Suite(
        ("tests/trainer/launch/test_on_gpu.py",),
        _FBGEMM + "import trainer.launch.driver, trainer.launch.on_host, trainer.launch.worker",
    ),
}


def run_suite(suite: Suite) -> dict[str, Any]:
    """Run a suite of tests and return its outcomes.

    Returns:
        ``outcome``: passed, failed or skipped, as a whole; ``reason`` where it was skipped; ``counts`` by outcome;
        ``cases``: the outcome of each test, with the reason unless it passed.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    probed = subprocess.run(
        [sys.executable, "-c", suite.probe], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if probed.returncode:
        lines = probed.stderr.strip().splitlines() or [f"exit code {probed.returncode}"]
        return {"outcome": "skipped", "reason": f"a requirement is missing: {lines[-1]}"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Without the repository's pytest settings: they name plugins and make warnings of other versions errors.
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT)]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *suite.arguments]
        if suite.is_parallel and importlib.util.find_spec("xdist"):
            # Most of their time they compile kernels.
            command += ["-n", str(os.cpu_count())]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
        cases = _cases(report) if report.exists() else {}
    counts = Counter(outcome.partition(":")[0] for outcome in cases.values())
    if done.returncode or not cases:
        return {"outcome": "failed", "counts": dict(counts), "cases": cases}
    if not counts["passed"]:
        reasons = {outcome.partition(": ")[2] for outcome in cases.values()}
        return {"outcome": "skipped", "reason": "; ".join(sorted(reasons)), "counts": dict(counts), "cases": cases}
    return {"outcome": "passed", "counts": dict(counts), "cases": cases}


def _cases(report: Path) -> dict[str, str]:
    """Return outcomes by file and name of the test, from pytest's own report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = "passed"
        for kind, word in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            problem = case.find(kind)
            if problem is not None:
                outcome = f"{word}: {' '.join((problem.get('message') or '').split())[:300]}"
        found[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = outcome
    return found
