"""The driver of one attempt: it prepares data, starts ranks, publishes, and always records exactly one final state.

The driver owns the run directory. The driver's caller passes the function that starts the ranks (trainer.launch.on_ray,
trainer.launch.on_host), so the driver is the same with and without Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embeddings.durable_files import write_json
from trainer.runs import openlineage, tracing
from trainer.runs.directory import LOCK_FILE, Run
from trainer.runs.events import EVENTS_FILE, HEARTBEAT_SECONDS, EventWriter, phase, read_events, utc_now
from trainer.runs.failures import Cancelled, Failure, LeaseLostError, cause, classify, keep_traceback
from trainer.runs.lineage import lineage_of
from trainer.runs.protocol import EXIT_CANCELLED, EXIT_FAILED, EXIT_FILE, EXIT_RETRYABLE, EXIT_SUCCEEDED
from trainer.runs.trackers.base import tracked
from trainer.runs.uplink import reporting
from trainer.sizing.gpus import check_gpus

if TYPE_CHECKING:
    from trainer.data.prepare.by_tasks.tasks import Hosts

LOCK_SECONDS = 1.0
PAUSE_SECONDS = 0.5
_LINEAGE_ENDS = {"succeeded": "COMPLETE", "failed": "FAIL", "cancelled": "ABORT"}

StartRanks = Callable[[Run], None]
"""Function that runs ``trainer.launch.worker.train_rank`` on every rank to the end; it raises if any failed."""


class RunBusyError(RuntimeError):
    """Another process holds the lock of this run directory; nothing in the directory was changed."""


class RanksFailed(RuntimeError):
    """One or more ranks failed; trainer.runs.failures.cause finds the failure that explains it.

    ``died``: True if the process of a rank was killed, by a signal or with its node.
    """

    def __init__(self, message: str, died: bool = False):
        self.died = died
        super().__init__(message)


def execute(run: Run, start_ranks: StartRanks, hosts: Hosts | None = None) -> int:
    """Run one attempt to its end and return the exit code (trainer.runs.protocol).

    Must be called on the main thread: it handles SIGTERM and SIGINT.

    ``hosts``: other hosts that may prepare parts of the rows, if any.

    Raises:
        RunBusyError: another process works in this run directory.
        LeaseLostError: the attempt has lost its lease before it began.
    """
    with _lock(run.directory):
        run.fence()
        with (
            reporting(run),
            tracked(run),
            openlineage.telling(run) as tell,
            contextlib.closing(EventWriter(run.directory, run.attempt)) as events,
        ):
            attempt = _Attempt(run, events, tell, hosts)
            try:
                with (
                    _heartbeat(attempt),
                    tracing.span("run", run.traceparent, job=run.run_id, attempt=run.attempt) as traced,
                ):
                    code = attempt.lead(start_ranks)
                    traced.error = attempt.failure
                    return code
            finally:
                tracing.flush()


def check_free(directory: Path) -> None:
    """Check that no other process works in this run directory.

    Raises:
        RunBusyError: another process does.
    """
    with _lock(directory):
        pass


def _in_words(publication: Mapping[str, Any]) -> str:
    """Return text such as "published: v000003 of 'items' is served now"."""
    version = f"{publication['version']} of '{publication['collection']}'"
    if publication["status"] == "published":
        return f"published: {version} is served now"
    return f"held: {version} is not served: {'; '.join(publication['reasons'])}"


def fewer_workers(run: Run) -> str:
    """Return words such as "2 of 4 workers: REASON" for an attempt with fewer workers than the job asks for."""
    number, asked = run.job.resources.num_workers, run.submitted.resources.num_workers
    return f"{number} of {asked} workers: {run.fewer_because or 'there is no room for more'}"


def give_up(directory: Path, failure: Failure, attempt: int = 1) -> int:
    """End an attempt that could not even start: write the error event, the final state and exit.json."""
    if directory.is_dir():
        events = EventWriter(directory, attempt)
        _write_error(events, failure)
        with _as_far_as_the_disk_allows():
            events.write("state", state="failed")
        events.close()
        return _exit(directory, attempt, "failed", failure)
    return EXIT_FAILED


class _Attempt:
    """State of the attempt under way."""

    publication: dict[str, Any] | None = None
    """Fields of this attempt's publication event, if there was such an event."""
    failure: str | None = None

    def __init__(self, run: Run, events: EventWriter, tell: openlineage.Tell, hosts: Hosts | None):
        self.run, self.events, self.tell, self.hosts = run, events, tell, hosts
        self.interruptible = True
        self._ranks_since: int | None = None
        self._rank_beats = False

    def lead(self, start_ranks: StartRanks) -> int:
        run = self.run
        try:
            shutil.rmtree(run.failures, ignore_errors=True)
            run.cancel_file.unlink(missing_ok=True)
            (run.directory / EXIT_FILE).unlink(missing_ok=True)
            with self._signals(), self._time_limit():
                self.events.write("state", state="starting")
                if run.has_fewer_workers:
                    print(fewer_workers(run), flush=True)
                check_gpus(run.job, run.cluster)
                with self._phase("prepare"):
                    self._prepare_data()
                self.events.write("lineage", **lineage_of(self.run))
                self.tell("RUNNING")
                with tracing.span("train"):
                    self._ranks(start_ranks)
                with self._phase("publish"):
                    self._publish()
        except Cancelled as stop:
            if stop.reason == "timeout":
                limit = run.job.resources.timeout_seconds
                remedy = "set resources.timeout_seconds higher, then retry: training continues from the checkpoint"
                return self._failed(Failure("timeout", f"not done after {limit} seconds", remedy))
            return self._end("cancelled")
        except BaseException as error:
            failure = cause(run.failures, error, error.died) if isinstance(error, RanksFailed) else classify(error)
            keep_traceback(run.directory, error, failure)
            return self._failed(failure)
        return self._end("succeeded")

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with tracing.span(name), phase(self.events.write, name):
            yield

    def _prepare_data(self) -> None:
        # Imported once the attempt has reported its start: it takes a second.
        from trainer.launch.prepare_run import prepare_run

        report = functools.partial(self.events.write, "preparation")
        prepare_run(self.run, self.hosts, info=self._info, report=report, check_cancel=self._check_cancel)

    def _ranks(self, start_ranks: StartRanks) -> None:
        publish = self.run.job.publish
        self.interruptible = False
        self._ranks_since = (self.run.directory / EVENTS_FILE).stat().st_size
        try:
            with contextlib.ExitStack() as stack:
                if publish is not None and publish.is_repeated:
                    from trainer.publishing.repeated import publishing

                    stack.enter_context(publishing(self.run, self.events.write))
                start_ranks(self.run)
        finally:
            self.interruptible = True
            self._ranks_since, self._rank_beats = None, False
        self._check_cancel()

    def beat(self) -> None:
        """Write a heartbeat, unless rank 0 writes its own by now: they must end if that rank hangs or is stopped."""
        since = self._ranks_since
        if since is not None and not self._rank_beats:
            self._rank_beats = any("rank" in event.fields for event in read_events(self.run.directory, since))
        if since is None or not self._rank_beats:
            self.events.write("heartbeat")

    def _publish(self) -> None:
        from trainer.publishing.publish import publish, wait_for_sinks

        if self.run.job.publish is None:
            self.events.write("publication", status="none", collection=None, version=None, reasons=[], gate=[])
            return
        self._check_cancel()
        self.interruptible = False
        self.events.write("state", state="publishing")
        self.publication = publish(self.run)
        self.events.write("publication", **self.publication)
        print(_in_words(self.publication), flush=True)
        if self.publication["status"] == "published":
            wait_for_sinks(self.run, self._pause)

    def _pause(self) -> None:
        self._check_cancel()
        time.sleep(PAUSE_SECONDS)

    def _info(self, message: str, **figures: Any) -> None:
        print(message, flush=True)
        self.events.write("info", message=message, **figures)

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _check_cancel(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            raise Cancelled(self.run.cancel_file.read_text("utf-8"))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Make SIGTERM and SIGINT ask the ranks to write a checkpoint and stop; without ranks they stop the driver."""

        def handle(number: int, frame: object) -> None:
            self.run.ask_to_stop(signal.Signals(number).name)
            if self.interruptible:
                raise Cancelled(signal.Signals(number).name)

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _time_limit(self) -> Iterator[None]:
        limit = self.run.job.resources.timeout_seconds
        timer = threading.Timer(limit or 0, self.run.ask_to_stop, ["timeout"])
        timer.daemon = True
        if limit is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _failed(self, failure: Failure) -> int:
        _write_error(self.events, failure)
        self.failure = f"{failure.code}: {failure.message}"
        return self._end("failed", failure)

    def _end(self, state: str, failure: Failure | None = None) -> int:
        with _as_far_as_the_disk_allows():
            self.events.write("state", state=state)
        self.tell(_LINEAGE_ENDS[state], publication=self.publication, error=self.failure)
        return _exit(self.run.directory, self.run.attempt, state, failure, self.run.fence)


def _write_error(events: EventWriter, failure: Failure) -> None:
    print(f"error ({failure.code}): {failure.message}. Remedy: {failure.remedy}", flush=True)
    with _as_far_as_the_disk_allows():
        events.write("error", code=failure.code, message=failure.message, remedy=failure.remedy)


@contextlib.contextmanager
def _as_far_as_the_disk_allows() -> Iterator[None]:
    """Catch OSError, such as of a full disk, and print it: the last events are lost then, but not the exit code."""
    try:
        yield
    except OSError as error:
        print(f"could not be written to the run directory: {error}", flush=True)


def _exit(
    directory: Path, attempt: int, state: str, failure: Failure | None, fence: Callable[[], None] | None = None
) -> int:
    retryable = failure is not None and failure.retryable
    code = {"succeeded": EXIT_SUCCEEDED, "cancelled": EXIT_CANCELLED}.get(state, EXIT_FAILED)
    if retryable:
        code = EXIT_RETRYABLE
    document = {"code": code, "state": state, "retryable": retryable, "attempt": attempt, "time": utc_now()}
    if failure is not None:
        document |= {"error": {"code": failure.code, "message": failure.message, "remedy": failure.remedy}}
    with _as_far_as_the_disk_allows(), contextlib.suppress(LeaseLostError):
        write_json(directory / EXIT_FILE, document, fence=fence)
    return code


@contextlib.contextmanager
def _heartbeat(attempt: _Attempt) -> Iterator[None]:
    """Write heartbeats during the block; an attempt that has lost its lease is asked to stop."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk must not end the thread: space may come back
                if not attempt.run.still_current():
                    attempt.run.ask_to_stop("given up")
                    return
                attempt.beat()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A process that was killed holds the lock for some milliseconds after it has left the list of processes.
        end = time.monotonic() + LOCK_SECONDS
        while not _locked(descriptor):
            if time.monotonic() > end:
                raise RunBusyError(f"{directory}: another process is at work on this run; end it first")
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
