"""One process at a time is at work on a run."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from trainer.launch import driver
from trainer.runs.directory import LOCK_FILE


def test_a_second_one_is_refused_while_the_first_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LOCK_SECONDS", 0.05)
    with driver._lock(tmp_path), pytest.raises(driver.RunBusyError, match="end it first"), driver._lock(tmp_path):
        pass
    with driver._lock(tmp_path):
        pass


def test_one_that_was_killed_may_hold_it_a_moment_longer(tmp_path: Path) -> None:
    held = (tmp_path / LOCK_FILE).open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    ended = threading.Timer(0.1, held.close)
    ended.start()
    with driver._lock(tmp_path):
        assert held.closed
    ended.join()
