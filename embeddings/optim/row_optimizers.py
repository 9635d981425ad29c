"""Row optimizers of embedding tables, as configurations: the kernels carry them out; torch-free.

A row is touched by a step if it occurs in the batch with non-zero weight, whatever its gradient. Only touched rows are
written. What dense semantics would do to the others is a deferred update, applied when the row is read (see
:mod:`embeddings.optim.deferred_update`). Below, eta is ``learning_rate`` times the schedule's factor at the step, and g
a row's gradient summed over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from embeddings.optim.lr_schedules import Constant, Schedule

MOMENTS = ("dense", "lazy")
FIRST_TOUCH = ("keep", "literal")
DECAYS = ("at_read", "at_update")
# With dense moments and a decay, a row may be stored at most so much farther from its value than without a decay.
MAX_LEAD = 32.0


@dataclass(frozen=True)
class RowOptimizer:
    """Base of the row optimizers: their settings, and which state they keep for each row.

    ``state_names`` are the tensors kept for each row; ``last_update_step`` is the step of its last touch, 0 = never.
    ``row_state_names`` are those of them that hold one number for each row, not one for each of its elements.

    Args:
        learning_rate: eta where the schedule's factor is 1.
        schedule: eta's course over the steps.
        clip_row_norm: a row's g is scaled down to this Euclidean norm where it is longer. None: never.
    """

    learning_rate: float = 0.01
    schedule: Schedule = field(default=Constant(), kw_only=True)
    clip_row_norm: float | None = field(default=None, kw_only=True)
    state_names: ClassVar[tuple[str, ...]] = ("last_update_step",)
    row_state_names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be a finite number of at least 0, not {self.learning_rate}")
        if self.clip_row_norm is not None:
            _positive("clip_row_norm", self.clip_row_norm)

    def rates(self, steps: np.ndarray) -> np.ndarray:
        """Return eta at each of ``steps`` (from 1), float64."""
        return self.learning_rate * self.schedule.factors(steps)

    def rate(self, step: int) -> float:
        """Return eta at ``step``."""
        return float(self.rates(np.array([step]))[0])

    @property
    def betas(self) -> tuple[float, float] | None:
        """beta1 and beta2 of the running means of g and its square; None where none is kept."""
        return None

    @property
    def fading(self) -> bool:
        """Whether running means of an untouched row shrink at each step."""
        return self.betas is not None and getattr(self, "moments", "lazy") == "dense"

    @property
    def idle_alpha(self) -> float:
        """alpha of the decay of untouched rows; 0 is none."""
        return 0.0

    @property
    def read_alpha(self) -> float:
        """alpha of the decay of untouched rows that a read applies.

        It is all of it, but where it waits for the next update.
        """
        return 0.0 if getattr(self, "decay", "at_read") == "at_update" else self.idle_alpha

    @property
    def constant_decay(self) -> float:
        """The part of eta by which a row decays at each step, touched or not; 0 is none."""
        return 0.0

    @property
    def decays_from_start(self) -> bool:
        """Whether a row that was never touched decays like one that was touched at step 0."""
        return False

    @property
    def idle_momentum(self) -> bool:
        """Whether momentum keeps moving an untouched row."""
        return False


@dataclass(frozen=True)
class AdaptiveDecay:
    """Adaptive regularization (Li and Lyu, Algorithm 1), before another optimizer's step, applied at read.

    theta <- theta - lambda theta for every row at every step k, where lambda = min(1, alpha (k - s - 1)) and s is the
    step of the row's last touch. The decay is not multiplied by eta.

    Args:
        first_touch: a row that was never touched is kept as it was initialised, or decays as if touched at step 0
            (literal).
        decay: ``at_update`` is a baseline: an untouched row does not decay, and its next update has the lambda of that
            step alone, which is what decay in a sparse optimizer comes to. It does not stop one-epoch overfitting.
    """

    alpha: float = 1e-4
    first_touch: Literal["keep", "literal"] = field(default="keep", kw_only=True)
    decay: Literal["at_read", "at_update"] = field(default="at_read", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the optimizer whose step it is
        if not 0.0 < self.alpha < float("inf"):
            plain = type(self).__name__.removesuffix("AR")
            raise ValueError(f"alpha must be a finite number above 0, not {self.alpha}: for no decay use {plain}")
        _one_of("decay", self.decay, DECAYS)
        _one_of("first_touch", self.first_touch, FIRST_TOUCH)

    @property
    def idle_alpha(self) -> float:
        return self.alpha

    @property
    def decays_from_start(self) -> bool:
        return self.first_touch == "literal"


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """theta <- theta - eta g."""


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """sum <- sum + g^2; theta <- theta - eta g / (sqrt(sum) + eps), element by element (Duchi et al. 2011).

    With ``weight_decay`` it is AdagradW (Li and Lyu): every row is first multiplied by 1 - eta weight_decay at every
    step, touched or not, as torch.optim.AdamW does it.

    Args:
        eps_inside_root: g / sqrt(sum + eps).
        weight_decay: the constant decay, decoupled from the gradient.
        first_touch: a row that was never touched is kept as it was initialised, or decays from step 1 (literal).
    """

    eps: float = 1e-10
    eps_inside_root: bool = field(default=False, kw_only=True)
    weight_decay: float = field(default=0.0, kw_only=True)
    first_touch: Literal["keep", "literal"] = field(default="keep", kw_only=True)
    state_names: ClassVar[tuple[str, ...]] = ("sum", "last_update_step")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("eps", self.eps)
        _check_decay(self.learning_rate, self.weight_decay)
        _one_of("first_touch", self.first_touch, FIRST_TOUCH)

    @property
    def constant_decay(self) -> float:
        return self.weight_decay

    @property
    def decays_from_start(self) -> bool:
        return self.first_touch == "literal"


@dataclass(frozen=True)
class RowwiseAdagrad(RowOptimizer):
    """sum <- sum + mean(g^2); theta <- theta - eta g / (sqrt(sum) + eps), with one ``sum`` for each row.

    FBGEMM's EXACT_ROWWISE_ADAGRAD: a quarter of Adagrad's state at dim 4, a 64th at dim 64.
    """

    eps: float = 1e-10
    state_names: ClassVar[tuple[str, ...]] = ("sum", "last_update_step")
    row_state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("eps", self.eps)


@dataclass(frozen=True)
class AdagradAR(AdaptiveDecay, Adagrad):
    """Adagrad with adaptive regularization (Li and Lyu)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise ValueError(f"weight_decay {self.weight_decay} beside alpha: use Adagrad's decay or AdagradAR's")


@dataclass(frozen=True)
class RMSprop(RowOptimizer):
    """v <- beta2 v + (1 - beta2) g^2; theta <- theta - eta g / (sqrt(v) + eps), element by element.

    RMSprop (Tieleman and Hinton 2012) without momentum and without centring, as torch.optim.RMSprop, which calls beta2
    alpha. v is not corrected for its start at 0: a row's first step is 1 / sqrt(1 - beta2) times Adam's.

    Args:
        eps_inside_root: g / sqrt(v + eps).
        moments: ``dense`` is what torch.optim.RMSprop does on dense gradients: v of an untouched row shrinks at each
            step. ``lazy``: v stays. The row itself stays in both.
    """

    learning_rate: float = 0.01
    beta2: float = 0.99
    eps: float = 1e-8
    moments: Literal["dense", "lazy"] = "dense"
    eps_inside_root: bool = field(default=False, kw_only=True)
    state_names: ClassVar[tuple[str, ...]] = ("v", "last_update_step")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("eps", self.eps)
        _check_beta("beta2", self.beta2)
        _one_of("moments", self.moments, MOMENTS)

    @property
    def betas(self) -> tuple[float, float]:
        return 0.0, self.beta2


@dataclass(frozen=True)
class RMSpropAR(AdaptiveDecay, RMSprop):
    """RMSprop with adaptive regularization.

    Not FBGEMM's ``rowwise_rmsprop_ar``, whose lambda is multiplied by eta and never below a floor, and which keeps one
    number for a row.
    """


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; theta <- theta - eta mhat / (sqrt(vhat) + eps).

    Adam (Kingma and Ba 2015), bias-corrected by the global step: mhat = m / (1 - beta1^k), vhat = v / (1 - beta2^k).

    Args:
        eps_inside_root: mhat / sqrt(vhat + eps), as Li and Lyu print it.
        moments: ``dense`` is what torch.optim.Adam does on dense gradients: an untouched row goes on moving by its
            momentum, and its moments shrink. ``lazy`` is what torch.optim.SparseAdam does: an untouched row and its
            moments stay.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    moments: Literal["dense", "lazy"] = "dense"
    eps_inside_root: bool = field(default=False, kw_only=True)
    state_names: ClassVar[tuple[str, ...]] = ("m", "v", "last_update_step")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("eps", self.eps)
        for name in ("beta1", "beta2"):
            _check_beta(name, getattr(self, name))
        _one_of("moments", self.moments, MOMENTS)
        if self.moments == "dense" and self.beta1 > 0.0 and not self.idle_ratio < 1.0:
            bound = "beta2^1.5 (eps stands inside the root)" if self.eps_inside_root else "beta2"
            raise ValueError(
                f"moments 'dense' needs beta1 < {bound}, not {self.beta1} and beta2 = {self.beta2}: "
                "else an idle row's movement does not die away; use moments 'lazy'"
            )

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2

    @property
    def idle_momentum(self) -> bool:
        return self.moments == "dense" and self.beta1 > 0.0

    @property
    def idle_ratio(self) -> float:
        """The factor per step of the slowest part of an untouched row's movement, the one with eps."""
        slowest = self.beta2**1.5 if self.eps_inside_root else self.beta2
        return self.beta1 / slowest if slowest > 0.0 else float("inf")


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW on dense gradients.

    Every row is first multiplied by 1 - eta weight_decay at every step, touched or not.

    Args:
        first_touch: a row that was never touched is kept as it was initialised, or decays from step 1 (literal, as
            torch.optim.AdamW does).
    """

    weight_decay: float = field(default=0.01, kw_only=True)
    first_touch: Literal["keep", "literal"] = field(default="keep", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_decay(self.learning_rate, self.weight_decay)
        _one_of("first_touch", self.first_touch, FIRST_TOUCH)
        if self.idle_momentum:
            keep = 1.0 - self.learning_rate * self.weight_decay
            if not keep * MAX_LEAD * (1.0 - self.idle_ratio / keep) >= 1.0 - self.idle_ratio:
                raise ValueError(
                    f"learning_rate * weight_decay = {1 - keep:g} takes more from a row in a step than its momentum "
                    "loses: use a smaller weight_decay, or moments 'lazy'"
                )

    @property
    def constant_decay(self) -> float:
        return self.weight_decay

    @property
    def decays_from_start(self) -> bool:
        return self.first_touch == "literal"


@dataclass(frozen=True)
class AdamAR(AdaptiveDecay, Adam):
    """Adam with adaptive regularization (Li and Lyu, Algorithm 1).

    theta <- theta - lambda theta - eta mhat / (sqrt(vhat) + eps).
    """


@dataclass(frozen=True)
class RowwiseAdam(Adam):
    """Adam with one v for each row: v <- beta2 v + (1 - beta2) mean(g^2).

    FBGEMM's PARTIAL_ROWWISE_ADAM (whose moments are ``lazy``): half of Adam's state, as m is still kept for each
    element. Deferred updates follow :mod:`embeddings.optim.deferred_update` as Adam's do, with the row's v for each
    element's.
    """

    row_state_names: ClassVar[tuple[str, ...]] = ("v",)


@dataclass(frozen=True)
class RowwiseAdamAR(RowwiseAdam, AdamAR):
    """:class:`AdamAR` with one v for each row, as in :class:`RowwiseAdam`."""


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number above 0, not {value}")


def _check_beta(name: str, beta: float) -> None:
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), not {beta}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} '{value}' is unknown: use {' or '.join(known)}")


def _check_decay(learning_rate: float, weight_decay: float) -> None:
    if not 0.0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay must be a finite number of at least 0, not {weight_decay}")
    if not learning_rate * weight_decay < 1.0:
        raise ValueError(
            f"learning_rate * weight_decay must stay below 1, not {learning_rate * weight_decay:g}: "
            "a row would be gone after one step"
        )
