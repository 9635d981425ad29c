"""Fixtures that every test may use: where the real data sets are, hypothesis profiles, the list of allowed skips."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Tests are collected by path (importmode importlib): what all of them share needs this to be importable.
sys.path.insert(0, str(Path(__file__).parent))

from ray_cluster import PATIENCE  # noqa: E402

# Triton reads it when it is imported: tests run its kernels by the interpreter; `make gpu-check` says 0, for the GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Ray starts its workers at niceness 15: on a machine with other work at 0 a run never gets to its first step.
os.environ.setdefault("RAY_worker_niceness", "0")
for _name, _value in PATIENCE.items():
    os.environ.setdefault(_name, _value)
# libgomp reads it when torch is imported. Threads that wait for one another spin by default: where the other half of
# the suite has the CPU they wait for, a step of a few rows takes tens of milliseconds of both.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
    "no promtool",
    "mounting a tmpfs is not permitted",
    "needs a GPU",
    "no environment with Feast",
    "DeepCTR-Torch is not installed",
    "the temporary directory is in memory",
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
    module = _module("pool")
    yield module.pool
    module.close_all()


def _module(name: str) -> Any:
    """A helper beside this file: tests are no package that it could be imported from."""
    spec = importlib.util.spec_from_file_location(f"evenkeel_test_{name}", ROOT / "tests" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def ray_clusters() -> Any:
    """The module tests/ray_cluster.py: ``Cluster`` is a real one, in token mode."""
    return _module("ray_cluster")


@pytest.fixture(scope="module")
def ray_cluster(ray_clusters: Any) -> Iterator[Any]:
    """A head that trains nothing and a node with two CPUs, for a module's tests that leave it as it is. Not for all of
    the session: its processes are at work while nothing runs on it."""
    cluster = ray_clusters.Cluster()
    try:
        cluster.start_head()
        cluster.start_node(num_cpus=2)
        yield cluster
    finally:
        cluster.stop()


def _with_room_for_frames(run: Callable[[], None]) -> None:
    """CPython keeps frames in chunks of 16 KiB and unmaps one when its first frame returns. What calls back and forth
    across such a border maps and unmaps at each call: Numba's compiler does, a million times for a handful of
    functions, wherever the frames of pytest and hypothesis below it end just before one. A frame of half a megabyte
    gets a chunk of one, and the rest of it is for all that it calls."""
    run()


_with_room_for_frames.__code__ = _with_room_for_frames.__code__.replace(co_stacksize=1 << 16)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.runtest = partial(_with_room_for_frames, item.runtest)  # type: ignore[method-assign]


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
