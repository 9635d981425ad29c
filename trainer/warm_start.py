"""``init_from``: a job that goes on from another's last checkpoint (methods, section 3: how vectors are refreshed).

Old rows keep weight, moments and last_update_step, the step counter goes on, and the MLP with its optimizer is taken
over, so that what a row lost while it was idle in the old job still counts. Rows of new ids start from hash(id, seed),
or whatever the job's init says. Old ids keep their row numbers: the vocabulary is stored beside the checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from trainer.checkpoint import Checkpoint, CheckpointError, fsync_folder, latest_valid
from trainer.rundir import Run
from trainer.spec import JobSpec

if TYPE_CHECKING:
    from trainer.data import PreparedData

VOCABULARY_FOLDER = "vocabulary"


def parent_checkpoint(run: Run) -> Checkpoint | None:
    """The checkpoint that the run starts from, if any. ``init_checkpoint`` names it, or a folder of checkpoints, of
    which the newest valid one is taken. Raises CheckpointError, with the remedy, where there is none."""
    if run.init_checkpoint is None:
        return None
    path = Path(run.init_checkpoint)
    if (path / "manifest.json").exists():
        checkpoint: Checkpoint | None = Checkpoint(path)
    else:
        checkpoint = latest_valid(path)
    if checkpoint is None:
        raise CheckpointError(
            f"init_from: {path} holds no valid checkpoint: name a job that has one, or leave init_from out"
        )
    return checkpoint


def save_vocabulary(data: PreparedData, folder: Path) -> dict[str, str]:
    """Copies the ids that rows stand for beside the checkpoints, once; returns sha256 by table."""
    digests = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in data.tables.items():
        target = folder / f"{name}.arrow"
        digests[name] = _sha256(table.vocabulary_path)
        if target.exists() and _sha256(target) == digests[name]:
            continue
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        shutil.copyfile(table.vocabulary_path, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    fsync_folder(folder)
    return digests


def base_vocabulary(checkpoint: Checkpoint) -> dict[str, pa.Array]:
    """Raw ids by table, row r >= 2 being entry r - 2, as they were when the checkpoint was written.

    Raises CheckpointError if they are missing or changed: rows would be taken for other ids.
    """
    found = {}
    for name, digest in checkpoint.extra["vocabulary"].items():
        path = checkpoint.path.parent / VOCABULARY_FOLDER / f"{name}.arrow"
        if not path.exists() or _sha256(path) != digest:
            raise CheckpointError(
                f"init_from: {path} is missing or is not the vocabulary of {checkpoint.path.name}: "
                "train the parent job again, or leave init_from out"
            )
        with pa.memory_map(str(path)) as file:
            found[name] = pa.ipc.open_file(file).get_batch(0).column(0)
    return found


def rows_of_parent(data: PreparedData, parent: Checkpoint) -> dict[str, torch.Tensor]:
    """By table, the parent's row that each row continues, int64 [num_rows], -1 for rows of new ids."""
    found = {}
    for name, table in data.tables.items():
        rows = torch.arange(table.num_rows)
        found[name] = torch.where(rows < parent.tables[name], rows, -1)
    return found


def check_fits(job: JobSpec, data: PreparedData, parent: Checkpoint) -> None:
    """That the job's model can take over the parent's rows and MLP. Raises ValueError naming the field."""
    theirs, mine = parent.extra["job"]["model"], job.model_dump(mode="json")["model"]
    for field in ("kind", "embedding_dim", "hidden"):
        if mine[field] != theirs[field]:
            raise ValueError(
                f"model.{field}: the parent was trained with {theirs[field]}, the job asks for {mine[field]}: "
                "use the same, or leave init_from out"
            )
    if parent.tables.keys() != data.tables.keys():
        raise ValueError(
            f"init_from: the parent has tables for {', '.join(sorted(parent.tables))}, the dataset's features have "
            f"{', '.join(sorted(data.tables))}: use the same features, or leave init_from out"
        )


def inherited_alpha(job: JobSpec, parent: dict[str, Any]) -> float | None:
    """AdamAR's alpha of a warm start: the tables' own, since what an idle row lost depends on it. ``parent`` is the
    checkpoint's ``extra``. Raises ValueError where the job asks for another optimizer, batch size or alpha, or for
    other settings of what momentum owes idle rows."""
    if job.optimizer.kind != parent["optimizer"]:
        raise ValueError(
            f"optimizer.kind: the parent's rows were trained with {parent['optimizer']} and keep its state, "
            f"the job asks for {job.optimizer.kind}: use the same, or leave init_from out"
        )
    _check_momentum(job, parent["job"]["optimizer"])
    alpha = parent["alpha"]
    if alpha is None:
        return None
    if job.batch_size != parent["batch_size"]:
        raise ValueError(
            f"batch_size: alpha and the ages of rows are counted in steps of {parent['batch_size']} examples, the job "
            f"asks for {job.batch_size}: a change on a warm start is not available yet; use the same, or leave "
            "init_from out"
        )
    if job.optimizer.alpha not in ("default", alpha):
        raise ValueError(
            f"optimizer.alpha: the parent's rows decay with {alpha:g}, the job asks for {job.optimizer.alpha}: "
            "use default (it is inherited), or leave init_from out"
        )
    return float(alpha)


def _check_momentum(job: JobSpec, theirs: dict[str, Any]) -> None:
    """A row's idle movement is computed when it is read: other settings would move every idle row at once."""
    if job.optimizer.kind not in ("adam", "adam_ar"):
        return
    mine = job.optimizer.model_dump(mode="json")
    of_movement = ("learning_rate", "beta1", "beta2", "eps") if theirs["moments"] == "dense" else ()
    for field in ("moments", *of_movement):
        if mine[field] != theirs[field]:
            raise ValueError(
                f"optimizer.{field}: what momentum owes the parent's idle rows is counted with {theirs[field]}, the "
                f"job asks for {mine[field]}: a change on a warm start is not available yet; use the same, or leave "
                "init_from out"
            )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
