"""Optimizers of a job's table rows and dense parameters. Torch-free.

A part of trainer.spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from embeddings.optim.base import RowOptimizer
from embeddings.optim.lr_schedules import Constant, Cosine, LinearWarmup, Schedule, StepDecay
from embeddings.optim.registry import KINDS
from trainer.spec.base import Positive, Spec, later
from trainer.spec.problems import FieldProblem, raise_if_invalid


class LearningRateSchedule(Spec):
    """Schedule of a learning rate over the steps, each a batch of the job (embeddings.optim.lr_schedules).

    ``linear_warmup``: from ``start_factor`` up to 1 within ``warmup_steps`` steps. The other kinds of schedule may
    begin with a warmup: ``cosine``, from 1 down to ``final_factor`` within ``decay_steps``; ``step``, times ``gamma``
    every ``every_steps``. Steps are those of the tables: a warm start continues from its parent's step, and does not
    warm up again.
    """

    kind: Literal["constant", "linear_warmup", "cosine", "step"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    start_factor: float = Field(default=0.0, ge=0.0, le=1.0)
    decay_steps: int | None = Field(default=None, ge=1)
    final_factor: float = Field(default=0.0, ge=0.0, le=1.0)
    every_steps: int | None = Field(default=None, ge=1)
    gamma: float = Field(default=0.1, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _of_its_kind(self) -> LearningRateSchedule:
        needed, own = _SCHEDULES[self.kind]
        if needed is not None and not getattr(self, needed):
            raise ValueError(f"a schedule of kind {self.kind} needs {needed}")
        if self.start_factor and not self.warmup_steps:
            raise ValueError("start_factor is for a warmup: set warmup_steps, or leave it out")
        for name, field in type(self).model_fields.items():
            if name != "kind" and name not in own and getattr(self, name) != field.default:
                raise ValueError(f"a schedule of kind {self.kind} has no {name}: leave it out")
        return self


_WARMUP = ("warmup_steps", "start_factor")


_SCHEDULES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "constant": (None, ()),
    "linear_warmup": ("warmup_steps", _WARMUP),
    "cosine": ("decay_steps", (*_WARMUP, "decay_steps", "final_factor")),
    "step": ("every_steps", (*_WARMUP, "every_steps", "gamma")),
}
"""Required field, and all fields, of each kind of schedule."""


if TYPE_CHECKING:
    OptimizerKind = str
else:
    OptimizerKind = Literal[tuple(KINDS)]


class Optimizer(Spec):
    """Row optimizer of the embedding tables (embeddings.optim). A setting that its kind does not have is refused.

    ``Kind.takes`` of embeddings.optim.registry tells which settings a kind has. ``clip_norm`` bounds the norm of the
    step's gradient, taken over all tables and dense parameters on all ranks together; ``clip_row_norm`` bounds the norm
    of each row's gradient. The default of ``decay`` is ``by_epoch``, but ``at_read`` if ``by_epoch`` has no second
    epoch to act in: with ``dataset.one_pass`` and with ``regularizers.meda``. A job stores the resolved value.
    """

    kind: OptimizerKind = "adam_ar"
    learning_rate: float = Field(default=0.001, ge=0.0, allow_inf_nan=False)
    alpha: Literal["default"] | Positive = "default"
    moments: Literal["dense", "lazy"] = "dense"
    decay: Literal["at_read", "by_epoch"] = "by_epoch"
    first_touch: Literal["keep", "literal"] = "keep"
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    eps_inside_root: bool = False
    weight_decay: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    schedule: LearningRateSchedule = LearningRateSchedule()
    clip_norm: Positive | None = None
    clip_row_norm: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed_settings(cls, document: Any) -> Any:
        if isinstance(document, dict):
            raise_if_invalid(
                FieldProblem(field, message, remedy)
                for field, value, message, remedy in _REMOVED
                if field in document and value in (None, document[field])
            )
        return document

    @model_validator(mode="before")
    @classmethod
    def _beta2_of_its_kind(cls, document: Any) -> Any:
        named = document.get("kind") if isinstance(document, dict) else None
        kind = KINDS.get(named) if isinstance(named, str) else None
        return {"beta2": kind.default("beta2"), **document} if kind is not None and kind.takes("beta2") else document


_REMOVED: tuple[tuple[str, str | None, str, str], ...] = (
    (
        "by_frequency",
        None,
        "it was removed: adam_ar on all rows is better",
        "leave it out, and train again from the start",
    ),
    (
        "decay",
        "at_update",
        "at_update was removed: rows overfit with it",
        "use by_epoch or at_read, and train again from the start",
    ),
    ("alpha", "auto", "auto was removed: the default of by_epoch needs no search", "use default, or a number"),
)
"""Removed fields, or removed values of fields: (field, value or None for all, message, remedy)."""


class DenseOptimizer(Spec):
    """torch's optimizer of the dense parameters, which are all but the embedding tables.

    ``weight_decay`` is its L2 penalty: that factor times the parameter is added to the gradient.
    """

    kind: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=0.001, ge=0.0, allow_inf_nan=False)
    schedule: LearningRateSchedule = LearningRateSchedule()
    weight_decay: float = later(0.0, ge=0.0, allow_inf_nan=False)


def schedule_of(spec: LearningRateSchedule) -> Schedule:
    """Return the schedule as :mod:`embeddings.optim.lr_schedules` implements it.

    Raises:
        ValueError: That module refuses the settings.
    """
    warmup = (spec.warmup_steps, spec.start_factor)
    if spec.kind == "linear_warmup":
        return LinearWarmup(*warmup)
    if spec.kind == "cosine":
        return Cosine(*warmup, decay_steps=spec.decay_steps or 0, final_factor=spec.final_factor)
    if spec.kind == "step":
        return StepDecay(*warmup, every_steps=spec.every_steps or 0, gamma=spec.gamma)
    return Constant()


def row_optimizer(spec: Optimizer, alpha: float | None, epoch_steps: int | None = None) -> RowOptimizer:
    """Return the optimizer of the embedding tables; settings that its kind does not have are not used.

    ``alpha``: the value of ``spec.alpha`` as a number; None for kinds without it. ``epoch_steps``: number of steps in
    an epoch of the tables' first training, for ``decay: by_epoch``.

    Raises:
        ValueError: The settings do not go together.
    """
    kind = KINDS[spec.kind]
    settings = spec.model_dump() | {"schedule": schedule_of(spec.schedule), "alpha": alpha}
    settings["epoch_steps"] = epoch_steps if spec.decay == "by_epoch" else None
    return kind.optimizer(**{name: value for name, value in settings.items() if kind.takes(name)})
