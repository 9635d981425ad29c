"""Trials run from one process for all tests, as those of the trainer do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.warm_pool import Borrowed, WarmPoolOfTests
from trainer.runs.warm_pool import WarmPool


@pytest.fixture(scope="session")
def warm_pool() -> Iterator[WarmPool]:
    found = WarmPoolOfTests()
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
def trials_run(warm_pool: WarmPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of trials are forked from the process of all tests."""
    monkeypatch.setattr("trainer.search.runs.WarmPool", lambda: Borrowed(warm_pool))
