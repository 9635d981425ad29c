"""A job from submission to fetched vectors, on three hosts that share no file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.stack import HEAD, ONLY_ASKED, stack

pytestmark = [ONLY_ASKED, pytest.mark.hosts, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


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
