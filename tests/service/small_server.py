"""The service in a process of its own, with small runs in the place of training: for tests that kill it."""

from __future__ import annotations

import dataclasses

from service.app import serve
from service.core.settings import Settings
from tests.service.small_run import SmallRuns


def main() -> int:
    """By the environment, until it is told to end."""
    settings = dataclasses.replace(
        Settings.from_environment(), follow_seconds=0.05, schedule_seconds=0.1, retry_backoff_seconds=0.05
    )
    return serve(settings, port=0, executor=SmallRuns())
