"""Fixtures that every test may use: where the real data sets are, hypothesis profiles, the list of allowed skips, and
what runs beside what."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import pool, ray_cluster, scheduling

ROOT = Path(__file__).resolve().parent.parent

# Triton reads it when it is imported: tests run its kernels by the interpreter; `make gpu-check` says 0, for the GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
for _name, _value in ray_cluster.PATIENCE.items():
    os.environ.setdefault(_name, _value)
# Each test prepares its own data: what another has prepared would be used otherwise.
os.environ.setdefault("EVENKEEL_PREPARED_BYTES", "0")
# libgomp reads it when torch is imported. Threads that wait for one another spin by default: where another worker of
# the suite has the CPU they wait for, a step of a few rows takes tens of milliseconds of both.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile(
    "ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "long", max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("full", max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

MORE_THREADS = 20
_threads_left = 20
"""Those that the last collection has left."""


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Let no process groups pile up: those of runs in this process end when the garbage collector finds the run's
    cycles, and until then each has three threads that wake a hundred times a second."""
    global _threads_left
    yield
    if sys.platform == "linux" and len(os.listdir("/proc/self/task")) > _threads_left + MORE_THREADS:
        gc.collect()
        _threads_left = len(os.listdir("/proc/self/task"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests are there until the end: the garbage collector looks at them once, not a hundred times while
    they become more, which was two fifths of the seconds that each worker takes to collect, and not again after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    if os.environ["TRITON_INTERPRET"] == "1" and any("triton" in item.nodeid for item in session.items):
        from tests.support import interpreted

        interpreted.install()


# A skip for any other reason is a failure: a suite that quietly skips proves nothing.
ALLOWED_SKIPS = (
    "real data sets are not here",
    "no PostgreSQL at",
    "no Redis at",
    "no Kafka broker at",
    "no chromium",
    "axe-core is not installed",
    "no promtool",
    "no haproxy",
    "no podman",
    "no helm",
    "no CRDs of KubeRay",
    "mounting a tmpfs is not permitted",
    "needs a GPU",
    "no environment with Feast",
    "DeepCTR-Torch is not installed",
    "the temporary directory is in memory",
    "no hosts here",
    "no MLflow server",
    "wandb is not installed",
    "faiss is not installed",
    "lancedb is not installed",
    "pymilvus is not installed",
    "milvus-lite is not installed",
    "no pgvector at",
)


@pytest.fixture(scope="session")
def own_broker() -> Iterator[Any]:
    """librdkafka's own broker of Kafka's protocol, in a process; tests may send it away for a while."""
    from tests.support.kafka_broker import own_broker

    with own_broker() as broker:
        yield broker


@pytest.fixture(params=["own", "other"])
def broker(request: pytest.FixtureRequest) -> Any:
    """Brokers of Kafka's protocol: librdkafka's own, and the one at EVENKEEL_TEST_KAFKA."""
    from tests.support.kafka_broker import Broker

    if request.param == "own":
        return request.getfixturevalue("own_broker")
    address = os.environ.get("EVENKEEL_TEST_KAFKA")
    if not address:
        pytest.skip("no Kafka broker at EVENKEEL_TEST_KAFKA")
    return Broker(address)


WITH_PROCESSES = {"broker", "own_broker", "ranks", "redis_url", "runs", "s3_address", "served", "service"}
"""Fixtures whose tests are marked ``process`` for them."""
_started: list[str] = []
"""The processes that the test under way has started."""


def _note_process(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        _started.append(f"{event} {arguments[0] if arguments else ''}".strip())


sys.addaudithook(_note_process)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    _started.clear()
    yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduling.groups(config, log) if config.getoption("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers take them (`make test`), groups that are long come first: what comes last, one worker does
    while the others have nothing left."""
    if not config.getoption("loadgroup", False):
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[bool, int, bool]:
        uses = [CLUSTER_FIXTURES.index(name) for name in CLUSTER_FIXTURES if name in getattr(item, "fixturenames", ())]
        return not item.get_closest_marker("ray"), max(uses, default=0), item.path not in slow

    items.sort(key=place)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of the real data sets (EVENKEEL_TEST_DATA, default ../shared/data); skips where it is missing."""
    folder = Path(os.environ.get("EVENKEEL_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "ml1m.parquet").exists():
        pytest.skip(f"real data sets are not here: {folder}")
    return folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """``ranks(world_size).run(function, *arguments)``: the function on each rank of a gloo pool (support/pool.py)."""
    yield pool.pool
    pool.close_all()


@pytest.fixture(name="ray_cluster")
def _ray_cluster() -> ray_cluster.Cluster:
    """The cluster that all tests share which leave it as it is: a head and a node."""
    return ray_cluster.shared()


@pytest.fixture
def two_ray_nodes() -> ray_cluster.Cluster:
    """The shared cluster with a second node, which stays."""
    return ray_cluster.shared(num_nodes=2, or_more=True)


@pytest.fixture
def mortal_ray_cluster() -> Iterator[ray_cluster.Cluster]:
    """The shared cluster, for a test that kills its head: it ends with that test."""
    yield ray_cluster.shared(or_more=True)
    ray_cluster.end_shared()


CLUSTER_FIXTURES = ("ray_cluster", "two_ray_nodes", "mortal_ray_cluster")
"""In the order in which tests take them: in another one the cluster is started anew in between."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if scheduling.group_of(item.nodeid.partition("::")[0]) != "ray":
        ray_cluster.end_shared()


def pytest_sessionfinish() -> None:
    ray_cluster.end_shared()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("ray") or WITH_PROCESSES.intersection(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.process)
    case = item.callspec.id if hasattr(item, "callspec") else ""
    if "postgresql" in case or "triton" in case or item.path.name == "test_triton.py":
        item.add_marker(pytest.mark.twin)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(f"skips: {len(skipped)}, all from the allow-list of tests/conftest.py")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    if call.when == "call" and report.passed and _started and "not process" in item.config.getoption("markexpr"):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} starts a process ({_started[0]}), which make test-fast has none of: mark it `process`"
        )
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(allowed in reason for allowed in ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} skipped for a reason that tests/conftest.py does not allow: {reason}"
