"""Reading of stored job specs, which any earlier version may have written and this version may not accept any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.spec.base import Spec
from trainer.spec.evaluation import is_lower_better
from trainer.spec.job import DatasetRef, InitFrom, JobSpec, Resources
from trainer.spec.label_tasks import best_by
from trainer.spec.optimizer import Optimizer
from trainer.spec.publish import Gate
from trainer.spec.regularizers import EarlyStopping, Regularizers


def to_run(document: Any) -> Any:
    """Return a stored job without removed settings on which no training depended, so that it still runs."""
    publish = document.get("publish") if isinstance(document, Mapping) else None
    if not isinstance(publish, Mapping) or not isinstance(publish.get("gate"), Mapping):
        return document
    kept = {name: value for name, value in publish["gate"].items() if name not in Gate.removed}
    others = {name: value for name, value in publish.items() if name != "gate"}
    return {**document, "publish": {**others, "gate": kept} if kept else others}


def with_former_defaults(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored job document in which ``decay: at_read``, then the default, is written out.

    ``alpha: auto`` of these versions becomes ``default``; the alpha that was found is in the checkpoint.
    """
    optimizer = {"decay": "at_read", **document.get("optimizer", {})}
    if optimizer.get("alpha") == "auto":
        optimizer["alpha"] = "default"
    return {**document, "optimizer": optimizer}


class StoredJob:
    """The stored document of a JobSpec."""

    def __init__(self, document: Mapping[str, Any]):
        self._document = document

    @property
    def dataset_name(self) -> str:
        return str(read(self._read("dataset"), DatasetRef, "name"))

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._read("labels"))

    @property
    def optimizer_kind(self) -> str:
        return str(read(self._read("optimizer"), Optimizer, "kind"))

    @property
    def parent_job(self) -> str | None:
        """The job from whose checkpoint the stored job starts; None if it names none."""
        start = self._read("init_from")
        return None if start is None else read(start, InitFrom, "job")

    @property
    def retries(self) -> int:
        return int(self._read("retries"))

    @property
    def stopping_metric(self) -> str | None:
        """The metric that early stopping is told to watch; None if it is told none."""
        stopping = read(self._read("regularizers"), Regularizers, "early_stopping")
        return None if stopping is None else read(stopping, EarlyStopping, "metric")

    @property
    def resources(self) -> Resources:
        """The stored job's workers and their limits, not validated."""
        stored = self._read("resources")
        return Resources.model_construct(**{name: read(stored, Resources, name) for name in Resources.model_fields})

    def _read(self, name: str) -> Any:
        return read(self._document, JobSpec, name)


def best_epoch(job: Mapping[str, Any]) -> int | None:
    """Return a job's best epoch by the metric of the validation rows that early stopping watches; None without one.

    ``job`` is as the service shows it, with ``metrics`` and ``spec``.
    """
    rows = [row for row in job.get("metrics") or [] if row.get("split") == "validation"]
    names = list(dict.fromkeys(name for row in rows for name in row))
    label = next((name.partition("/")[2] for name in names if "/" in name), "")
    metric = StoredJob(job.get("spec") or {}).stopping_metric or best_by(names, label)
    values = {row["epoch"]: row[metric] for row in rows if row.get(metric) is not None} if metric else {}
    sign = -1.0 if metric and is_lower_better(metric) else 1.0
    return max(values, key=lambda epoch: (sign * values[epoch], -epoch)) if values else None


def names_of(part: type[Spec], name: str) -> tuple[str, ...]:
    """Return the names that a field of a part of a spec has in stored specs: its current one, then its old ones."""
    return name, *(old for old, new in part.old_names.items() if new == name)


def read(document: Mapping[str, Any] | Spec, part: type[Spec], name: str) -> Any:
    """Return a field of a stored part of a spec, by its current or old name; its default if it was left out.

    Raises:
        KeyError: ``part`` has no such field, or it was left out and has no default.
    """
    field = part.model_fields[name]
    if isinstance(document, Spec):
        return getattr(document, name)
    for one in names_of(part, name):
        if one in document:
            return document[one]
    if field.is_required():
        raise KeyError(f"the stored {part.__name__} has no {name}")
    return field.get_default(call_default_factory=True)
