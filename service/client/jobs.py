"""Calls of the client for jobs: submit a job, wait for it, read its log and its events."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from .http import Json, ProblemError, ServiceError, Session, Unreachable, once, part, plain

TERMINAL_STATES = ("succeeded", "failed", "cancelled")
PATIENCE_SECONDS = 60.0
"""Seconds for which waiting for a job tolerates a service that is unavailable."""
AWAY = (429, 502, 503, 504)
"""Status codes of a temporary outage: the service is overloaded or without its database, or a proxy cannot reach it."""


class JobCalls(Session):
    """The methods of :class:`service.client.Client` for jobs."""

    def submit(self, job: Any, *, idempotency_key: str | None = None) -> Json:
        """Submit a JobSpec, or a mapping of its fields, and return the job.

        A repeated ``idempotency_key`` returns the same job.
        """
        return self.json("POST", "/jobs", json=plain(job), headers=once(idempotency_key))

    def estimate(self, job: Any) -> Json:
        """Validate a job without running it and return the service's prediction of memory and time (``dry_run``)."""
        return self.json("POST", "/jobs", json=plain(job), params={"dry_run": "true"})

    def jobs(
        self, *, state: str | None = None, name: str | None = None, label: str | None = None, limit: int | None = None
    ) -> list[Json]:
        """Return jobs, newest first, at most ``limit`` in all."""
        return list(self.items("/jobs", limit, state=state, name=name, label=label))

    def job(self, job_id: str) -> Json:
        return self.json("GET", f"/jobs/{part(job_id)}")

    def cancel(self, job_id: str) -> Json:
        return self.json("POST", f"/jobs/{part(job_id)}/cancel")

    def retry(self, job_id: str, *, idempotency_key: str | None = None) -> Json:
        return self.json("POST", f"/jobs/{part(job_id)}/retry", headers=once(idempotency_key))

    def delete_job(self, job_id: str) -> None:
        self.request("DELETE", f"/jobs/{part(job_id)}")

    def wait(
        self,
        job_id: str,
        *,
        timeout_seconds: float | None = None,
        poll_seconds: float = 0.5,
        on_update: Callable[[Json], None] | None = None,
    ) -> Json:
        """Wait until the job has ended (succeeded, failed or cancelled), and return it.

        An outage of up to a minute, such as a restart of the service, is tolerated. After that, a missing response or a
        status of 429, 502, 503 or 504 is an error.

        Args:
            job_id: The job.
            timeout_seconds: Longest time to wait; None for no limit.
            poll_seconds: Time between two requests.
            on_update: Called with the job after each request.

        Raises:
            TimeoutError: The job has not ended in time; it continues.
            Unreachable: There was no response for a minute.
            ProblemError: The service refused the request, or responded for a minute with a status of AWAY.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        last_answer = time.monotonic()
        while True:
            try:
                job = self.job(job_id)
                last_answer = time.monotonic()
                if on_update is not None:
                    on_update(job)
                if job["state"] in TERMINAL_STATES:
                    return job
            except ServiceError as error:
                if not _passes(error) or time.monotonic() - last_answer > PATIENCE_SECONDS:
                    raise
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {job_id} has not ended after {timeout_seconds:g} seconds; it continues")
            self._pause(poll_seconds)

    def logs(self, job_id: str, offset: int = 0) -> tuple[str, int]:
        """Return the log's text from byte ``offset`` on (a megabyte at most), and the offset for the next call.

        That offset is 0 if the log ends before ``offset``: a new log has then replaced the previous log.
        """
        answer = self.request(
            "GET", f"/jobs/{part(job_id)}/logs", params={"offset": offset}, headers={"Accept": "text/plain"}
        )
        body = answer.content
        if int(answer.headers["Evenkeel-Next-Offset"]) < offset:
            return "", 0
        # The text so far may end within a character of several bytes, which is left for the next call.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(body)
        return text, offset + len(body) - len(decoder.getstate()[0])

    def read_logs(self, job_id: str) -> Iterator[str]:
        """Yield the log in pieces, up to its present end."""
        text, offset = self.logs(job_id)
        while text:
            yield text
            text, offset = self.logs(job_id, offset)

    def follow_logs(self, job_id: str, *, poll_seconds: float = 0.5) -> Iterator[str]:
        """Yield the log as it grows, until the job has ended and all of it was read.

        An outage of the service is tolerated for a minute, as by :meth:`wait`.
        """
        offset, last_answer = 0, time.monotonic()
        while True:
            try:
                ended = self.job(job_id)["state"] in TERMINAL_STATES
                text, following = self.logs(job_id, offset)
            except ServiceError as error:
                if not _passes(error) or time.monotonic() - last_answer > PATIENCE_SECONDS:
                    raise
                self._pause(poll_seconds)
                continue
            last_answer = time.monotonic()
            anew, offset = following < offset, following
            if text:
                yield text
            elif ended and not anew:
                return
            elif not anew:
                self._pause(poll_seconds)

    def events(self, job_id: str, last_event_id: str | None = None) -> Iterator[Json]:
        """Yield a job's server-sent events, ``{"id", "event", "data"}`` with decoded data, until they end.

        Args:
            job_id: The job.
            last_event_id: The ``id`` of the last event already known: this event and earlier events are left out.

        Raises:
            Unreachable: The stream broke off, for example because the service was restarted.
        """
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_event_id} if last_event_id else {})
        timeout = httpx.Timeout(60, read=None)
        answer = self.request("GET", f"/jobs/{part(job_id)}/events", stream=True, headers=headers, timeout=timeout)
        try:
            event: Json = {"id": None, "event": "message", "data": ""}
            for line in self._lines(answer):
                if line:
                    field, _, value = line.partition(":")
                    value = value.removeprefix(" ")
                    if field == "data":
                        event["data"] += ("\n" if event["data"] else "") + value
                    elif field in ("id", "event"):
                        event[field] = value
                elif event["data"]:
                    yield event | {"data": json.loads(event["data"])}
                    event = {"id": event["id"], "event": "message", "data": ""}
        except httpx.TransportError as error:
            raise Unreachable(
                f"the events broke off: {error or type(error).__name__}",
                "continue with last_event_id, the id of the last event received",
            ) from None
        finally:
            self._end(answer)


def _passes(error: ServiceError) -> bool:
    return isinstance(error, Unreachable) or (isinstance(error, ProblemError) and error.status in AWAY)
