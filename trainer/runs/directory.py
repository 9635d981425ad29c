"""The run directory: the contents of ``run.json``, and the names of the other files. Does not import torch.

**The fence.** ``run.json`` names the attempt that holds the lease of the directory. Files that outlive an attempt
(checkpoints, prepared data, ``exit.json``, a version) are written under a temporary name. Then the lease is checked,
and the file is renamed to its final name. :func:`revoke`, which takes the lease away, changes ``run.json`` first and
then removes temporary files. So an attempt that is suspended anywhere in between and wakes later either sees that the
lease is gone, or finds nothing left to rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.durable_files import write_file, write_json
from trainer.runs.failures import LeaseLostError
from trainer.spec import DatasetSpec, JobSpec, SpecError, parse_dataset, parse_job
from trainer.spec.problems import FieldProblem, InvalidFieldsError
from trainer.spec.stored_specs import to_run
from trainer.storage.folders import Folders
from trainer.storage.storage_registry import open_storage

RUN_FILE = "run.json"
CANCEL_FILE = "cancel"
LOCK_FILE = "run.lock"
CHECKPOINTS = "checkpoints"
BEST = "best"
DATA_PARTS = ".data.parts"
"""Folder of the parts of an unfinished preparation (trainer.data.prepare.part_cache)."""
TASK_RESULTS = "parts"
"""Folder of the results of preparation tasks, if the run has no storage (trainer.data.prepare.by_tasks)."""
REVOKED = {"revoked": True}
THIS_CLUSTER = "auto"
"""Ray address that stands for the cluster that has started this run as one of its jobs."""
WRITING = ".writing-"
UNFINISHED = (".*.tmp", ".*.preparing", f"{CHECKPOINTS}/{WRITING}*", f"{BEST}/{WRITING}*")
"""Patterns of files that do not have their final name yet."""


class Report(NamedTuple):
    """Address to which a run on another machine reports its events (trainer.runs.uplink).

    ``url`` is the service's route for this run, ``token`` the attempt's credential. ``offset`` is the size of the
    service's event file, to which the events of this attempt are appended.
    """

    url: str
    token: str
    offset: int


class Workers(NamedTuple):
    """Number of workers of an attempt, and the reason if they are fewer than the job asks for."""

    number: int
    because: str | None = None


@dataclass(frozen=True)
class Run:
    """One attempt at one job, and the paths of its files, all absolute."""

    directory: Path
    run_id: str
    attempt: int
    job: JobSpec
    """The job with the number of workers of this attempt; ``submitted`` is the job as submitted."""
    submitted: JobSpec
    dataset: DatasetSpec
    store_url: str
    parent_version: str | None = None
    init_checkpoint: str | None = None
    start_version: str | None = None
    """The held version whose run wrote ``init_checkpoint``; None if that run's version was served or does not exist."""

    served_checkpoint: str | None = None
    """Location of checkpoints of the run that published ``parent_version``; None if they are not kept."""

    ray_address: str | None = None
    lease: dict[str, Any] | None = None
    report: Report | None = None
    traceparent: str | None = None
    storage: str | None = None
    """Storage of the run's checkpoints and prepared data for all hosts, ``s3://BUCKET/PREFIX/RUN``; None if all hosts
    see ``directory``."""

    fewer_because: str | None = None
    """Reason why the attempt has fewer workers than the job asks for."""

    def with_workers(self, number: int, because: str | None = None) -> Run:
        """Return this attempt with ``number`` workers; ``because``: the reason if they are fewer than requested."""
        return replace(self, job=self.submitted.with_workers(number), fewer_because=because or self.fewer_because)

    @property
    def has_fewer_workers(self) -> bool:
        return self.job.resources.num_workers < self.submitted.resources.num_workers

    @property
    def cluster(self) -> str | None:
        """HOST:PORT of the Ray cluster that the ranks join; None if they run on this host, without Ray."""
        return os.environ["RAY_ADDRESS"] if self.ray_address == THIS_CLUSTER else self.ray_address

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def checkpoints(self) -> Path:
        return self.directory / CHECKPOINTS

    @property
    def staging(self) -> Path:
        """Folder of rank 0's files that will become part of a checkpoint."""
        return self.directory / "growing"

    @property
    def best(self) -> Path:
        """Folder of the separate checkpoint after the best epoch, for jobs with early stopping."""
        return self.directory / BEST

    def folders(self, directory: Path) -> Folders | None:
        """Return the folders of the run's storage that belong to ``directory``; None if the run has no storage.

        ``directory`` must be the run's local folder ``data``, ``checkpoints`` or ``best``.
        """
        return None if self.storage is None else Folders(open_storage(self.storage), directory.name)

    @property
    def failures(self) -> Path:
        """Folder in which ranks of this attempt record their failures."""
        return self.directory / "failures" / f"attempt-{self.attempt}"

    @property
    def cancel_file(self) -> Path:
        """File that asks the ranks to write a checkpoint and stop; it contains the reason."""
        return self.directory / f"{CANCEL_FILE}-{self.attempt}"

    def ask_to_stop(self, reason: str) -> None:
        """Write ``cancel_file`` with the reason; ranks look for it at every step."""
        write_file(self.cancel_file, reason.encode(), durable=False)

    @property
    def given_up_file(self) -> Path:
        """File whose existence means that the service, on another machine, has given up this attempt."""
        return self.directory / f"given-up-{self.attempt}"

    def still_current(self) -> bool:
        """Return True if run.json still names this attempt and lease; otherwise the attempt must write nothing."""
        try:
            document = json.loads((self.directory / RUN_FILE).read_text("utf-8"))
        except (OSError, ValueError):
            return False
        lease = document.get("lease")
        if self.given_up_file.exists():
            return False
        return document.get("attempt", 1) == self.attempt and lease == self.lease and lease != REVOKED

    def fence(self) -> None:
        """Check that this attempt still has its lease.

        Raises:
            LeaseLostError: the lease is lost.
        """
        if not self.still_current():
            raise LeaseLostError(
                f"attempt {self.attempt} of run {self.run_id} was given up: it writes nothing any more"
            )


def revoke(directory: Path | str) -> None:
    """Take the lease from the attempt of this directory.

    From now on the attempt changes no checkpoint, no data and no ``exit.json``, and publishes nothing, even if it is
    suspended now and wakes later. The attempt's processes are not ended. A second call does nothing.
    """
    folder = Path(directory).resolve()
    try:
        document = json.loads((folder / RUN_FILE).read_text("utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        document = {}
    if document.get("lease") != REVOKED:
        write_json(folder / RUN_FILE, document | {"lease": REVOKED})
    for pattern in UNFINISHED:
        for path in folder.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    # Its process may hold the lock for as long as it is suspended: the next attempt uses another lock file.
    with contextlib.suppress(FileNotFoundError):
        (folder / LOCK_FILE).unlink()


def read_run(directory: Path | str, *, stored: bool = False) -> Run:
    """Return the run that ``run.json`` of a directory describes.

    ``stored``: True to read a run of an older version without continuing it. Settings that no longer exist are then
    dropped instead of refused.

    Raises:
        SpecError: the file cannot be read, or a field is missing or wrong; the error names both.
    """
    folder = Path(directory).resolve()
    where = str(folder / RUN_FILE)
    try:
        document = json.loads((folder / RUN_FILE).read_text("utf-8"))
    except OSError as error:
        raise SpecError(where, [FieldProblem("", f"cannot be read: {error.strerror or error}")]) from None
    except ValueError as error:
        raise SpecError(where, [FieldProblem("", f"is not JSON: {error}")]) from None
    missing = [name for name in ("run_id", "job", "dataset", "store_url") if name not in document]
    if missing:
        raise SpecError(where, [FieldProblem(name, "is missing") for name in missing])
    document["job"] = to_run(document["job"])
    dataset = parse_dataset(document["dataset"], where)
    job = parse_job(document["job"], where, stored=stored)
    try:
        job.against(dataset)
    except InvalidFieldsError as error:
        raise SpecError(where, error.problems) from None
    workers = document.get("workers") or {"number": job.resources.num_workers, "because": None}
    return Run(
        directory=folder,
        run_id=str(document["run_id"]),
        attempt=int(document.get("attempt", 1)),
        job=job.with_workers(int(workers["number"])),
        submitted=job,
        fewer_because=workers["because"],
        dataset=dataset,
        store_url=str(document["store_url"]),
        parent_version=document.get("parent_version"),
        init_checkpoint=document.get("init_checkpoint"),
        start_version=document.get("start_version"),
        served_checkpoint=document.get("served_checkpoint"),
        ray_address=document.get("ray_address"),
        lease=document.get("lease"),
        report=Report(**document["report"]) if document.get("report") else None,
        traceparent=document.get("traceparent"),
        storage=document.get("storage"),
    )


def attempt_named(directory: Path | str) -> int:
    """Return the attempt that ``run.json`` names, even if other entries are invalid; 1 if it cannot be read."""
    try:
        return int(json.loads((Path(directory) / RUN_FILE).read_text("utf-8"))["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1


def choose_backend(num_gpus: float) -> str:
    """Return torch's process group backend for workers with ``num_gpus`` GPUs each.

    With GPUs it is nccl for CUDA tensors and gloo for CPU tensors, without GPUs gloo.
    """
    return "cpu:gloo,cuda:nccl" if num_gpus > 0 else "gloo"


def write_run(
    directory: Path | str,
    *,
    run_id: str,
    job: JobSpec,
    dataset: DatasetSpec,
    store_url: str,
    attempt: int = 1,
    parent_version: str | None = None,
    init_checkpoint: str | None = None,
    start_version: str | None = None,
    served_checkpoint: str | None = None,
    ray_address: str | None = None,
    lease: dict[str, Any] | None = None,
    report: Report | None = None,
    traceparent: str | None = None,
    storage: str | None = None,
    workers: Workers | None = None,
) -> Path:
    """Make the directory and its ``run.json``; return the directory's absolute path.

    Each keyword is an entry of the file.
    """
    folder = Path(directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / RUN_FILE,
        {
            "run_id": run_id,
            "attempt": attempt,
            "job": job.model_dump(mode="json"),
            "dataset": dataset.model_dump(mode="json"),
            "store_url": store_url,
            "parent_version": parent_version,
            "init_checkpoint": init_checkpoint,
            "start_version": start_version,
            "served_checkpoint": served_checkpoint,
            "ray_address": ray_address,
            "lease": lease,
            "report": None if report is None else report._asdict(),
            "traceparent": traceparent,
            "storage": storage,
        }
        | ({} if workers is None else {"workers": workers._asdict()}),
    )
    return folder
