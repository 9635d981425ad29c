"""``init_from``: a job that continues from another's last checkpoint.

Old rows keep weight, moments and last_update_step, the step counter goes on, and the MLP with its optimizer is taken
over. So the decay that an idle row is due from the old job is still applied. Rows of new ids start from
hash(id, seed), or as the job's init says; ids unseen for too long lose their rows (docs/adr/0045). The map from rows to
ids is part of the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import ValidationError

from embeddings.optim import RowOptimizer
from embeddings.optim.registry import KINDS
from trainer.checkpoint.format import Checkpoint, CheckpointError, latest_valid
from trainer.checkpoint.record import TrainingRecord
from trainer.checkpoint.remote_checkpoints import MANIFEST_FILE, show
from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.columns.numeric import NUMERIC_FILE, Numeric, open_numeric
from trainer.data.columns.vectors import VECTORS_FILE, Vector, open_vectors
from trainer.data.prepare.drift import PROFILE_FILE, open_profile
from trainer.runs.directory import Run
from trainer.runs.inheritance import Inheritance, check_columns, inherit
from trainer.spec import DatasetSpec, JobSpec, parse_dataset
from trainer.spec.optimizer import Optimizer
from trainer.spec.reading import problems_of
from trainer.spec.row_optimizer import row_optimizer
from trainer.spec.stored_specs import read, with_former_defaults
from trainer.storage.folders import Folders
from trainer.storage.storage_registry import open_storage

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData


PARENT = "parent"
"""Folder of a run's directory with views of stored checkpoints that it starts from."""
SERVED = "served"
"""Folder of a run's directory with views of stored checkpoints of the served version's run."""


def parent_checkpoint(run: Run) -> Checkpoint | None:
    """Return the checkpoint that the run starts from, if any.

    ``init_checkpoint`` names it, or a folder of checkpoints, here or in a run storage, of which the newest valid one is
    taken.

    Raises:
        CheckpointError: there is none; the message has the remedy.
        StorageError: the storage is away.
    """
    if run.init_checkpoint is None:
        return None
    checkpoint = newest_at(run.init_checkpoint, run.directory / PARENT)
    if checkpoint is None:
        raise CheckpointError(
            f"init_from: {run.init_checkpoint} holds no valid checkpoint: name a job that has one, or leave init_from "
            "out"
        )
    return checkpoint


def newest_at(location: str, view: Path) -> Checkpoint | None:
    """Return the checkpoint at ``location``, or the newest valid one of a folder; None if there is none.

    ``location`` is a local path, or in a run storage, whose checkpoints appear in the local folder ``view``.

    Raises:
        StorageError: the storage is away.
    """
    path = Path(location)
    if "://" in location:
        uri, _, prefix = location.rpartition("/")
        path = view
        show(Folders(open_storage(uri), prefix), path)
    return Checkpoint(path) if (path / MANIFEST_FILE).exists() else latest_valid(path)


def id_map_file(table: str) -> str:
    """Return the name under which a checkpoint has the id map of a table."""
    return f"ids-{table}.arrow"


def id_map_files(data: PreparedData) -> dict[str, Path]:
    """Return id maps, statistics of numbers, the vectors and the profile of the rows, by name in checkpoints."""
    found = {id_map_file(name): table.vocabulary_path for name, table in data.tables.items()}
    others = {NUMERIC_FILE: data.numeric_path, PROFILE_FILE: data.profile_path, VECTORS_FILE: data.vectors_path}
    return found | {name: path for name, path in others.items() if path is not None}


def numeric_features(checkpoint: Checkpoint) -> tuple[Numeric, ...]:
    """Return the numeric features that the checkpoint's model reads, with their statistics."""
    path = checkpoint.attached(NUMERIC_FILE)
    return () if path is None else open_numeric(path)


def vectors_read(checkpoint: Checkpoint) -> tuple[Vector, ...]:
    """Return the vectors that the checkpoint's model reads."""
    path = checkpoint.attached(VECTORS_FILE)
    return () if path is None else open_vectors(path)


def profile_of_rows(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the profile of the rows that the checkpoint was trained on, None where an older version wrote it."""
    path = checkpoint.attached(PROFILE_FILE)
    return None if path is None else open_profile(path)


def id_maps(checkpoint: Checkpoint) -> dict[str, IdMap]:
    """Return, by table, the ids that its rows stand for.

    Raises:
        CheckpointError: the checkpoint has none.
    """
    found = {}
    for name in checkpoint.tables:
        path = checkpoint.attached(id_map_file(name))
        if path is None:
            raise CheckpointError(
                f"init_from: {checkpoint.path} does not say which ids the rows of '{name}' stand for, because an older "
                "version wrote it: train the parent job again, or leave init_from out"
            )
        found[name] = IdMap.read(path)
    return found


def inheritance_of(job: JobSpec, dataset: DatasetSpec, parent: Checkpoint) -> Inheritance:
    """Return the parts of a checkpoint that a job takes over.

    Raises:
        InvalidFieldsError: it does not fit, naming each field.
    """
    found = inherit(job, dataset, TrainingRecord.of(parent).job, dataset_of(parent))
    missing = sorted({*found.tables.values()} - parent.tables.keys())
    if missing:
        raise ValueError(
            f"init_from: {parent.path} has tables for {', '.join(sorted(parent.tables))}, and none for "
            f"{', '.join(missing)}: use the parent's features, or leave init_from out"
        )
    return found


def dataset_of(parent: Checkpoint) -> DatasetSpec | None:
    """Return the dataset that a checkpoint's job was trained on; None where an older version did not record it."""
    stored = TrainingRecord.of(parent).dataset
    return None if stored is None else parse_dataset(json.loads(stored), "the parent's dataset")


class InheritedData(NamedTuple):
    """Data of the parent that a warm start's preparation continues from, under the job's names.

    Ids by table, statistics of numeric features, and the profile of the parent's rows.
    """

    base_vocabulary: dict[str, IdMap] | None = None
    base_numeric: tuple[Numeric, ...] | None = None
    base_profile: dict[str, Any] | None = None


def inherited_data(
    job: JobSpec, dataset: DatasetSpec, parent: Checkpoint, log: Callable[[str], Any] = lambda message: None
) -> InheritedData:
    """Return ids, statistics and profile of a checkpoint, by the names of the job that continues from it.

    Raises:
        InvalidFieldsError: the job or its columns do not fit the checkpoint.
        CheckpointError: an older version wrote it, without the ids of its rows.
    """
    found, ids = inheritance_of(job, dataset, parent), id_maps(parent)
    profile = profile_of_rows(parent)
    columns = check_columns(job, dataset, dataset_of(parent) or dataset, found, (profile or {}).get("columns", ()))
    for note in [*found.notes, *columns]:
        log(note)
    names = {former: name for name, former in found.features.items()}
    tables = {former: name for name, former in found.tables.items()}
    if profile is not None:
        renamed = (("missing", names | tables), ("numeric", names), ("vectors", names))
        profile |= {
            part: {new.get(name, name): one for name, one in profile[part].items()}
            for part, new in renamed
            if part in profile
        }
    return InheritedData(
        {name: ids[former] for name, former in found.tables.items()},
        tuple(replace(one, name=names[one.name]) for one in numeric_features(parent) if one.name in names),
        profile,
    )


def rows_of_parent(job: JobSpec, data: PreparedData, tables: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return, by table, the parent's row that each row continues, int64 [num_rows], -1 for rows of new ids.

    A dynamic table continues all of the parent's rows, with their map from ids to rows. ``tables``: tables that the
    parent has, None for all; in any other table the special rows are new too.
    """
    growths = {name: table.id_map for name, table in job.tables.items() if table.id_map is not None}

    def of(name: str) -> torch.Tensor:
        if tables is not None and name not in tables:
            return torch.full([growths[name].num_rows if name in growths else data.tables[name].num_rows], -1)
        if name in growths:
            return torch.arange(growths[name].num_rows)
        return torch.from_numpy(data.parent_rows(name).copy())

    return {name: of(name) for name in data.tables}


def inherited_alpha(job: JobSpec, parent: TrainingRecord) -> float | None:
    """Return the parent's alpha of adaptive regularization, to continue with; None if the job has none or its own.

    The parent's alpha holds if the job names no other and its steps have the same number of examples.
    """
    takes = KINDS[job.optimizer.kind].takes("alpha")
    same_steps = parent.alpha is not None and job.batch_size == parent.batch_size
    return parent.alpha if takes and same_steps and job.optimizer.alpha in ("default", parent.alpha) else None


def trained_optimizer(record: TrainingRecord) -> RowOptimizer:
    """Return the row optimizer that a checkpoint's rows were trained with.

    Raises:
        CheckpointError: this version does not have it any more.
    """
    stored = dict(read(record.job, JobSpec, "optimizer"))
    # What alpha came to is the record's, whatever word the spec had for it.
    names = {Optimizer.old_names.get(name, name): value for name, value in stored.items() if name != "alpha"}
    try:
        settings = Optimizer.model_validate(with_former_defaults({"optimizer": names})["optimizer"])
    except ValidationError as error:
        told = "; ".join(str(problem) for problem in problems_of(error.errors(include_url=False)))
        raise CheckpointError(
            f"optimizer: the parent's is not of this version: {told}; or leave init_from out"
        ) from None
    return row_optimizer(settings, record.alpha, record.epoch_steps)
