"""Settings shared by all row optimizers, and the state that they keep for each row; torch-free.

A row is touched by a step if it occurs in the batch with non-zero weight, whatever its gradient. Only touched rows are
written. The change that dense semantics would make to the others is a deferred update, applied when the row is read
(see :mod:`embeddings.optim.deferred_update`). Below, eta is ``learning_rate`` times the schedule's factor at the step,
and g a row's gradient summed over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from embeddings.optim.lr_schedules import Constant, Schedule

if TYPE_CHECKING:
    import torch

    from embeddings.optim.deferred_update import DeferredUpdateCoefficients

MOMENTS = ("dense", "lazy")
FIRST_TOUCH = ("keep", "literal")
DECAYS = ("at_read", "by_epoch")
# Largest factor by which a decay, with dense moments, may widen the gap between a stored row and its value.
MAX_LEAD = 32.0
# For rows that are not stored ahead: P and r^J below this add nothing to a float64.
VANISHED_PRESENT = 1e-18
# Largest number of idle steps over which a row's momentum is computed.
MAX_HORIZON = 1 << 16


@dataclass
class TouchedRows:
    """The rows of a table that a step touches, as the reference kernel hands them to :meth:`RowOptimizer.apply_rule`.

    Args:
        theta: The rows [n, dim] after their decay; the rule replaces them.
        grad: Their summed gradients [n, dim].
        square: The squares of ``grad``; for an optimizer with one number for each row, their mean over the row [n, 1].
        state: The state of the rows, name -> [n, dim] or [n, 1]; the rule replaces it.
        num_steps: Steps by which the running means of each row shrink [n, 1]: this one and, with dense moments, those
            since its last touch.
        step: The step, from 1.
        rate: The learning rate at this step.
        coefficients: Coefficients of the deferred updates, if any: rows may be stored ahead of their momentum.
        left: Share of each row that remains after the decay since its last touch [n, 1]; None if moments do not decay.
    """

    theta: torch.Tensor
    grad: torch.Tensor
    square: torch.Tensor
    state: dict[str, torch.Tensor]
    num_steps: torch.Tensor
    step: int
    rate: float
    coefficients: DeferredUpdateCoefficients | None
    left: torch.Tensor | None = None

    def running_mean(self, name: str, beta: float, value: torch.Tensor) -> torch.Tensor:
        """Fold ``value`` into the running mean ``name``, and return the mean; ``v`` is the mean of squares."""
        fade = (beta**self.num_steps).to(value.dtype)
        if self.left is not None:
            fade = fade * (self.left**2 if name == "v" else self.left)
        self.state[name] = fade * self.state[name] + (1 - beta) * value
        return self.state[name]


@dataclass(frozen=True)
class RowOptimizer:
    """Base of the row optimizers: their settings, the state that they keep for each row, and their rule.

    ``rule`` is the name of the update in the compiled kernels; :meth:`apply_rule` is the same update in plain torch.
    ``state_names`` are the tensors kept for each row; ``last_update_step`` is the step of its last touch, 0 = never.
    ``row_state_names`` are the states with a single number for each row, instead of a number for each element.
    ``keeps_mean_square`` is True if the state has ``v``, a running mean of squares, which float16 cannot hold.

    Args:
        learning_rate: eta where the schedule's factor is 1.
        schedule: eta's course over the steps.
        clip_row_norm: largest Euclidean norm of a row's g, which is scaled down to it. None: no limit.
    """

    learning_rate: float = 0.01
    schedule: Schedule = field(default=Constant(), kw_only=True)
    clip_row_norm: float | None = field(default=None, kw_only=True)
    rule: ClassVar[str]
    state_names: ClassVar[tuple[str, ...]] = ("last_update_step",)
    row_state_names: ClassVar[tuple[str, ...]] = ()
    keeps_mean_square: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be a finite number of at least 0, not {self.learning_rate}")
        settings = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in ("clip_row_norm", "eps"):
            value = settings.get(name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, not {value}")
        for name in ("beta1", "beta2"):
            if name in settings and not 0.0 <= settings[name] < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), not {settings[name]}")
        for name, known in (("moments", MOMENTS), ("decay", DECAYS), ("first_touch", FIRST_TOUCH)):
            if name in settings and settings[name] not in known:
                raise ValueError(f"{name} '{settings[name]}' is unknown: use {' or '.join(known)}")
        decay = settings.get("weight_decay", 0.0)
        if not 0.0 <= decay < float("inf"):
            raise ValueError(f"weight_decay must be a finite number of at least 0, not {decay}")
        if not self.learning_rate * decay < 1.0:
            raise ValueError(
                f"learning_rate * weight_decay must stay below 1, not {self.learning_rate * decay:g}: "
                "a row would be gone after one step"
            )

    def apply_rule(self, rows: TouchedRows) -> None:
        """Update the rows and their state by one step; every kernel is tested against this."""
        raise NotImplementedError(f"{type(self).__name__} has no update rule: define apply_rule")

    def rates(self, steps: np.ndarray) -> np.ndarray:
        """Return eta at each of ``steps`` (from 1), float64."""
        return self.learning_rate * self.schedule.factors(steps)

    def rate(self, step: int) -> float:
        """Return eta at ``step``."""
        return float(self.rates(np.array([step]))[0])

    @property
    def betas(self) -> tuple[float, float] | None:
        """beta1 and beta2 of the running means of g and its square; None without running means."""
        return None

    @property
    def dense_moments(self) -> bool:
        """True if the running means of an untouched row shrink at each step, as those of dense Adam do."""
        return self.betas is not None and getattr(self, "moments", "lazy") == "dense"

    @property
    def idle_alpha(self) -> float:
        """alpha of the decay that an update applies to a touched row, only for its own step; 0: no decay."""
        return 0.0

    @property
    def read_decay(self) -> tuple[float, int | None]:
        """alpha of the decay that a read applies to an untouched row, and the steps of an epoch for decay by epoch."""
        return 0.0, None

    @property
    def moments_decay(self) -> bool:
        """True if the running means of an untouched row decay together with the row."""
        return False

    @property
    def constant_decay(self) -> float:
        """Decay of every row at each step, touched or not, as a multiple of eta; 0: no decay."""
        return float(getattr(self, "weight_decay", 0.0))

    @property
    def decays_from_start(self) -> bool:
        """True if a row that was never touched decays as if it had been touched at step 0."""
        return getattr(self, "first_touch", "keep") == "literal"

    @property
    def idle_momentum(self) -> bool:
        """True if momentum keeps moving a row between its touches."""
        return False

    @property
    def deferred_settings(self) -> tuple[str, ...]:
        """Names of the settings that determine the value of an untouched row; a warm start may not change them.

        A setting unknown to this method is included if untouched rows move at all.
        """
        momentum, decay, adaptive = self.idle_momentum, self.constant_decay > 0.0, hasattr(self, "alpha")
        matters = {
            "moments": True,
            "first_touch": True,
            "alpha": adaptive,
            "decay": adaptive,
            "epoch_steps": adaptive,
            "learning_rate": momentum or decay,
            "schedule": momentum or decay,
            "weight_decay": decay,
            **dict.fromkeys(("beta1", "beta2", "eps", "eps_inside_root"), momentum),
            "clip_row_norm": False,
        }
        return tuple(one.name for one in fields(self) if matters.get(one.name, momentum or decay or adaptive))


@dataclass(frozen=True)
class AdaptiveDecay:
    """Adaptive regularization (Li and Lyu, Algorithm 1): decay before an optimizer's step, applied when rows are read.

    theta <- theta - lambda theta for every row at every step k, where lambda = min(1, alpha (k - s - 1)) and s is the
    step of the row's last touch. The decay is not multiplied by eta.

    Args:
        first_touch: ``keep``: a row that was never touched keeps its initial value. ``literal``: it decays as if it had
            been touched at step 0.
        decay: ``at_read``: the published algorithm. ``by_epoch`` (ours): no decay in the first epoch; afterwards a gap
            in which an epoch began counts as one ten times as long. At a touch m shrinks by the same factor, v by its
            square. See :class:`embeddings.optim.idle_decay.DecayByEpoch`.
        epoch_steps: number of steps of an epoch, counted from the tables' first step; for ``by_epoch``.
    """

    alpha: float = 1e-4
    first_touch: Literal["keep", "literal"] = field(default="keep", kw_only=True)
    decay: Literal["at_read", "by_epoch"] = field(default="at_read", kw_only=True)
    epoch_steps: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # defined by the optimizer class
        if not 0.0 < self.alpha < float("inf"):
            plain = type(self).__name__.removesuffix("AR")
            raise ValueError(f"alpha must be a finite number above 0, not {self.alpha}: for no decay use {plain}")
        if (self.decay == "by_epoch") != (self.epoch_steps is not None):
            raise ValueError(
                f"decay '{self.decay}' with epoch_steps {self.epoch_steps}: decay 'by_epoch' needs the number of steps "
                "of an epoch, and at_read has none"
            )
        if self.epoch_steps is not None and self.epoch_steps < 1:
            raise ValueError(f"epoch_steps must be at least 1, not {self.epoch_steps}")

    @property
    def idle_alpha(self) -> float:
        return 0.0 if self.decay == "by_epoch" else self.alpha

    @property
    def moments_decay(self) -> bool:
        return self.decay == "by_epoch"

    @property
    def read_decay(self) -> tuple[float, int | None]:
        return self.alpha, self.epoch_steps


def root(square: torch.Tensor, eps: torch.Tensor | float, inside: bool) -> torch.Tensor:
    """Return sqrt(square + eps), or sqrt(square) + eps."""
    return (square + eps).sqrt() if inside else square.sqrt() + eps
