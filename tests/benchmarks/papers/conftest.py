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


@pytest.fixture
def trials_run(standby: Standby, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs of trials are forked from the process of all tests; torch has the threads of before after them."""
    monkeypatch.setattr("trainer.search.runs.Standby", lambda: Borrowed(standby))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
