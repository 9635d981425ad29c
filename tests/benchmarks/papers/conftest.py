"""Trials run from one process for all tests, as those of the trainer do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.standby import Borrowed, StandbyOfTests
from trainer.runs.standby import Standby


@pytest.fixture(scope="session")
def standby() -> Iterator[Standby]:
    found = StandbyOfTests()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models train in one thread: more would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def trials_run(standby: Standby, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of trials are forked from the process of all tests."""
    monkeypatch.setattr("trainer.search.runs.Standby", lambda: Borrowed(standby))
