"""Adam (Kingma and Ba 2015), AdamW, rowwise Adam, and with adaptive regularization: AdamAR (Li and Lyu)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from embeddings.optim.base import (
    MAX_HORIZON,
    MAX_LEAD,
    VANISHED_PRESENT,
    AdaptiveDecay,
    RowOptimizer,
    TouchedRows,
    root,
)


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2; theta <- theta - eta mhat / (sqrt(vhat) + eps).

    Adam (Kingma and Ba 2015), bias-corrected by the global step: mhat = m / (1 - beta1^k), vhat = v / (1 - beta2^k).

    Args:
        eps_inside_root: True to divide mhat by sqrt(vhat + eps) instead, as in Li and Lyu.
        moments: ``dense``: an untouched row keeps moving by its momentum while its moments shrink, as with
            torch.optim.Adam on dense gradients. ``lazy``: an untouched row and its moments stay unchanged, as with
            torch.optim.SparseAdam.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    moments: Literal["dense", "lazy"] = "dense"
    eps_inside_root: bool = field(default=False, kw_only=True)
    rule: ClassVar[str] = "adam"
    state_names: ClassVar[tuple[str, ...]] = ("m", "v", "last_update_step")
    keeps_mean_square: ClassVar[bool] = True

    def apply_rule(self, rows: TouchedRows) -> None:
        m, v = rows.running_mean("m", self.beta1, rows.grad), rows.running_mean("v", self.beta2, rows.square)
        mhat, vhat = m / (1 - self.beta1**rows.step), v / (1 - self.beta2**rows.step)
        rows.theta = rows.theta - rows.rate * mhat / root(vhat, self.eps, self.eps_inside_root)
        deferred = rows.coefficients
        if deferred is not None and deferred.ahead:
            for drift, eps_term in deferred.lookahead:
                rows.theta -= drift * m / root(v, eps_term, deferred.eps_inside_root)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.idle_momentum:
            return
        if not self.idle_ratio < 1.0:
            bound = "beta2^1.5 (eps stands inside the root)" if self.eps_inside_root else "beta2"
            raise ValueError(
                f"moments 'dense' needs beta1 < {bound}, not {self.beta1} and beta2 = {self.beta2}: "
                "else an idle row's movement does not die away; use moments 'lazy'"
            )
        if (horizon := self.idle_steps_until(VANISHED_PRESENT)) > MAX_HORIZON:
            raise ValueError(
                f"beta1 {self.beta1} with beta2 {self.beta2}: momentum lives for {horizon} idle steps, "
                f"more than {MAX_HORIZON}; use moments 'lazy' or a smaller beta1"
            )

    def idle_steps_until(self, vanished: float) -> int:
        """Return the number of steps without a touch until movement by momentum is ``vanished`` times the first."""
        return math.ceil(math.log(vanished) / math.log(self.idle_ratio))

    @property
    def betas(self) -> tuple[float, float]:
        return self.beta1, self.beta2

    @property
    def idle_momentum(self) -> bool:
        return self.moments == "dense" and self.beta1 > 0.0

    @property
    def momentum_ratio(self) -> float:
        """The factor by which an untouched row's movement shrinks per step, without bias corrections and eps."""
        return self.beta1 / math.sqrt(self.beta2)

    @property
    def idle_ratio(self) -> float:
        """The factor by which the slowest term of an untouched row's movement, that of eps, shrinks per step."""
        slowest = self.beta2**1.5 if self.eps_inside_root else self.beta2
        return self.beta1 / slowest if slowest > 0.0 else float("inf")


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW on dense gradients.

    Every row is first multiplied by 1 - eta weight_decay at every step, touched or not.

    Args:
        first_touch: ``keep``: a row that was never touched keeps its initial value. ``literal``: it decays from step 1,
            as with torch.optim.AdamW.
    """

    weight_decay: float = field(default=0.01, kw_only=True)
    first_touch: Literal["keep", "literal"] = field(default="keep", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.idle_momentum:
            keep = 1.0 - self.learning_rate * self.weight_decay
            if not keep * MAX_LEAD * (1.0 - self.idle_ratio / keep) >= 1.0 - self.idle_ratio:
                raise ValueError(
                    f"learning_rate * weight_decay = {1 - keep:g} takes more from a row in a step than its momentum "
                    "loses: use a smaller weight_decay, or moments 'lazy'"
                )


@dataclass(frozen=True)
class AdamAR(AdaptiveDecay, Adam):
    """Adam with adaptive regularization (Li and Lyu, Algorithm 1).

    theta <- theta - lambda theta - eta mhat / (sqrt(vhat) + eps).

    Example:
        >>> from embeddings.optim import AdamAR
        >>> optimizer = AdamAR(learning_rate=0.001, alpha=1e-4)
        >>> optimizer.moments, optimizer.state_names  # what each row keeps besides its weights
        ('dense', ('m', 'v', 'last_update_step'))
    """


@dataclass(frozen=True)
class RowwiseAdam(Adam):
    """Adam with one v for each row: v <- beta2 v + (1 - beta2) mean(g^2).

    FBGEMM's PARTIAL_ROWWISE_ADAM (whose moments are ``lazy``): half of Adam's state, as m is still kept for each
    element. Deferred updates follow :mod:`embeddings.optim.deferred_update` as Adam's do, with the row's v instead of
    each element's.
    """

    rule: ClassVar[str] = "rowwise_adam"
    row_state_names: ClassVar[tuple[str, ...]] = ("v",)


@dataclass(frozen=True)
class RowwiseAdamAR(RowwiseAdam, AdamAR):
    """:class:`AdamAR` with one v for each row, as in :class:`RowwiseAdam`."""
