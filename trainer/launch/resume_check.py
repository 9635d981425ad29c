"""Check on resuming that a checkpoint belongs to the same job and dataset; some fields may change between attempts."""

from __future__ import annotations

import json
from typing import Any

from trainer.checkpoint.format import Checkpoint
from trainer.checkpoint.record import TrainingRecord
from trainer.spec import DatasetSpec, JobSpec, Publish, SpecError, parse_dataset, parse_job
from trainer.spec.base import May
from trainer.spec.stored_specs import with_former_defaults

_FREE = JobSpec.fields_that(May.DIFFER_ON_RESUME)
_TRAINED_WITH = Publish.fields_that(May.CHANGE_TRAINING)
_OF_PLACES = {"uri", "security", "max_bad_rows", "max_unmatched"}
"""Fields of a dataset and its parts that may change between attempts: locations of rows, and limits of bad rows."""
_PUBLISH = "publish."  # prefix of the names of these fields in the identity


def identity_of(job: JobSpec) -> dict[str, Any]:
    """Return the part of the job that must not change between attempts, as a document for checkpoints."""
    parts = {} if job.publish is None else job.publish.model_dump(mode="json", include=_TRAINED_WITH)
    document = job.model_dump(mode="json", exclude=_FREE)
    if job.dataset.follow is not None:
        # The settings of following may change, but not whether the job follows.
        document["dataset"]["follow"] = {}
    return document | {f"{_PUBLISH}{name}": part for name, part in parts.items()}


def check_same_job(checkpoint: Checkpoint, job: JobSpec) -> None:
    """Check that this job wrote the checkpoint.

    Raises:
        ValueError: a job with other fields wrote it; the message names the fields.
    """
    here, there = identity_of(job), _completed(TrainingRecord.of(checkpoint).job, job)
    differ = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if differ:
        raise ValueError(
            f"{checkpoint.path} was written by a job with another {', '.join(differ)}: resume it with the same "
            "spec, or use a new run directory"
        )


def check_same_dataset(checkpoint: Checkpoint, dataset: DatasetSpec) -> None:
    """Check that the checkpoint was trained on this dataset: a run continues with the same rows, encoded equally.

    Raises:
        ValueError: it was trained on another dataset; the message names the fields.
    """
    text = TrainingRecord.of(checkpoint).dataset
    if text is None:
        return
    here, there = (_without_places(one) for one in (dataset, parse_dataset(json.loads(text), str(checkpoint.path))))
    differ = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if differ:
        raise ValueError(
            f"{checkpoint.path} was trained on a dataset with another {', '.join(differ)}: resume it with the same "
            "spec, or use a new run directory"
        )


def _without_places(dataset: DatasetSpec) -> dict[str, str]:
    """Return the fields of a dataset, without _OF_PLACES, as JSON texts, which keep the order of their parts."""

    def of(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {name: of(value) for name, value in part.items() if name not in _OF_PLACES}

    return {name: json.dumps(part) for name, part in of(dataset.model_dump(mode="json")).items()}


def _completed(identity: dict[str, Any], job: JobSpec) -> dict[str, Any]:
    """Return the identity that a checkpoint holds, with defaults for fields that newer versions have added."""
    of_publish = {name: part for name, part in identity.items() if name.startswith(_PUBLISH)}
    # Checkpoints hold the names of their version.
    names = {f"{_PUBLISH}{old}": f"{_PUBLISH}{new}" for old, new in Publish.old_names.items()}
    document = with_former_defaults({name: part for name, part in identity.items() if name not in of_publish})
    try:
        completed = identity_of(parse_job(document | {name: getattr(job, name) for name in _FREE}))
    except SpecError:
        return identity
    others = {name: part for name, part in completed.items() if not name.startswith(_PUBLISH)}
    return others | {names.get(name, name): part for name, part in of_publish.items()}
