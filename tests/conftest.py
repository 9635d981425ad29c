"""Fixtures that every test may use: where the real data sets are, hypothesis profiles, the list of allowed skips."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Triton reads it when it is imported: tests run its kernels by the interpreter; `make gpu-check` says 0, for the GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("full", max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# A skip for any other reason is a failure: a suite that quietly skips proves nothing.
ALLOWED_SKIPS = (
    "real data sets are not here",
    "no PostgreSQL at",
    "no Redis at",
    "no chromium",
    "mounting a tmpfs is not permitted",
    "needs a GPU",
)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of the real data sets (EVENKEEL_TEST_DATA, default ../shared/data); skips where it is missing."""
    folder = Path(os.environ.get("EVENKEEL_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "ml1m.parquet").exists():
        pytest.skip(f"real data sets are not here: {folder}")
    return folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """``ranks(world_size).run(function, *arguments)``: the function on each rank of a gloo pool (tests/pool.py)."""
    spec = importlib.util.spec_from_file_location("evenkeel_test_pool", ROOT / "tests" / "pool.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.pool
    module.close_all()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(f"skips: {len(skipped)}, all from the allow-list of tests/conftest.py")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(allowed in reason for allowed in ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} skipped for a reason that tests/conftest.py does not allow: {reason}"
