"""Failures of runs: a code, a message and a remedy for the owner, and a flag that is True if a retry may help.

Ranks record failures in files, because no exception reaches the driver from a rank that was killed. The ranks that
waited for it then fail with a broken connection, which is a consequence and not the cause.
"""

from __future__ import annotations

import contextlib
import errno
import json
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embeddings.durable_files import write_json
from trainer.data.errors import DataAwayError, DataError
from trainer.spec import SpecError
from trainer.storage.base import StorageError


class NonFiniteError(ValueError):
    """The loss or a gradient is not finite; the step was not applied on any rank.

    ``step`` counts from 1. ``names``: the tables and dense parameters whose gradients are not finite, or ``loss``.
    """

    def __init__(self, step: int, names: tuple[str, ...]):
        self.step = step
        self.names = names
        super().__init__(f"step {step}: not finite in {', '.join(names)}; nothing of this step was applied")

    def __reduce__(self) -> tuple[Any, ...]:
        return NonFiniteError, (self.step, self.names)


class Cancelled(Exception):
    """The run was asked to stop (``reason``) and did so at a consistent point."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


class LeaseLostError(RuntimeError):
    """This attempt no longer holds the run's lease, so it must not publish or change files of the run."""


class ServiceAwayError(RuntimeError):
    """A run on another machine cannot reach its service."""


class ResourceError(RuntimeError):
    """The resources for a run are missing: a Ray cluster cannot be reached, or has too few CPUs or GPUs."""


@dataclass(frozen=True)
class Failure:
    """Fields of an error event; ``retryable`` is True if the same job may succeed when tried again."""

    code: str
    message: str
    remedy: str
    retryable: bool = False


TRACEBACK_FILE = "traceback.txt"
"""File in the run directory with the traceback of the last error that users can mend themselves."""
CONSEQUENCES = ("peer_lost", "internal")
"""Codes of failures that may be consequences of another rank's death."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "can't start new thread")
_GROUP = "process group"
_CONNECTION = ("gloo", "connection closed by peer", "connection reset by peer", "broken pipe", _GROUP)


def classify(error: BaseException) -> Failure:
    """Return the failure to report to the job's owner for this exception."""
    message = str(error) or type(error).__name__
    if isinstance(error, NonFiniteError):
        remedy = "lower learning_rate or dense_optimizer.learning_rate, or look for extreme values in the data"
        return Failure("non_finite", message, remedy)
    full = next((e for e in (error, error.__cause__) if isinstance(e, OSError) and e.errno in _DISK_FULL), None)
    if full is not None or type(error).__name__ == "StoreFull":
        return Failure("disk_full", message, "free space where the run directory and the store are, then retry", True)
    if isinstance(error, DataError):
        what = f"{error.where}: {error.what}"
        return Failure(error.code, what, error.remedy, retryable=isinstance(error, DataAwayError))
    if isinstance(error, SpecError):
        return Failure("bad_spec", message, "correct the field that is named and submit again")
    if isinstance(error, ResourceError):
        return Failure("no_resources", message, "see `evenkeel doctor`", retryable=True)
    if isinstance(error, ServiceAwayError):
        remedy = "check that the cluster reaches the service at EVENKEEL_INTERNAL_URL; the checkpoints are kept"
        return Failure("service_away", message, remedy, retryable=True)
    if isinstance(error, StorageError):
        return Failure("storage", message, "see the message; files stored before are kept", retryable=True)
    if isinstance(error, LeaseLostError):
        return Failure("given_up", message, "look at the run's newer attempt")
    of_memory = isinstance(error, (RuntimeError, OSError)) and any(words in message.lower() for words in _NO_MEMORY)
    if isinstance(error, MemoryError) or of_memory:
        return Failure("out_of_memory", message, "use more workers, smaller embedding_dim or a smaller batch_size")
    if type(error).__name__ == "StaleParent":
        return Failure("stale_parent", message, "another version was published meanwhile: submit the job again")
    if type(error).__name__ == "CheckpointError" and "No space left" in message:
        return Failure("disk_full", message, "free space where the run directory is, then retry", True)
    if _is_of_a_lost_peer(error) or (type(error).__name__ == "CheckpointError" and _is_of_a_lost_peer(error.__cause__)):
        return Failure("peer_lost", message, "", retryable=True)
    if type(error).__name__ == "CheckpointError":
        return Failure("checkpoint", message, "see the message; the newest valid checkpoint is used on retry", True)
    if type(error).__name__ == "FormatVersionError":
        return Failure("checkpoint", message, "another attempt with this version would fail in the same way")
    if type(error).__name__ == "StoreBusy":
        return Failure("store_busy", message, "end the writer that is stuck; what was trained is kept", True)
    if type(error).__name__ == "StoreUnavailable":
        remedy = "check that the store's server runs and accepts writes; the checkpoints are kept"
        return Failure("store_away", message, remedy, retryable=True)
    if type(error).__name__ == "SinkBehind":
        return Failure("sink_behind", message, "the version is published; see the message for its sinks")
    if isinstance(error, PermissionError):
        return Failure("not_permitted", message, "let the user that the run has read and write there, then retry")
    if isinstance(error, FileNotFoundError):
        return Failure("not_found", message, "check the path")
    if isinstance(error, ValueError):
        return Failure("bad_input", message, "correct what the message names")
    if isinstance(error, OSError):
        return Failure("io_error", message, "check the disk that is named; the job is tried again", retryable=True)
    return Failure("internal", f"{type(error).__name__}: {message}", "see the run's log; this is a fault of evenkeel")


def _is_of_a_lost_peer(error: BaseException | None) -> bool:
    """Return True if the error follows from the loss of another rank, or from the end of the process group after it."""
    if isinstance(error, ValueError):
        return _GROUP in str(error).lower()
    if type(error).__name__ in ("DistNetworkError", "DistStoreError"):  # of torch.distributed: the ranks' store
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in _CONNECTION)


def record(folder: Path, rank: int, error: BaseException) -> None:
    """Record the error of a rank; called by the rank that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"rank-{rank:05d}.json", asdict(classify(error)))


def keep_traceback(directory: Path, error: BaseException, failure: Failure) -> None:
    """Print the traceback of an internal error or a lost peer; write that of any other error to a file of the run.

    The message of any other error explains it, and appears without a traceback in the log and the terminal.
    """
    if failure.code in CONSEQUENCES:
        traceback.print_exception(error)
        return
    with contextlib.suppress(OSError):  # a full disk
        (directory / TRACEBACK_FILE).write_text("".join(traceback.format_exception(error)), "utf-8")


def cause(folder: Path, error: BaseException, died: bool = False) -> Failure:
    """Return the one failure that explains the end of a run.

    The cause is a failure that a rank recorded in ``folder``, else the death of a worker that recorded nothing.
    ``error`` is the driver's error. If it is the death of a rank (``died``), unclassified errors of other ranks count
    as consequences.
    """
    failures = []
    for path in sorted(folder.glob("rank-*.json")):
        fields = json.loads(path.read_text("utf-8"))
        failures.append(Failure(**fields))
    known = [failure for failure in failures if failure.code not in CONSEQUENCES]
    internal = [failure for failure in failures if failure.code == "internal" and not died]
    for failure in (*known, *internal):
        return failure
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return Failure(
        "worker_died",
        f"a worker ended without an error message: {first_line}",
        "the job is tried again; if it keeps failing, look for the kernel's out-of-memory killer and see the run's log",
        retryable=True,
    )
