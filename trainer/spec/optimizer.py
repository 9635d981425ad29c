"""How a job trains its rows and its dense parameters. Torch-free.

A part of trainer.spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from embeddings.optim.registry import KINDS
from trainer.spec.base import Positive, Spec, later


class LearningRateSchedule(Spec):
    """How a learning rate changes with the steps, each of which is a batch of the job (embeddings.optim.lr_schedules).

    ``linear_warmup``: from ``start_factor`` up to 1 within ``warmup_steps`` steps. The other kinds may begin with a
    warmup: ``cosine``, from 1 down to ``final_factor`` within ``decay_steps``; ``step``, times ``gamma`` every
    ``every_steps``. Steps are those of the tables: a warm start continues from its parent's step, and does not warm up
    again.
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
            raise ValueError("start_factor is that of a warmup: set warmup_steps, or leave it out")
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
"""By kind of schedule, the field that it cannot do without, and those that it has."""


NUM_BUCKETS = 5
"""Frequency buckets of the rows that occur in training."""

if TYPE_CHECKING:
    OptimizerKind = str
else:
    OptimizerKind = Literal[tuple(KINDS)]


class FrequencyRule(Spec):
    """How the rows of some frequency buckets are trained otherwise: ``kind``, and the decay that it has.

    ``buckets`` are those of the metric ``frequency_buckets``, by how often a row of the table occurs in the training
    split: 1 (rare) to 5, 0 for rows that do not occur there. A row keeps the bucket with which it began. ``kind`` keeps
    the state of the optimizer's; ``alpha`` left out is the optimizer's own.
    """

    buckets: tuple[Annotated[int, Field(ge=0, le=NUM_BUCKETS)], ...] = Field(min_length=1)
    kind: OptimizerKind
    alpha: Positive | None = None
    weight_decay: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)


class Optimizer(Spec):
    """Row optimizer of the embedding tables (embeddings.optim). A setting that the kind does not have is refused.

    ``alpha`` is read by the kinds with _ar (Li and Lyu, Adaptive Regularization), ``weight_decay`` by adamw and
    adagradw, ``first_touch`` by both, ``beta1`` by the Adam family, ``moments`` and ``beta2`` by the Adam family and
    RMSprop (for which 0.99 is the default of ``beta2``, like torch's alpha). ``clip_norm`` bounds the norm of the
    step's gradient, taken over all tables and dense parameters on all ranks together; ``clip_row_norm`` bounds that of
    each row. ``by_frequency``: otherwise for rows of these frequency buckets.
    """

    kind: OptimizerKind = "adam_ar"
    learning_rate: float = Field(default=0.001, ge=0.0, allow_inf_nan=False)
    alpha: Literal["default", "auto"] | Positive = "default"
    moments: Literal["dense", "lazy"] = "dense"
    decay: Literal["at_read", "at_update", "by_epoch"] = "at_read"
    first_touch: Literal["keep", "literal"] = "keep"
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    eps_inside_root: bool = False
    weight_decay: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    schedule: LearningRateSchedule = LearningRateSchedule()
    clip_norm: Positive | None = None
    clip_row_norm: Positive | None = None
    by_frequency: tuple[FrequencyRule, ...] = later(())

    @model_validator(mode="before")
    @classmethod
    def _beta2_of_its_kind(cls, document: Any) -> Any:
        named = document.get("kind") if isinstance(document, dict) else None
        kind = KINDS.get(named) if isinstance(named, str) else None
        return {"beta2": kind.default("beta2"), **document} if kind is not None and kind.takes("beta2") else document


class DenseOptimizer(Spec):
    """torch's optimizer of everything that is not an embedding table.

    ``weight_decay`` is its L2 penalty: that factor times the parameter is added to the gradient.
    """

    kind: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=0.001, ge=0.0, allow_inf_nan=False)
    schedule: LearningRateSchedule = LearningRateSchedule()
    weight_decay: float = later(0.0, ge=0.0, allow_inf_nan=False)
