"""Ends runs that are cancelled, and processes that an ended attempt left behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from service.jobs import job_records, run_events
from service.jobs.executors.base import ExecutorUnavailable
from service.jobs.follower import Follower
from service.jobs.job_row import JobRow
from service.jobs.runner_context import BackgroundTasks, RunnerContext
from service.jobs.states import ACTIVE, TERMINAL
from trainer.runs.directory import revoke

LINGER_SECONDS = 20.0
"""Longest wait for a run that reported its end to exit, before its processes are killed."""


class Reaper:
    def __init__(self, context: RunnerContext, follower: Follower):
        self._context = context
        self._backoff = context.settings.retry_backoff_seconds
        self._follower = follower
        self._ending = BackgroundTasks("could not be ended")
        self._lingering: dict[str, float] = {}

    def is_ending(self, job_id: str) -> bool:
        return job_id in self._ending

    def close(self) -> None:
        self._ending.cancel()

    def end(self, row: JobRow) -> None:
        """End a run in the background, so that its grace period does not delay the others."""
        self._ending.start(row["id"], lambda: self._terminate(row))

    async def _terminate(self, row: JobRow) -> None:
        directory = self._context.run_dir(row["id"])
        # If someone removed the directory, its processes may still run: the executor finds them by its name.
        if directory.exists() or row["launched_at"] is not None:
            try:
                grace = self._context.settings.cancel_grace_seconds
                await in_daemon_thread(lambda: self._context.executor.terminate(directory, grace_seconds=grace))
            except ExecutorUnavailable as error:
                await self._follower.wait_for_answer(row, error)
                return
            self._follower.answered(row["id"])
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            while await run_events.apply(connection, current, directory, False, self._backoff):
                pass
            if current["state"] == "cancelling":
                await job_records.move(connection, current, "cancelled")

    async def release(self, row: JobRow) -> None:
        """End the remaining processes of an ended attempt once it has exited or had time to, and free its resources."""
        directory = self._context.run_dir(row["id"])
        if row["lease"] is None:
            await asyncio.to_thread(revoke, directory)
        else:
            ended = self._lingering.setdefault(row["id"], time.monotonic())
            alive = await asyncio.to_thread(self._context.executor.is_alive, directory)
            if alive and row["state"] in TERMINAL and time.monotonic() - ended < LINGER_SECONDS:
                return
        await asyncio.to_thread(self._context.executor.terminate, directory, grace_seconds=0)
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            # Ranks outlive a killed driver for a moment: their last metrics belong to this attempt, and the next one
            # continues from the checkpoint that they wrote.
            while await run_events.apply(connection, current, directory, False, self._backoff):
                pass
            if current["state"] not in ACTIVE:
                await job_records.change(connection, current, released=True)
        self._lingering.pop(row["id"], None)


async def in_daemon_thread(function: Callable[[], Any]) -> None:
    """Call like asyncio.to_thread, but without delaying the end of the service.

    A grace period of a minute must not delay a restart of the service. The restarted service continues the
    cancellation.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def work() -> None:
        error = None
        try:
            function()
        except Exception as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop has ended, so nobody waits for the result
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=work, daemon=True).start()
    await done
