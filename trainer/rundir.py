"""The run directory: what ``run.json`` says, and the names of what lies beside it. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.launch import write_json
from trainer.spec import DatasetSpec, JobSpec, SpecError, parse_dataset, parse_job

RUN_FILE = "run.json"
CANCEL_FILE = "cancel"
LOCK_FILE = "run.lock"


@dataclass(frozen=True)
class Run:
    """One attempt at one job, and where it keeps its files. All paths are absolute."""

    directory: Path
    run_id: str
    attempt: int
    job: JobSpec
    dataset: DatasetSpec
    store_url: str
    parent_version: str | None = None
    init_checkpoint: str | None = None
    ray_address: str | None = None
    lease: dict[str, Any] | None = None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def failures(self) -> Path:
        """Where ranks of this attempt leave word of what went wrong."""
        return self.directory / "failures" / f"attempt-{self.attempt}"

    @property
    def cancel_file(self) -> Path:
        """Its presence asks the ranks to write a checkpoint and stop; it holds the reason."""
        return self.directory / f"{CANCEL_FILE}-{self.attempt}"

    def still_current(self) -> bool:
        """Whether run.json still names this attempt and lease: one that was given up must not publish."""
        try:
            document = json.loads((self.directory / RUN_FILE).read_text("utf-8"))
        except (OSError, ValueError):
            return False
        return document.get("attempt", 1) == self.attempt and document.get("lease") == self.lease


def read_run(directory: Path | str) -> Run:
    """Reads ``run.json``. Raises SpecError naming the file and the field that is missing or wrong."""
    folder = Path(directory).resolve()
    where = str(folder / RUN_FILE)
    try:
        document = json.loads((folder / RUN_FILE).read_text("utf-8"))
    except OSError as error:
        raise SpecError(where, [("", f"cannot be read: {error.strerror or error}")]) from None
    except ValueError as error:
        raise SpecError(where, [("", f"is not JSON: {error}")]) from None
    missing = [name for name in ("run_id", "job", "dataset", "store_url") if name not in document]
    if missing:
        raise SpecError(where, [(name, "is missing") for name in missing])
    dataset = parse_dataset(document["dataset"], where)
    job = parse_job(document["job"], where)
    try:
        job.against(dataset)
    except ValueError as error:
        raise SpecError(where, [("", str(error))]) from None
    return Run(
        directory=folder,
        run_id=str(document["run_id"]),
        attempt=int(document.get("attempt", 1)),
        job=job,
        dataset=dataset,
        store_url=str(document["store_url"]),
        parent_version=document.get("parent_version"),
        init_checkpoint=document.get("init_checkpoint"),
        ray_address=document.get("ray_address"),
        lease=document.get("lease"),
    )


def attempt_named(directory: Path | str) -> int:
    """The attempt that ``run.json`` names, also where the rest of it cannot be read; 1 where that cannot either."""
    try:
        return int(json.loads((Path(directory) / RUN_FILE).read_text("utf-8"))["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1


def choose_backend(num_gpus: float) -> str:
    """The process group's backend for workers with ``num_gpus`` GPUs each: nccl, with gloo for CPU tensors, or gloo."""
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
    ray_address: str | None = None,
    lease: dict[str, Any] | None = None,
) -> Path:
    """Makes the directory and its ``run.json``; returns the directory, absolute."""
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
            "ray_address": ray_address,
            "lease": lease,
        },
    )
    return folder
