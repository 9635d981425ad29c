"""What a checkpoint says of the training that wrote it, beside its tensors: the ``extra`` of its manifest, typed.

A field that checkpoints are to have is one here, with a default where older ones lack it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Self

from trainer.checkpoint.format import Checkpoint, CheckpointError


@dataclass
class Position:
    """How far a run is.

    ``step``: completed steps of this job. ``first_step``: steps that its tables had before it (warm start).
    ``evaluated``: epochs evaluated. ``loss_sum``, ``loss_count``: of the epoch under way. ``stopped``: training is
    over, before its last epoch or with the parameters of an earlier one. ``place``: of a job of one pass, where it
    reads on (trainer.data.one_pass.position). ``calibration``: by label, what maps these parameters' scores to
    calibrated probabilities (trainer.output_calibration), where a validation was the last that happened.
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
            CheckpointError: it lacks a field that checkpoints always had.
        """
        extra = checkpoint.extra
        for one in fields(cls):
            if one.name not in extra and one.default is MISSING and one.default_factory is MISSING:
                raise CheckpointError(f"{checkpoint.path} does not say its {one.name}: it is not of a training job")
        return cls(**{one.name: extra[one.name] for one in fields(cls) if one.name in extra})

    def to_extra(self) -> dict[str, Any]:
        """Return the record as JSON, as a part of a manifest's ``extra``."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TablesRecord(_Record):
    """The tables' own part.

    ``completed_steps``: steps that they have taken; ``birth_step``: after how many rows were initial (MEDA); ``rows``:
    what stored rows mean (trainer.checkpoint.row_signature).
    """

    completed_steps: int
    birth_step: int = 0
    rows: Mapping[str, Any] | None = None

    def to_extra(self) -> dict[str, Any]:
        """Return the record as JSON; a birth at step 0 is left out."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("birth_step", 0)}


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(_Record):
    """The job's part.

    ``job``: what of its spec no attempt may change (trainer.launch.resume_check); ``optimizer``: its kind; ``alpha``:
    of adaptive decay; ``epoch_steps``: of ``decay: by_epoch``, None for others; ``labels``: names of several labels, in
    their order; ``dataset``: the spec of the rows as text of JSON, for manifests sort the keys of objects, and features
    and labels have an order; None where an older version wrote it; ``history``: metrics of the epochs.
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
        """Return the record as JSON; what came later is left out of a job without it, as versions before read that."""
        extra = asdict(self)
        if self.epoch_steps is None:
            del extra["epoch_steps"]
        for name in ("place", "calibration"):
            if extra["position"][name] is None:
                del extra["position"][name]
        return extra

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Read the record of a checkpoint.

        Raises:
            CheckpointError: it lacks a field that checkpoints always had.
        """
        read = super().of(checkpoint)
        return cls(**{**vars(read), "position": Position(**checkpoint.extra["position"])})
