"""Search for the parent of a warm start if ``init_from`` names a collection or a job, and checks of the job against it.

``evenkeel train`` looks runs up in ``EVENKEEL_HOME/runs``, which also has the runs of a service on this host. This
module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from embeddings.refresh.held_versions import sound_version
from embeddings.refresh.record import RefreshRecord
from embeddings.store import StoreError, StoreUnavailable, open_store
from trainer.runs.directory import CHECKPOINTS, RUN_FILE
from trainer.runs.inheritance import check_columns, inherit
from trainer.spec import DatasetSpec, InitFrom, JobSpec, parse_dataset


class Start(NamedTuple):
    """Folder of checkpoints that a run starts from, and the held version that their run published, if it was held."""

    checkpoints: Path
    start_version: str | None = None


def start_of(init_from: InitFrom, published: str | None, store_url: str, runs: Path) -> Start:
    """Return the checkpoints that ``init_from`` names.

    ``published``: the collection that the job publishes to, if any. ``runs``: the folder of run directories.

    Raises:
        ValueError: there is no such version, or ``runs`` lacks its run.
        StoreUnavailable: the store does not answer.
    """
    if init_from.job is not None:
        return Start(_checkpoints(init_from.job, runs, f"init_from.job '{init_from.job}'"))
    assert init_from.collection is not None
    collection = open_store(store_url).collection(init_from.collection)
    version = init_from.version or "current"
    try:
        held = sound_version(collection) if init_from.goes_on(published) and collection.exists() else None
        manifest = held or collection.manifest(version)
    except StoreUnavailable:
        raise  # the version may well exist: training from initial values is no remedy
    except StoreError as error:
        raise ValueError(
            f"init_from.collection: {error}; or leave init_from out for the first training, or give --init RUN_DIR"
        ) from None
    named = f"version {manifest['version']} of '{collection.name}'"
    return Start(_checkpoints(str(manifest.get("job")), runs, named), None if held is None else str(held["version"]))


def served_checkpoints(store_url: str, collection: str, version: str, runs: Path, start: str | None) -> str | None:
    """Return the folder of checkpoints of the run that published a version.

    ``start``: the checkpoints that the new run starts from, which may be outside ``runs``.

    Returns:
        The folder; None if it is not kept, or the version was published during training, so checkpoints are newer.
    """
    try:
        manifest = open_store(store_url).collection(collection).manifest(version)
    except StoreError:
        return None
    run_id = str(manifest.get("job"))
    if RefreshRecord.of(manifest).training_step is not None:
        return None
    if start is not None and _run_id(Path(start).parent) == run_id:
        return start
    try:
        return str(_checkpoints(run_id, runs, ""))
    except ValueError:
        return None


def check_parent(job: JobSpec, dataset: DatasetSpec, parent: Path) -> list[str]:
    """Check before a run begins that a job can continue from its parent, and return messages for the owner.

    ``parent``: the run directory of the parent; if its run.json cannot be read, nothing is checked. The run repeats the
    check against the checkpoint that it loads.

    Raises:
        InvalidFieldsError: some fields do not fit; the error names each, with the remedy.
    """
    try:
        document = json.loads((parent / RUN_FILE).read_text("utf-8"))
        stored, parent_dataset = document["job"], parse_dataset(document["dataset"], str(parent / RUN_FILE))
    except (OSError, ValueError, KeyError):
        return []  # on another host, or written by a version with other fields: the run checks the checkpoint instead
    found = inherit(job, dataset, stored, parent_dataset)
    return [*found.notes, *check_columns(job, dataset, parent_dataset, found)]


def named_checkpoints(run_id: str, runs: Path) -> Path | None:
    """Return the checkpoints of a run in the folder of its name below ``runs``; None if there are none.

    A run of the service has a folder of its id, one of ``evenkeel train`` a folder of its id without the random end.
    """
    return _of_run(run_id, [runs / run_id, runs / run_id.rpartition("-")[0]])


def _checkpoints(run_id: str, runs: Path, named: str) -> Path:
    """Return the folder of checkpoints of the run with this id, below ``runs``; ValueError if there is none."""
    everywhere = (file.parent for file in sorted(runs.glob(f"*/{RUN_FILE}")))
    found = named_checkpoints(run_id, runs) or _of_run(run_id, everywhere)
    if found is None:
        raise ValueError(f"init_from: {named} needs run {run_id}, which is not below {runs}: give --init RUN_DIR")
    return found


def _of_run(run_id: str, folders: Iterable[Path]) -> Path | None:
    for folder in folders:
        if _run_id(folder) == run_id and (folder / CHECKPOINTS).is_dir():
            return (folder / CHECKPOINTS).resolve()
    return None


def _run_id(directory: Path) -> str | None:
    try:
        document = json.loads((directory / RUN_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("run_id") if isinstance(document, dict) else None
