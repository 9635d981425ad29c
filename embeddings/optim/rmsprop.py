"""RMSprop (Tieleman and Hinton 2012), and with adaptive regularization (Li and Lyu)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from embeddings.optim.base import AdaptiveDecay, RowOptimizer, TouchedRows, root


@dataclass(frozen=True)
class RMSprop(RowOptimizer):
    """v <- beta2 v + (1 - beta2) g^2; theta <- theta - eta g / (sqrt(v) + eps), element by element.

    RMSprop (Tieleman and Hinton 2012) without momentum and without centring, as torch.optim.RMSprop, which calls beta2
    alpha. v is not corrected for its start at 0: a row's first step is 1 / sqrt(1 - beta2) times Adam's.

    Args:
        eps_inside_root: True to divide g by sqrt(v + eps) instead.
        moments: ``dense`` is what torch.optim.RMSprop does on dense gradients: v of an untouched row shrinks at each
            step. ``lazy``: v stays. The row itself stays in both.
    """

    learning_rate: float = 0.01
    beta2: float = 0.99
    eps: float = 1e-8
    moments: Literal["dense", "lazy"] = "dense"
    eps_inside_root: bool = field(default=False, kw_only=True)
    rule: ClassVar[str] = "rmsprop"
    state_names: ClassVar[tuple[str, ...]] = ("v", "last_update_step")
    keeps_mean_square: ClassVar[bool] = True

    def apply_rule(self, rows: TouchedRows) -> None:
        v = rows.running_mean("v", self.beta2, rows.square)
        rows.theta = rows.theta - rows.rate * rows.grad / root(v, self.eps, self.eps_inside_root)

    @property
    def betas(self) -> tuple[float, float]:
        return 0.0, self.beta2


@dataclass(frozen=True)
class RMSpropAR(AdaptiveDecay, RMSprop):
    """RMSprop with adaptive regularization.

    It differs from FBGEMM's ``rowwise_rmsprop_ar``, which multiplies lambda by eta, keeps lambda above a floor, and has
    one number of state per row.
    """
