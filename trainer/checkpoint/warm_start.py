"""``init_from``: a job that goes on from another's last checkpoint.

Old rows keep weight, moments and last_update_step, the step counter goes on, and the MLP with its optimizer is taken
over, so that what a row lost while it was idle in the old job still counts. Rows of new ids start from hash(id, seed),
or whatever the job's init says; ids unseen for too long lose theirs (docs/adr/0010-growth.md). Which id a row stands
for is part of the checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from trainer.checkpoint.format import Checkpoint, CheckpointError, latest_valid
from trainer.checkpoint.record import TrainingRecord
from trainer.checkpoint.stored import MANIFEST_FILE, show
from trainer.data.batches.keys import read_features
from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.columns.numeric import NUMERIC_FILE, Numeric, open_numeric
from trainer.data.columns.vectors import VECTORS_FILE, Vector, open_vectors
from trainer.data.prepare.drift import PROFILE_FILE, open_profile
from trainer.data.sources.source import Source, beside
from trainer.runs.directory import Run
from trainer.spec import DatasetSpec, JobSpec, Table, parse_dataset
from trainer.spec.base import May
from trainer.spec.models.registry import parse_model
from trainer.spec.optimizer import Optimizer
from trainer.spec.reading import problems_of
from trainer.spec.row_optimizer import row_optimizer
from trainer.spec.stored import read, with_former_defaults
from trainer.storage.folders import Folders
from trainer.storage.opening import open_storage

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData


_NUMBER = re.compile(r"[\d._-]+")
"""Dates and numbers in the names of files, which differ from day to day."""
PARENT = "parent"
"""Of a run's directory: views of stored checkpoints that it starts from."""
SERVED = "served"
"""Of a run's directory: views of stored checkpoints of the served version's run."""


def parent_checkpoint(run: Run) -> Checkpoint | None:
    """Return the checkpoint that the run starts from, if any.

    ``init_checkpoint`` names it, or a folder of checkpoints, here or in a run storage, of which the newest valid one is
    taken.

    Raises:
        CheckpointError: with the remedy, where there is none.
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


def newest_at(place: str, view: Path) -> Checkpoint | None:
    """Return the checkpoint at ``place``, or the newest valid one of a folder; None where there is none.

    Args:
        place: a checkpoint or a folder of them, here or in a run storage.
        view: the folder that shows those of a run storage here.

    Raises:
        StorageError: the storage is away.
    """
    path = Path(place)
    if "://" in place:
        uri, _, prefix = place.rpartition("/")
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


def rows_of_parent(job: JobSpec, data: PreparedData) -> dict[str, torch.Tensor]:
    """Return, by table, the parent's row that each row continues, int64 [num_rows], -1 for rows of new ids.

    Rows of dynamic tables are the parent's, all of them: the map from ids to rows goes on with them.
    """
    growths = {name: table.id_map for name, table in job.tables.items() if table.id_map is not None}
    return {
        name: torch.arange(growths[name].num_rows)
        if name in growths
        else torch.from_numpy(data.parent_rows(name).copy())
        for name in data.tables
    }


def check_fits(job: JobSpec, dataset: DatasetSpec, data: PreparedData, parent: Checkpoint) -> None:
    """Check that the job's model can take over the parent's rows and MLP.

    Raises:
        ValueError: naming the field.
    """
    # Fields that came after the parent's version have their defaults.
    record = TrainingRecord.of(parent)
    stored_job = record.job
    parent_settings, settings = parse_model(read(stored_job, JobSpec, "model"), stored=True), job.model
    free = settings.fields_that(May.DIFFER_ON_WARM_START)
    # The constant of mf, which is the parent's, is that of its loss.
    free |= set() if settings.has_constant_of_loss else {"loss"}
    fields = type(settings).model_fields if settings.kind == parent_settings.kind else ("kind",)
    for field in fields:
        if field not in free and getattr(settings, field) != getattr(parent_settings, field):
            raise ValueError(
                f"model.{field}: the parent was trained with {getattr(parent_settings, field)}, the job asks for "
                f"{getattr(settings, field)}: use the same, or leave init_from out"
            )
    for name in data.tables:
        stored, asked = (Table.model_validate(each) for each in (
            read(stored_job, JobSpec, "tables").get(name, {}), job.tables.get(name, Table()),
        ))  # fmt: skip
        for field in Table.model_fields:
            if getattr(stored, field) != getattr(asked, field):
                raise ValueError(
                    f"tables.{name}.{field}: the parent's rows are of {getattr(stored, field)}, the job asks for "
                    f"{getattr(asked, field)}: use the same, or leave init_from out"
                )
    learned, asked_for = record.labels, [task.name for task in data.tasks]
    if learned != asked_for:
        raise ValueError(
            f"labels: the parent learned {', '.join(learned) or 'one label'}, in this order, the dataset has "
            f"{', '.join(asked_for) or 'one label'}: use the same, or leave init_from out"
        )
    if parent.tables.keys() != data.tables.keys():
        raise ValueError(
            f"init_from: the parent has tables for {', '.join(sorted(parent.tables))}, the dataset's features have "
            f"{', '.join(sorted(data.tables))}: use the same features, or leave init_from out"
        )
    check_features(job, dataset, record)


def check_features(job: JobSpec, dataset: DatasetSpec, parent: TrainingRecord) -> None:
    """Check that the features are the parent's: the MLP knows each by its place, and tables by the ids that it reads.

    Raises:
        ValueError: they are others, or in another order.
    """
    if parent.dataset is None:
        return
    of_parent = parse_dataset(json.loads(parent.dataset), "the parent's dataset")
    there, here = _in_words(of_parent, job), _in_words(dataset, job)
    if there != here:
        raise ValueError(
            f"features: the parent read {there}, in this order, the dataset has {here}: use the same, or leave "
            "init_from out"
        )


def check_columns(
    job: JobSpec, dataset: DatasetSpec, parent: TrainingRecord, profile: Mapping[str, Any] | None
) -> list[str]:
    """Check that features read the parent's columns, or renamed ones, and return what to tell of the others.

    A column counts as renamed where today's file has the former one no more and the parent's rows had no column of the
    new name.

    Args:
        job: the job.
        dataset: its dataset.
        parent: the record of the parent's training.
        profile: of the parent's rows; None: they are of an earlier version.

    Raises:
        ValueError: a feature reads another column than the parent's, and both are there.
    """
    if parent.dataset is None:
        return []
    there = _columns_read(parse_dataset(json.loads(parent.dataset), "the parent's dataset"), job)
    of_parent = (profile or {}).get("columns", ())
    notes = []
    for (name, part), (uri, column) in _columns_read(dataset, job).items():
        former_uri, former = there.get((name, part), (uri, column))
        file, former_file = (_NUMBER.sub("", one.rstrip("/").rpartition("/")[2]) for one in (uri, former_uri))
        if part == "join" and file != former_file:
            notes.append(f"'{name}' is joined from {uri}, the parent's from {former_uri}: check that it is the same")
        if column == former:
            continue
        is_of_rows = uri == dataset.uri
        here = dataset.messages.columns if is_of_rows and dataset.messages is not None else Source(uri).column_names()
        if former in here or (is_of_rows and column in of_parent):
            raise ValueError(
                f"features.{name}: the parent read column '{former}' ({part}), the dataset reads '{column}': read "
                f"'{former}' again, or leave init_from out; a renamed column is taken where the file has no '{former}' "
                f"any more and the parent's rows had no '{column}'"
            )
        notes.append(f"'{name}' reads column '{column}', which takes the place of the parent's '{former}'")
    return notes


def _columns_read(dataset: DatasetSpec, job: JobSpec) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the file and the column of each part of the features that the job's model reads."""
    model = job.model
    names = ("item",) if model.reads_sequences else ("user", "item") if model.reads_pairs else tuple(dataset.features)
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for name in names:
        feature = dataset.features[name]
        columns = {"weights": feature.weights}
        if feature.join is not None:
            columns["join.on"] = dataset.column_of(feature.join.on)
            found[name, "join"] = beside(feature.join.uri, dataset.uri), feature.join.column
        elif feature.derive is not None:
            columns |= {f"derive.{one}": dataset.column_of(getattr(feature.derive, one)) for one in ("previous", "by")}
            columns["derive.order"] = feature.derive.order
        else:
            columns["column"] = feature.column or name
        found |= {(name, part): (dataset.uri, column) for part, column in columns.items() if column is not None}
    if dataset.items is not None:
        uri = beside(dataset.items.uri, dataset.uri)
        found |= {(name, "join"): (uri, one.column or name) for name, one in dataset.items.features.items()}
    return found


def _in_words(dataset: DatasetSpec, job: JobSpec) -> str:
    """Name the features of ids that the job's model reads, and what of each decides what it learns."""
    named = []
    for name, feature in read_features(dataset, job).items():
        told = [f"table {feature.shares}"] if feature.shares is not None else []
        told += [feature.pooling] if feature.is_list and not job.model.reads_sequences else []
        told += ["weighted"] if feature.weights is not None else []
        told += [f"ngrams {feature.effective_ngrams}"] if feature.effective_ngrams is not None else []
        named.append(f"{name} ({', '.join(told)})" if told else name)
    return ", ".join(named)


def inherited_alpha(job: JobSpec, parent: TrainingRecord) -> float | None:
    """Return the alpha of adaptive regularization of a warm start.

    It is the tables' own, since what an idle row lost depends on it.

    Raises:
        ValueError: the job asks for another optimizer, batch size or alpha, or for other settings of deferred updates.
    """
    if job.optimizer.kind != parent.optimizer:
        raise ValueError(
            f"optimizer.kind: the parent's rows were trained with {parent.optimizer} and keep its state, "
            f"the job asks for {job.optimizer.kind}: use the same, or leave init_from out"
        )
    _check_deferred_updates(job, read(parent.job, JobSpec, "optimizer"))
    alpha = parent.alpha
    if alpha is None:
        return None
    if job.batch_size != parent.batch_size:
        raise ValueError(
            f"batch_size: alpha and the ages of rows are counted in steps of {parent.batch_size} examples, the job "
            f"asks for {job.batch_size}: a change on a warm start is not available yet; use the same, or leave "
            "init_from out"
        )
    if job.optimizer.alpha not in ("default", alpha):
        raise ValueError(
            f"optimizer.alpha: the parent's rows decay with {alpha:g}, the job asks for {job.optimizer.alpha}: "
            "use default (it is inherited), or leave init_from out"
        )
    return float(alpha)


def _check_deferred_updates(job: JobSpec, parent_settings: dict[str, Any]) -> None:
    """Check that the settings of deferred updates are the parent's.

    A deferred update is computed when its row is read: other settings would move every row that waits for one at once.
    """
    settings = job.optimizer.model_dump(mode="json")
    stored = {Optimizer.renamed.get(name, name): value for name, value in parent_settings.items()}
    # What a parent of an earlier version has not been asked is the job's, but for the decay of then.
    parent = settings | with_former_defaults({"optimizer": stored})["optimizer"]
    try:
        of_parent = Optimizer.model_validate(parent)
    except ValidationError as error:
        told = "; ".join(str(problem) for problem in problems_of(error.errors(include_url=False)))
        raise ValueError(f"optimizer: the parent's is not of this version: {told}; or leave init_from out") from None
    optimizers = (row_optimizer(spec, alpha=1.0, epoch_steps=1) for spec in (job.optimizer, of_parent))
    inherited = ("alpha", "epoch_steps")
    for field in dict.fromkeys(name for one in optimizers for name in one.deferred_settings if name in settings):
        if field not in inherited and settings[field] != parent[field]:
            use = f"use {parent[field]}"
            if field == "decay" and job.dataset.one_pass:
                use = f"train the parent with {settings[field]}, which is what dataset.one_pass has"
            raise ValueError(
                f"optimizer.{field}: what the parent's idle rows owe is counted with {parent[field]}, the job "
                f"asks for {settings[field]}: a change on a warm start is not available yet; {use}, or leave "
                "init_from out"
            )
