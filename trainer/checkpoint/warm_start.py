"""Warm start (``init_from``): a job that continues from another job's last checkpoint, its parent.

Rows of known ids keep weight, moments and last_update_step. The step counter continues, so a row that was idle since
the parent job still gets its decay. The MLP and its optimizer are taken over. Rows of new ids start from hash(id,
seed), or as the job's init says; ids unseen for too long lose their rows (docs/adr/0045). The map from rows to ids is
part of the checkpoint.
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
from trainer.spec.optimizer import Optimizer, row_optimizer
from trainer.spec.reading import problems_of
from trainer.spec.stored_specs import read, with_former_defaults
from trainer.storage.folders import Folders
from trainer.storage.storage_registry import open_storage

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData


PARENT = "parent"
"""Folder of a run's directory with local views of the stored checkpoints that the run starts from."""
SERVED = "served"
"""Folder of a run's directory with local views of the stored checkpoints of the run whose version is served."""


def parent_checkpoint(run: Run) -> Checkpoint | None:
    """Return the checkpoint that the run starts from, or None for a run without warm start.

    ``run.init_checkpoint`` is a checkpoint, or a folder of checkpoints, whose newest valid checkpoint is taken. Either
    is a local path or in a run storage.

    Raises:
        CheckpointError: there is no valid checkpoint; the message has the remedy.
        StorageError: the storage cannot be reached.
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
    """Return the checkpoint at ``location``, or the newest valid one of a folder of checkpoints; None if there is none.

    ``location`` is a local path, or the URI of a folder in a run storage. Local views of the storage's checkpoints are
    made in the folder ``view``.

    Raises:
        StorageError: the storage cannot be reached.
    """
    path = Path(location)
    if "://" in location:
        uri, _, prefix = location.rpartition("/")
        path = view
        show(Folders(open_storage(uri), prefix), path)
    return Checkpoint(path) if (path / MANIFEST_FILE).exists() else latest_valid(path)


def id_map_file(table: str) -> str:
    """Return the file name of a table's id map in a checkpoint."""
    return f"ids-{table}.arrow"


def id_map_files(data: PreparedData) -> dict[str, Path]:
    """Return the paths of the data's files that checkpoints include, by their names in a checkpoint.

    The files are id maps, statistics of numeric features, descriptions of vectors, and the profile of the data's rows.
    """
    found = {id_map_file(name): table.vocabulary_path for name, table in data.tables.items()}
    others = {NUMERIC_FILE: data.numeric_path, PROFILE_FILE: data.profile_path, VECTORS_FILE: data.vectors_path}
    return found | {name: path for name, path in others.items() if path is not None}


def numeric_features(checkpoint: Checkpoint) -> tuple[Numeric, ...]:
    """Return the numeric features that the checkpoint's model reads, with their statistics."""
    path = checkpoint.attached(NUMERIC_FILE)
    return () if path is None else open_numeric(path)


def vectors_read(checkpoint: Checkpoint) -> tuple[Vector, ...]:
    """Return the vector features that the checkpoint's model reads."""
    path = checkpoint.attached(VECTORS_FILE)
    return () if path is None else open_vectors(path)


def profile_of_rows(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return statistics of the data that the checkpoint was trained on (its profile), None if it has none.

    Checkpoints of older versions lack it.
    """
    path = checkpoint.attached(PROFILE_FILE)
    return None if path is None else open_profile(path)


def id_maps(checkpoint: Checkpoint) -> dict[str, IdMap]:
    """Return the map from rows to ids of each table of a checkpoint.

    Raises:
        CheckpointError: the checkpoint lacks the map of a table, because an older version wrote it.
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
        InvalidFieldsError: the job does not fit the checkpoint; the error names each field.
        ValueError: the checkpoint lacks a table that the job continues.
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
    """Return the dataset spec of the job that wrote a checkpoint; None if an older version did not record it."""
    stored = TrainingRecord.of(parent).dataset
    return None if stored is None else parse_dataset(json.loads(stored), "the parent's dataset")


class InheritedData(NamedTuple):
    """Results of the parent's data preparation that a warm start's preparation continues from.

    They are ids by table, statistics of numeric features, and the profile (statistics) of the parent's data. Features
    and tables have the new job's names. A field is None if there is nothing to continue from.
    """

    base_vocabulary: dict[str, IdMap] | None = None
    base_numeric: tuple[Numeric, ...] | None = None
    base_profile: dict[str, Any] | None = None


def inherited_data(
    job: JobSpec, dataset: DatasetSpec, parent: Checkpoint, log: Callable[[str], Any] = lambda message: None
) -> InheritedData:
    """Return ids, statistics and profile of the checkpoint ``parent``, under the names of the job that continues it.

    ``log`` gets a message about each difference that the user should know of.

    Raises:
        InvalidFieldsError: the job or its columns do not fit the checkpoint.
        CheckpointError: an older version wrote the checkpoint, without the ids of its rows.
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
    """Return {table: int64 [num_rows]}: for each row the index of the parent's row that it continues, -1 if new.

    A dynamic table continues all of the parent's rows, with their map from ids to rows. ``tables``: tables that the
    parent has, None for all. In a table that the parent lacks all rows are new, also the special rows such as padding.
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
    """Return the parent's alpha of adaptive regularization if the job continues with it, else None.

    The job does so if its optimizer takes an alpha, it names no other value, and both jobs have the same batch size.
    """
    takes = KINDS[job.optimizer.kind].takes("alpha")
    same_steps = parent.alpha is not None and job.batch_size == parent.batch_size
    return parent.alpha if takes and same_steps and job.optimizer.alpha in ("default", parent.alpha) else None


def trained_optimizer(record: TrainingRecord) -> RowOptimizer:
    """Return the row optimizer that a checkpoint's rows were trained with.

    Raises:
        CheckpointError: this version no longer knows that optimizer or its settings.
    """
    stored = dict(read(record.job, JobSpec, "optimizer"))
    # The record has the resolved alpha, whatever the spec says.
    names = {Optimizer.old_names.get(name, name): value for name, value in stored.items() if name != "alpha"}
    try:
        settings = Optimizer.model_validate(with_former_defaults({"optimizer": names})["optimizer"])
    except ValidationError as error:
        told = "; ".join(str(problem) for problem in problems_of(error.errors(include_url=False)))
        raise CheckpointError(
            f"optimizer: this version does not know the parent's: {told}; or leave init_from out"
        ) from None
    return row_optimizer(settings, record.alpha, record.epoch_steps)
