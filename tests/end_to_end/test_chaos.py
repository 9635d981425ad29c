"""Chaos in short: every fault once (``make chaos`` is the whole of it)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.chaos import LISTED, chaos

pytestmark = [pytest.mark.end_to_end, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_answer_is_true_and_nothing_is_lost_while_each_part_fails(tmp_path: Path) -> None:
    with chaos(tmp_path, seed=1, real=False) as one:
        found = one.run(0, at_once=20)
    assert (found["wrong"], found["lost"], found["doubled"]) == (0, 0, 0), found
    assert found["acknowledged"] >= 20
    assert found["listed"] >= LISTED
    assert min(found["faults"].values()) >= 1
