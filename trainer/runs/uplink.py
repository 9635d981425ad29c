"""Reports of a run on another machine to the service, over HTTP (docs/adr/0026). Does not import torch.

The run's own event file is authoritative. A thread follows it and sends whole lines, in order. Each batch has the
offset that it must have in the service's copy of the file, and the answer has the size of that copy. So a batch that is
sent twice is stored once. After an outage of the service the thread continues from the file, and memory holds only one
batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from embeddings.durable_files import write_json
from trainer.runs.directory import RUN_FILE, Run, revoke
from trainer.runs.events import EVENTS_FILE, EventWriter, read_events, whole_lines
from trainer.runs.failures import LeaseLostError, ServiceAwayError
from trainer.runs.protocol import EXIT_FILE, LOG_FILE

PLACES_FILE = "uplink.json"
STAMPS = ("type", "time", "attempt")
BATCH_BYTES = 2**18
POLL_SECONDS = 0.5
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
ANSWER_SECONDS = 30.0
PATIENCE_SECONDS = 1800.0
"""Longest time that a run waits for an unreachable service: at its start, before it publishes, and at its end."""


class Service:
    """Client of the service for one attempt.

    ``url`` is ``http://HOST:PORT/internal/runs/RUN``, and ``token`` the attempt's credential.
    """

    def __init__(self, url: str, token: str):
        self.url = url
        self.token = token
        import httpx

        self._client = httpx.Client(timeout=ANSWER_SECONDS, verify=ssl.create_default_context(), trust_env=False)

    def close(self) -> None:
        self._client.close()

    def ask(self, method: str, path: str = "", **options: Any) -> dict[str, Any]:
        """Send a request to the service, and return the JSON object of the answer, {} for an answer without content.

        ``path`` is appended to ``url``; ``options`` are httpx's.

        Raises:
            LeaseLostError: the attempt no longer holds the run's lease.
            ServiceAwayError: there is no answer, or not the service's, such as a gateway's error page.
        """
        import httpx

        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            answer = self._client.request(method, self.url + path, headers=headers, **options)
        except httpx.HTTPError as error:
            message = f"the service does not answer at {self.url}: {str(error) or type(error).__name__}"
            raise ServiceAwayError(message) from error
        if answer.status_code == 409:
            raise LeaseLostError(f"the service has given this attempt up: {answer.text[:300]}")
        if not answer.is_success:
            raise ServiceAwayError(f"the service answers {self.url} with {answer.status_code}: {answer.text[:300]}")
        try:
            document = {} if answer.status_code == httpx.codes.NO_CONTENT else answer.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise ServiceAwayError(f"what answers at {self.url} is not the service: {answer.text[:300]}")
        return document

    def insist(self, method: str, path: str = "", **options: Any) -> dict[str, Any]:
        """Call :meth:`ask`, again and again for PATIENCE_SECONDS if the service cannot be reached."""
        return patiently(lambda: self.ask(method, path, **options))


def patiently(action: Callable[[], Any]) -> Any:
    """Return the result of ``action``, which is repeated while it raises ServiceAwayError.

    Raises:
        ServiceAwayError: ``action`` still raises it after PATIENCE_SECONDS.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    wait = FIRST_WAIT_SECONDS
    while True:
        try:
            return action()
        except ServiceAwayError:
            if time.monotonic() + wait > deadline:
                raise
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)


@contextlib.contextmanager
def service_of(run: Run) -> Iterator[Service]:
    """Yield a client of the service with the newest token, which is in run.json, because tokens are renewed there.

    ``run.report`` must not be None.
    """
    document = json.loads((run.directory / RUN_FILE).read_text("utf-8"))
    with contextlib.closing(Service(document["report"]["url"], document["report"]["token"])) as service:
        yield service


def fetch_run(directory: Path, url: str, token: str) -> None:
    """Make the run directory, with the attempt's ``run.json`` from the service in it.

    An earlier attempt in the same directory loses its lease.

    Raises:
        LeaseLostError: the attempt no longer holds the run's lease.
        ServiceAwayError: the service cannot be reached.
    """
    with contextlib.closing(Service(url, token)) as service:
        document = service.insist("GET")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    revoke(directory)
    write_json(directory / RUN_FILE, document)


def fence(run: Run) -> None:
    """Check, before a version is published, that the attempt still holds the run's lease.

    Raises:
        LeaseLostError: it does not hold the lease, according to run.json or the service.
        ServiceAwayError: the service cannot be reached.
    """
    run.fence()
    if run.report is not None:
        with service_of(run) as service:
            service.insist("GET", "/current")


@contextlib.contextmanager
def reporting(run: Run) -> Iterator[None]:
    """Send the events of the run to the service during the block, if the run is on another machine (``run.report``)."""
    if run.report is None:
        yield
        return
    uplink = Uplink(run)
    uplink.start()
    try:
        yield
    finally:
        uplink.close()


class Uplink:
    """Thread that follows the event file of one attempt from its first event on, until :meth:`close`."""

    def __init__(self, run: Run):
        assert run.report is not None
        self._run = run
        self._service = Service(run.report.url, run.report.token)
        self._events = run.directory / EVENTS_FILE
        self._begin = self._at = _size(self._events)
        self._base = run.report.offset
        self._log = run.directory / LOG_FILE
        self._log_at = _size(self._log)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="uplink", daemon=True)

    def start(self) -> None:
        self._tell_missed()
        self._remember()
        self._thread.start()

    def _tell_missed(self) -> None:
        """Write again the metrics of epochs that an earlier attempt on this host could not send to the service.

        This attempt continues from a checkpoint, so it does not train these epochs again.
        """
        try:
            earlier = json.loads((self._run.directory / PLACES_FILE).read_text("utf-8"))
            missed = earlier["begin"] + self._base - earlier["base"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if not 0 <= missed < self._begin:
            return
        events = EventWriter(self._run.directory, self._run.attempt)
        for event in list(read_events(self._run.directory, missed)):
            if event.end <= self._begin and event.fields["type"] == "metric":
                events.write("metric", **{name: said for name, said in event.fields.items() if name not in STAMPS})
        events.close()

    def _remember(self) -> None:
        """Write PLACES_FILE, which maps offsets in the service's copy to offsets in the run's event file.

        The next attempt reads it. If the disk is full, it may send an epoch twice, or not at all.
        """
        with contextlib.suppress(OSError):
            write_json(self._run.directory / PLACES_FILE, {"begin": self._begin, "base": self._base})

    def close(self) -> None:
        """Send all remaining events; wait up to PATIENCE_SECONDS for an unreachable service."""
        self._done.set()
        self._thread.join()
        try:
            if not self._run.given_up_file.exists():
                patiently(self._finish)
        except LeaseLostError:
            self._run.given_up_file.touch()
        except (ServiceAwayError, OSError) as error:
            print(f"the service could not be told how this attempt ended: {error}", flush=True)
        finally:
            self._echo()
            self._service.close()

    def _follow(self) -> None:
        wait = FIRST_WAIT_SECONDS
        while not self._done.is_set():
            try:
                self._echo()
                more = self._hand_on()
                wait = FIRST_WAIT_SECONDS
                self._done.wait(0 if more else POLL_SECONDS)
            except (ServiceAwayError, OSError):
                self._done.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)
            except LeaseLostError:
                self._run.given_up_file.touch()
                return

    def _finish(self) -> None:
        # Sent before the last event, because that event does not say if a retry may help.
        exit_file = self._run.directory / EXIT_FILE
        if exit_file.exists():
            self._service.ask("PUT", "/exit", content=exit_file.read_bytes())
        while self._hand_on():
            pass

    def _hand_on(self) -> bool:
        """Send one batch of events; return False if there was nothing to send."""
        batch = whole_lines(self._events, self._at, BATCH_BYTES)
        if not batch:
            return False
        offset = self._base + self._at - self._begin
        answer = self._service.ask("POST", "/events", params={"offset": offset}, content=batch)
        there = answer.get("offset")
        if not isinstance(there, int):
            raise ServiceAwayError(f"what answers at {self._service.url} is not the service: {answer}")
        if answer.get("token"):
            self._renew(answer["token"])
        if 0 <= there - self._base <= _size(self._events) - self._begin:
            self._at = self._begin + there - self._base
        else:
            # The copy is no longer one of this file (a restored backup): continue at the copy's end.
            self._base = there - (self._at - self._begin)
            self._remember()
        return True

    def _renew(self, token: str) -> None:
        try:
            document = json.loads((self._run.directory / RUN_FILE).read_text("utf-8"))
            document["report"]["token"] = token
            with contextlib.suppress(LeaseLostError):
                write_json(self._run.directory / RUN_FILE, document, fence=self._run.fence)
        except OSError:
            return  # keep the old token: the next answer brings a new one again
        self._service.token = token

    def _echo(self) -> None:
        """Copy new lines of the ranks' log file to stdout: on a cluster the service reads the driver's output."""
        try:
            with open(self._log, "rb") as file:
                if os.path.samestat(os.fstat(file.fileno()), os.fstat(1)):
                    return  # stdout is the log file itself
                file.seek(self._log_at)
                while text := file.read(BATCH_BYTES):
                    self._log_at += len(text)
                    os.write(1, text)
        except OSError:
            return


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
