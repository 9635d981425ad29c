"""The soak in short: the real thing for a minute, with a few kills (``make soak`` is the whole of it)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.soak import TERMINAL, job, soaking

pytestmark = [pytest.mark.end_to_end, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_nothing_is_lost_doubled_or_torn_while_things_are_killed(tmp_path: Path) -> None:
    with soaking(tmp_path, seed=3, real=False) as soak:
        soak.begin()

        def killed(kind: str) -> bool:
            """Where nothing runs that could be killed there is a new job, before the schedules' next minute."""
            if soak.kill(kind):
                soak.seen.kills[kind] += 1
                return True
            if all(one["state"] in TERMINAL for one in soak.jobs()):
                soak.asked(lambda client: client.submit(job("another")))
            return False

        for kind in ("service", "driver", "rank", "suspend"):
            soak.until(lambda kind=kind: killed(kind), 240)

        def tried_again() -> bool:
            """A run that is killed when it has ended, and only cleans up, is not: then another one."""
            if any(one["attempt"] > 1 for one in soak.jobs()):
                return True
            killed("driver")
            return False

        soak.until(tried_again, 300)
        found = soak.finish()
    assert found["broken"] == []
    assert found["jobs"] >= 2
    assert found["attempts"] > found["jobs"]  # what was killed went on
    assert found["versions"] == found["jobs"]
    assert found["fetches"] > 10
