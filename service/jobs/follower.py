"""Follows runs: applies their reports, and gives up runs that are silent or take too long."""

from __future__ import annotations

import datetime
import logging
import time

from service.core import tables
from service.jobs import job_records, run_events
from service.jobs.executors.base import ExecutorUnavailable
from service.jobs.job_row import JobRow
from service.jobs.liveness import Liveness, Looked
from service.jobs.runner_context import RunnerContext
from service.jobs.states import ACTIVE, TERMINAL
from trainer.spec.stored_specs import StoredJob

log = logging.getLogger("evenkeel.runner")

STALLED_STEPS = 20
"""A run without a step is given up after this multiple of its last step's duration, or ``silence_seconds`` if more."""


class Follower:
    def __init__(self, context: RunnerContext):
        self._context, self._settings = context, context.settings
        self._watch = Liveness(context.settings.silence_seconds)
        self._steps = Liveness(context.settings.silence_seconds)
        self._unanswered: dict[str, tuple[datetime.datetime, float]] = {}

    def begin_round(self, job_ids: set[str]) -> None:
        """Begin a round of checks on these jobs; after a gap between rounds each job gets a full interval to report."""
        self._steps.begin_round(job_ids)
        if self._watch.begin_round(job_ids):
            log.warning(
                "this machine or this process was suspended: every run gets a full interval to report something"
            )

    def answered(self, job_id: str) -> None:
        """Record that the executor answers for this job again."""
        self._unanswered.pop(job_id, None)

    async def wait_for_answer(self, row: JobRow, error: ExecutorUnavailable) -> None:
        """Follow a run while its executor does not answer: apply the run's own reports.

        After the time ``unanswered_seconds`` in the settings, the job's ``reason`` says that the executor does not
        answer.
        """
        if row["state"] in ACTIVE and row["launched_at"] is not None:
            await self.follow(row, alive=True)
        since, asked = self._unanswered.setdefault(row["id"], (tables.now(), time.monotonic()))
        if time.monotonic() - asked < self._settings.unanswered_seconds:
            return
        reason = f"its executor has not answered since {since:%Y-%m-%d %H:%M} UTC, and is asked again: {error}"
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            same = (current["state"], current["attempt"]) == (row["state"], row["attempt"])
            if same and current["state"] not in TERMINAL and current["reason"] != reason:
                log.warning("job %s: %s", row["id"], reason)
                await job_records.change(connection, current, reason=reason)

    async def follow(self, row: JobRow, alive: bool) -> None:
        """Apply the run's new events, and end its attempt if necessary.

        The attempt is ended if the run is gone without reporting its end, or has been silent for too long. The attempt
        is also ended if the run has taken no step for too long while training, or has exceeded its time limit.
        """
        said = run_events.size(self._context.run_dir(row["id"]))
        if not alive or said != row["events_offset"]:
            await self.apply(row, alive)
        if not alive:
            return
        assert row["launched_at"] is not None
        age = (tables.now() - row["launched_at"]).total_seconds()
        attempt = row["attempt"], row["lease"]
        looked = self._watch.look(row["id"], attempt, said, age)
        progress = row["progress"] or {}
        is_training = run_events.is_training(row)
        # Outside of training the step counts as -1, so that a full interval begins when training does.
        stepped = self._steps.look(row["id"], attempt, progress["step"] if is_training else -1, age)
        step_limit = max(self._settings.silence_seconds, STALLED_STEPS * progress.get("step_seconds", 0.0))
        limit = StoredJob(row["spec"]).resources.timeout_seconds
        if limit is not None and looked.running_seconds > limit + self._settings.cancel_grace_seconds:
            await self._give_up(row, said, run_events.timed_out(limit), retryable=False)
        elif looked.silent_seconds > self._settings.silence_seconds:
            await self._give_up(row, said, run_events.silent(looked.silent_seconds), retryable=True)
        elif is_training and stepped.silent_seconds > step_limit:
            await self._give_up(row, said, run_events.stalled(progress, stepped.silent_seconds), retryable=True)
        elif looked.silent_seconds > self._settings.silence_seconds / 2:
            await self._warn_of_silence(row, looked)

    async def apply(self, row: JobRow, alive: bool) -> None:
        directory = self._context.run_dir(row["id"])
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            backoff = self._settings.retry_backoff_seconds
            more = await run_events.apply(connection, current, directory, alive, backoff)
            if not alive and not more and current["state"] in ACTIVE:
                exit_code = self._context.executor.exit_code(directory)
                await run_events.died(connection, current, directory, backoff, exit_code)

    async def _give_up(self, row: JobRow, said: int, error: dict[str, str], retryable: bool) -> None:
        """End an attempt that does not end itself.

        The attempt's lease is revoked first, here in the database and, before any signal, by ``Reaper.release`` in its
        run directory. If the run wakes up meanwhile, it can no longer write anything.
        """
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            moved = (current["attempt"], current["lease"]) != (row["attempt"], row["lease"])
            if moved or current["state"] not in ACTIVE or run_events.size(self._context.run_dir(row["id"])) != said:
                return
            log.warning("job %s, attempt %d: %s", row["id"], row["attempt"], error["message"])
            await job_records.change(connection, current, lease=None)
            await run_events.fail(connection, current, error, retryable, self._settings.retry_backoff_seconds)

    async def _warn_of_silence(self, row: JobRow, looked: Looked) -> None:
        if row["reason"] is not None:
            return
        async with self._context.database.write() as connection:
            current = await job_records.locked(connection, row["id"])
            if current["state"] in ACTIVE and current["attempt"] == row["attempt"] and current["reason"] is None:
                limit = self._settings.silence_seconds
                reason = f"no sign of life for {looked.silent_seconds:.0f} s: it is given up after {limit:g} s"
                await job_records.change(connection, current, reason=reason)
