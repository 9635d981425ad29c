"""Typed ``extra`` of a checkpoint's manifest: the position and settings of the training that wrote it.

A new entry of ``extra`` is a new field here, with a default for the older checkpoints that lack it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Self

from trainer.checkpoint.format import Checkpoint, CheckpointError


@dataclass
class Position:
    """Progress of a run.

    ``step``: completed steps of this job. ``first_step``: steps that its tables had completed before this job, in a
    warm start. ``evaluated``: number of epochs evaluated. ``loss_sum``, ``loss_count``: sum of the training losses, and
    number of samples, in the current epoch. ``stopped``: True if early stopping has ended training. ``place``: the
    position of the next row in a one-pass job's data (trainer.data.one_pass.position), None for other jobs.
    ``calibration``: label -> the map from scores to calibrated probabilities (trainer.output_calibration); None unless
    these parameters were the last to be validated.
    """

    step: int = 0
    first_step: int = 0
    evaluated: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    stopped: bool = False
    place: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Record:
    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Read the record of a checkpoint.

        Raises:
            CheckpointError: the checkpoint lacks a field that training jobs of every version write.
        """
        extra = checkpoint.extra
        for one in fields(cls):
            if one.name not in extra and one.default is MISSING and one.default_factory is MISSING:
                raise CheckpointError(f"{checkpoint.path} has no {one.name}: it was not written by a training job")
        return cls(**{one.name: extra[one.name] for one in fields(cls) if one.name in extra})

    def to_extra(self) -> dict[str, Any]:
        """Return the record as JSON, as a part of a manifest's ``extra``."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TablesRecord(_Record):
    """Record of the embedding tables.

    ``completed_steps``: steps that the tables have taken. ``birth_step``: the step at which all rows last had initial
    values; it is 0 unless MEDA has reset them. ``rows``: the settings that give stored rows their meaning
    (trainer.checkpoint.row_signature), None in older checkpoints.
    """

    completed_steps: int
    birth_step: int = 0
    rows: Mapping[str, Any] | None = None

    def to_extra(self) -> dict[str, Any]:
        """Return the record as JSON; ``birth_step`` 0 is left out."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("birth_step", 0)}


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(_Record):
    """Record of the training job.

    ``job``: the fields of its spec that no attempt may change (trainer.launch.resume_check). ``optimizer``: kind of the
    row optimizer. ``alpha``: the strength of adaptive decay, None for optimizers without it. ``epoch_steps``: steps
    that ``decay: by_epoch`` counts as an epoch, None for other jobs. ``labels``: names of the labels if there are
    several, in their order. ``history``: metrics of each evaluation. ``dataset``: the dataset spec as JSON text, None
    in checkpoints of older versions. The spec is text because manifests sort the keys of objects, and the order of
    features and labels matters.
    """

    job: dict[str, Any]
    run_id: str
    optimizer: str
    alpha: float | None
    batch_size: int
    position: Position
    history: list[dict[str, Any]]
    labels: list[str] = field(default_factory=list)
    epoch_steps: int | None = None
    dataset: str | None = None

    def to_extra(self) -> dict[str, Any]:
        """Return the record as JSON. Unset newer fields are left out, so that older versions can read the record."""
        extra = asdict(self)
        if self.epoch_steps is None:
            del extra["epoch_steps"]
        for name in ("place", "calibration"):
            if extra["position"][name] is None:
                del extra["position"][name]
        return extra

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        read = super().of(checkpoint)
        return cls(**{**vars(read), "position": Position(**checkpoint.extra["position"])})
