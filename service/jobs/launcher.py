"""Starts the attempt of a job that was taken from the queue."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from service.core import tables
from service.core.errors import Problem
from service.jobs import job_records, run_events, submission
from service.jobs.job_row import JobRow
from service.jobs.runner_context import RunnerContext
from trainer.data.errors import DataAwayError
from trainer.runs.directory import RUN_FILE

log = logging.getLogger("evenkeel.runner")


class Launcher:
    def __init__(self, context: RunnerContext):
        self._context = context

    async def launch(self, row: JobRow) -> None:
        """Start the attempt.

        If this is interrupted between launch and commit, the next round finds the attempt, alive or ended, and
        continues with it.
        """
        directory = self._context.run_dir(row["id"])
        error, retryable = None, False
        values: dict[str, Any] = {"launched_at": tables.now(), "heartbeat_at": tables.now()}
        try:
            ended = run_events.read_exit(directory, row["attempt"]) is not None
            alive = directory.exists() and await asyncio.to_thread(self._context.executor.is_alive, directory)
            if not (alive or ended):
                if directory.exists():
                    await asyncio.to_thread(self._context.executor.terminate, directory, grace_seconds=0)
                await asyncio.to_thread(submission.prepare_run, self._context.settings, self._context.store, row)
                await asyncio.to_thread(self._context.executor.launch, directory)
            values["parent_version"] = json.loads((directory / RUN_FILE).read_text("utf-8"))["parent_version"]
        except Problem as problem:
            error = submission.problem_error(problem)
            retryable = isinstance(problem.__cause__, DataAwayError)
        except (OSError, RuntimeError, ValueError) as failure:
            log.exception("job %s could not be launched", row["id"])
            # Python's error names no file if a write fails on a full disk.
            of_no_file = isinstance(failure, OSError) and failure.filename is None
            message = f"{directory}: {failure}" if of_no_file else str(failure)
            remedy = "see the service's log; 'evenkeel doctor' checks disk and memory"
            error, retryable = {"code": "launch-failed", "message": message, "remedy": remedy}, True
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            if error is None:
                await job_records.change(connection, current, **values)
            else:
                await run_events.fail(
                    connection, current, error, retryable, self._context.settings.retry_backoff_seconds
                )
