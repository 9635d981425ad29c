"""The process from which runs are forked, one for all tests of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.runs.warm_pool import WarmPool


class WarmPoolOfTests(WarmPool):
    def start(self, run_dir: Path, environment: Mapping[str, str], own: Mapping[str, str]) -> int | None:
        # What differs from test to test, or was left by a process group of this process, makes no other process of it.
        differs = {"PYTEST_CURRENT_TEST", "LOCAL_WORLD_SIZE"}
        same = {name: value for name, value in environment.items() if name not in differs}
        return super().start(run_dir, same, own)


class Borrowed:
    """The warm pool of all tests, which who closes it leaves as it is."""

    def __init__(self, warm_pool: WarmPool):
        self.start = warm_pool.start

    def close(self) -> None:
        pass
