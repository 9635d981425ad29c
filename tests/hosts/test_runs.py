"""A job from submission to fetched vectors, on three hosts that share no file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.net import until
from tests.hosts.stack import HEAD, ONLY_ASKED, Stack, of_guide, stack

pytestmark = [ONLY_ASKED, pytest.mark.hosts, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


def assert_refreshes_survive_a_host(seen: Stack) -> None:
    """A schedule's firings: one is published, and one whose host is lost half-way."""
    seen.service.path("/srv/daily.yaml").write_text(of_guide("daily.yaml"))
    seen.evenkeel("schedules", "add", "daily", "/srv/daily.yaml", "--cron", "0 3 * * *")
    for date, loses in (("2026-11-25", False), ("2026-11-26", True)):
        before = {job["id"] for job in seen.told("jobs")}
        seen.evenkeel("schedules", "trigger", "daily", "--date", date)
        (job,) = until(lambda: {job["id"] for job in seen.told("jobs")} - before)  # noqa: B023
        if loses:
            seen.wait(job, lambda job: job["metrics"])
            seen.net.vanish(seen.holders(job, "driver")[0])
        done = seen.ended(job, 600)
        assert (done["state"], done["attempt"]) == ("succeeded", 1 + loses), (done, seen.log(job)[-6000:])
        assert done["publication"]["status"] == "published"
    assert len(seen.told("versions", "items")) == 3


def test_two_ranks_on_two_hosts_train_row_wise_and_publish(tmp_path: Path) -> None:
    with stack(tmp_path) as seen:
        resources = {"num_workers": 2, "cpus_per_worker": 1}
        job = seen.submit(resources=resources, sharding={"item": "row_wise", "user": "row_wise"})
        done = seen.ended(job)
        assert (done["state"], done["attempt"]) == ("succeeded", 1), (done, seen.log(job)[-6000:])
        assert done["publication"]["status"] == "published"
        assert [one["epoch"] for one in done["metrics"] if one["split"] == "train"] == [1, 2, 3]
        assert HEAD not in seen.holders(job, "driver")
        assert len(seen.holders(job, "ranks")) == 2
        for name in seen.holders(job, "ranks"):
            ranks = seen.net[name].path(f"/var/tmp/evenkeel-cache/runs/{job}/ranks")
            assert len(list(ranks.glob("log-*.txt"))) == 1, "one rank on each host"
        assert not seen.service.path(f"/srv/evenkeel/runs/{job}/checkpoints").exists()
        fetched = seen.told("fetch", "items", "1", "2", "1000")
        assert [one["status"] for one in fetched["items"]] == ["found", "found", "missing"]
        assert_refreshes_survive_a_host(seen)


def test_four_ranks_in_a_grid_on_two_hosts(tmp_path: Path) -> None:
    with stack(tmp_path, nodes=2, cpus=2) as seen:
        resources = {"num_workers": 4, "cpus_per_worker": 1}
        model = {"kind": "two_tower", "embedding_dim": 8, "hidden": [8]}
        job = seen.submit(resources=resources, model=model, sharding={"item": "grid", "user": "table_row_wise"})
        done = seen.ended(job, 600)
        assert (done["state"], done["attempt"]) == ("succeeded", 1), (done, seen.log(job)[-6000:])
        assert done["publication"]["status"] == "published"
        assert len(seen.holders(job, "ranks")) == 2
        assert [one["status"] for one in seen.told("fetch", "items", "1")["items"]] == ["found"]
