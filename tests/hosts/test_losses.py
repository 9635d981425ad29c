"""A host that vanishes while a run prepares, trains, writes a checkpoint or publishes, or is cut off and comes back.

What is not to end in the phase that a test wants to see waits there for a server that is cut off: no test needs luck.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts.net import until
from tests.hosts.stack import HEAD, ONLY_ASKED, PYTHON, Stack, stack

pytestmark = [ONLY_ASKED, pytest.mark.hosts, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1500)]

TWO = {"resources": {"num_workers": 2, "cpus_per_worker": 1}, "sharding": {"item": "row_wise", "user": "row_wise"}}
LONG = {**TWO, "epochs": 12}


@pytest.fixture(scope="module")
def _stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("hosts")) as seen:
        yield seen


@pytest.fixture
def seen(_stack: Stack) -> Iterator[Stack]:
    """Three nodes without work, and all servers."""
    _stack.mend()
    began = time.monotonic()
    yield _stack
    print(f"{time.monotonic() - began:.0f} s")
    for name in ("s3", "redis", *(name for name in _stack.nodes if _stack.net[name].alive)):
        _stack.net.heal(name)


def driver_of(seen: Stack, job: str) -> str:
    (node,) = until(lambda: seen.holders(job, "driver"), lambda: (seen.job(job), seen.log(job)))
    return str(node)


def assert_published_once(seen: Stack, job: str, epochs: int, attempt: int = 2) -> None:
    done = seen.ended(job, 600)
    assert (done["state"], done["attempt"]) == ("succeeded", attempt), (done, seen.log(job)[-6000:])
    assert done["publication"]["status"] == "published"
    told = [one["epoch"] for one in done["metrics"] if one["split"] == "train"]
    assert told == list(range(1, epochs + 1))
    versions = seen.told("versions", "items")
    assert [one["job"] for one in versions].count(job) == 1
    assert seen.told("fetch", "items", "1")["items"][0]["status"] == "found"


def checkpoints(seen: Stack, job: str) -> set[int]:
    """Steps of the checkpoints that are there, as the bucket has them."""
    listing = (
        "import sys; from trainer.storage.folders import Folders; "
        "from trainer.storage.storage_registry import open_storage;"
        "print(*Folders(open_storage(sys.argv[1]), 'checkpoints').names())"
    )
    names = seen.net["s3"].run(PYTHON, "-c", listing, f"s3://bucket/runs/{job}").stdout.split()
    return {int(re.sub(r"\D", "", name)) for name in names}


def resumed_after(seen: Stack, job: str) -> list[int]:
    return [int(step) for step in re.findall(r"resuming after step (\d+)", seen.log(job))]


def test_the_driver_s_host_vanishes_while_it_prepares(seen: Stack) -> None:
    job = seen.submit(**TWO)
    # The service reads the rows' sizes, submits, and then it takes the driver seconds to begin.
    until(seen.service.path(f"/srv/evenkeel/runs/{job}/ray_job.json").exists, seconds=60)
    seen.net.cut("s3")
    node = driver_of(seen, job)
    until(lambda: '"starting"' in seen.events(job), lambda: seen.events(job))  # and waits for the bucket
    seen.net.vanish(node)
    seen.net.heal("s3")
    assert_published_once(seen, job, 3)


def test_the_host_of_a_rank_vanishes_in_a_step(seen: Stack) -> None:
    job = seen.submit(**LONG)
    seen.wait(job, lambda job: job["metrics"])
    driver = driver_of(seen, job)
    of_ranks = [name for name in seen.holders(job, "ranks") if name not in (HEAD, driver)]
    seen.net.vanish(of_ranks[0] if of_ranks else driver)
    assert_published_once(seen, job, 12)
    assert max(resumed_after(seen, job)) > 0


def test_a_host_vanishes_while_a_checkpoint_is_written(seen: Stack) -> None:
    job = seen.submit(**LONG)
    seen.wait(job, lambda job: job["metrics"])
    seen.net.cut("s3")
    time.sleep(3)
    node = driver_of(seen, job)
    seen.net.vanish(node)
    seen.net.heal("s3")
    before: Any = max(checkpoints(seen, job))
    assert_published_once(seen, job, 12)
    assert resumed_after(seen, job) == [before]


def test_the_driver_s_host_vanishes_while_it_publishes(seen: Stack) -> None:
    job = seen.submit(**LONG)
    seen.wait(job, lambda job: job["metrics"])
    seen.net.cut("redis")
    until(lambda: '"publishing"' in seen.events(job), lambda: seen.events(job))  # and waits for the store
    seen.net.vanish(driver_of(seen, job))
    seen.net.heal("redis")
    assert_published_once(seen, job, 12)


@pytest.mark.parametrize(("seconds", "attempt"), [(5, 1), (90, 2)], ids=["survived", "retried"])
def test_a_rank_s_host_is_cut_off_and_comes_back(seen: Stack, seconds: float, attempt: int) -> None:
    """Ray gives a node up that leaves its health checks unanswered: not after 5 s, but after 90 s."""
    job = seen.submit(**{**TWO, "epochs": 40})
    seen.wait(job, lambda job: job["metrics"])
    driver = driver_of(seen, job)
    of_ranks = [name for name in seen.holders(job, "ranks") if name not in (HEAD, driver)]
    node = of_ranks[0] if of_ranks else driver
    seen.net.cut(node)
    time.sleep(seconds)
    assert '"publishing"' not in seen.events(job), "what is left must be trained with the host, or without it"
    seen.net.heal(node)
    assert_published_once(seen, job, 40, attempt)
