"""Link between ranks and driver if their hosts share no directory: a Ray actor on the driver's host.

A rank works in a directory of its own host. A thread of the rank sends the files of that directory (log, and events of
rank 0) to the actor. If the answer asks the rank to stop, the thread writes the cancel file into the directory, and the
rank, which checks for this file, stops.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.durable_files import write_file, write_json
from trainer.runs.directory import RUN_FILE, Run, read_run, revoke
from trainer.runs.events import EVENTS_FILE, whole_lines
from trainer.runs.protocol import LOG_FILE
from trainer.runs.working_directory import working_directory

NAMESPACE = "evenkeel"
SECONDS = 0.5
BATCH_BYTES = 2**20
ANSWER_SECONDS = 60.0


class Answer(NamedTuple):
    """The driver's answer to a rank.

    ``taken``: bytes of the file that the driver has. ``stop``: reason why the rank is to stop, if any. ``current``:
    True if the rank's attempt still holds the run's lease.
    """

    taken: int
    stop: str | None
    current: bool


class DriverEnd:
    """Actor on the driver's host: it writes data of ranks into the run directory, and answers with requests to stop."""

    def __init__(self, directory: str):
        self._run = read_run(directory)
        self._taken: dict[tuple[int, str], int] = {}

    def take(self, rank: int, file: str, offset: int, data: bytes) -> Answer:
        """Append data that a rank has at byte ``offset`` of one of its files; bytes taken before are skipped."""
        taken = self._taken.setdefault((rank, file), offset)
        if data and offset <= taken:
            fresh = data[taken - offset :]
            with open(self._run.directory / file, "ab", opener=_private) as target:
                target.write(fresh)
                target.flush()
                os.fsync(target.fileno())
            taken = self._taken[rank, file] = taken + len(fresh)
        stop = None
        with contextlib.suppress(FileNotFoundError):
            stop = self._run.cancel_file.read_text("utf-8")
        return Answer(taken, stop, self._run.still_current())

    def stopped(self, reason: str) -> None:
        """Ask all ranks to stop because one has stopped; ``reason``: its reason, such as the machine's preemption."""
        if not self._run.cancel_file.exists():
            self._run.ask_to_stop(reason)

    def failed(self, name: str, record: bytes) -> None:
        """Store a rank's own record of its failure."""
        self._run.failures.mkdir(parents=True, exist_ok=True)
        write_file(self._run.failures / name, record)


def start_driver_end(run: Run) -> Any:
    """Start and return the actor of an attempt, which lives on this host as long as this driver."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0)(DriverEnd)
    return actor.options(name=_name(run.run_id, run.attempt), namespace=NAMESPACE, scheduling_strategy=here).remote(
        str(run.directory)
    )


@contextlib.contextmanager
def linked_rank(document: dict[str, Any], rank: int) -> Iterator[Path]:
    """Yield the directory in which a rank of this host works, linked to the driver during the block.

    ``document`` is the driver's ``run.json``.
    """
    import ray

    directory = _take_up(document)
    run = read_run(directory)
    driver = ray.get_actor(_name(run.run_id, run.attempt), namespace=NAMESPACE)
    link = _RankEnd(run, rank, driver)
    link.start()
    try:
        yield directory
    finally:
        link.close()


def log_of(directory: Path, rank: int) -> Path:
    """Return the log file of a rank on this host."""
    return directory / f"log-{rank}.txt"


def _take_up(document: dict[str, Any]) -> Path:
    """Return this host's directory for an attempt's ranks, with its run.json. An earlier attempt loses its lease."""
    directory = working_directory(document["run_id"], "ranks")
    descriptor = os.open(directory / "take-up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            known = json.loads((directory / RUN_FILE).read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            known = {}
        if (known.get("attempt"), known.get("lease")) != (document["attempt"], document["lease"]) or not known:
            revoke(directory)
            write_json(directory / RUN_FILE, document)
    finally:
        os.close(descriptor)
    return directory


class _RankEnd:
    """Thread of a rank that sends its files to the driver."""

    def __init__(self, run: Run, rank: int, driver: Any):
        self._run, self._rank, self._driver = run, rank, driver
        files = {LOG_FILE: log_of(run.directory, rank)} | (
            {EVENTS_FILE: run.directory / EVENTS_FILE} if rank == 0 else {}
        )
        self._files = files
        # Data that earlier attempts left on this host are not sent again.
        self._at = {name: path.stat().st_size if path.exists() else 0 for name, path in files.items()}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="rank-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send the rest of the files, and the reason if the rank stopped or failed."""
        self._done.set()
        self._thread.join()
        if self._run.cancel_file.exists():
            self._ask("stopped", self._run.cancel_file.read_text("utf-8"))
        record = self._run.failures / f"rank-{self._rank:05d}.json"
        if record.exists():
            self._ask("failed", record.name, record.read_bytes())
        while self._hand_on():
            pass

    def _follow(self) -> None:
        from ray.exceptions import RayError

        while not self._done.wait(SECONDS):
            # A late answer or a full disk is temporary; if the driver is gone, Ray ends this process.
            with contextlib.suppress(RayError, OSError):
                self._hand_on()

    def _hand_on(self) -> bool:
        """Send one batch of each file; return True if there was any data."""
        more = False
        for name, path in self._files.items():
            batch = whole_lines(path, self._at[name], BATCH_BYTES)
            answer: Answer = self._ask("take", self._rank, name, self._at[name], batch)
            self._at[name] = answer.taken
            more = more or bool(batch)
            if answer.stop is not None and not self._run.cancel_file.exists():
                self._run.ask_to_stop(answer.stop)
            if not answer.current:
                self._run.given_up_file.touch()
        return more

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._driver, method).remote(*arguments), timeout=ANSWER_SECONDS)


def _name(run_id: str, attempt: int) -> str:
    return f"link-{run_id}-{attempt}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
