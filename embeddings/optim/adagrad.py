"""Adagrad (Duchi et al. 2011), its rowwise form, and with adaptive regularization (Li and Lyu)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from embeddings.optim.base import AdaptiveDecay, RowOptimizer, TouchedRows, root


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """sum <- sum + g^2; theta <- theta - eta g / (sqrt(sum) + eps), element by element (Duchi et al. 2011).

    With ``weight_decay`` it is AdagradW (Li and Lyu): every row is first multiplied by 1 - eta weight_decay at every
    step, touched or not, as torch.optim.AdamW does it.

    Args:
        eps_inside_root: True to divide g by sqrt(sum + eps) instead.
        weight_decay: the constant decay, decoupled from the gradient.
        first_touch: ``keep``: a row that was never touched keeps its initial value. ``literal``: it decays from step 1.
    """

    eps: float = 1e-10
    eps_inside_root: bool = field(default=False, kw_only=True)
    weight_decay: float = field(default=0.0, kw_only=True)
    first_touch: Literal["keep", "literal"] = field(default="keep", kw_only=True)
    rule: ClassVar[str] = "adagrad"
    state_names: ClassVar[tuple[str, ...]] = ("sum", "last_update_step")

    def apply_rule(self, rows: TouchedRows) -> None:
        rows.state["sum"] = rows.state["sum"] + rows.square
        rows.theta = rows.theta - rows.rate * rows.grad / root(rows.state["sum"], self.eps, self.eps_inside_root)


@dataclass(frozen=True)
class RowwiseAdagrad(RowOptimizer):
    """sum <- sum + mean(g^2); theta <- theta - eta g / (sqrt(sum) + eps), with one ``sum`` for each row.

    FBGEMM's EXACT_ROWWISE_ADAGRAD: a quarter of Adagrad's state at dim 4, a 64th at dim 64.
    """

    eps: float = 1e-10
    state_names: ClassVar[tuple[str, ...]] = ("sum", "last_update_step")
    row_state_names: ClassVar[tuple[str, ...]] = ("sum",)
    rule: ClassVar[str] = "rowwise_adagrad"

    def apply_rule(self, rows: TouchedRows) -> None:
        rows.state["sum"] = rows.state["sum"] + rows.square
        rows.theta = rows.theta - rows.rate * rows.grad / root(rows.state["sum"], self.eps, False)


@dataclass(frozen=True)
class AdagradAR(AdaptiveDecay, Adagrad):
    """Adagrad with adaptive regularization (Li and Lyu)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise ValueError(f"weight_decay {self.weight_decay} with alpha: use Adagrad's decay or AdagradAR's")
