"""Ranks that wait while their run prepares."""

from __future__ import annotations

import time

import psutil
import pytest

from trainer.launch.driver import RanksFailed
from trainer.launch.on_host import forked_ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def test_a_rank_that_is_killed_while_it_waits_ends_the_run(make_run) -> None:
    run = make_run("waiting", resources={"num_workers": 2, "cpus_per_worker": 1})
    me = psutil.Process()
    # Of other tests of this process, which may be dead and not waited for.
    others = me.children()
    with forked_ranks(run) as go:
        ranks: list[psutil.Process] = []
        while len(ranks) < 2:
            mine = [one for one in me.children() if one not in others]
            ranks = [one for one in mine if one.name().startswith("evenkeel-rank")]
        # It waits then: of the other one nothing is asked.
        while ranks[0].status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        ranks[0].kill()
        with pytest.raises(RanksFailed, match="SIGKILL") as told:
            go(run)
    assert told.value.died
    assert not any(one.is_running() for one in ranks)
