"""Row optimizers of embedding tables, as configurations: the kernels carry them out. Torch-free.

A row is touched by a step if it occurs in the batch with non-zero weight, whatever its gradient. Only touched rows are
written. What dense semantics would do to an idle row is applied when the row is read (see :mod:`embeddings.decay`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

MOMENTS = ("dense", "lazy")


@dataclass(frozen=True)
class RowOptimizer:
    """``state_names``: the tensors kept for each row; ``last_update_step`` is the step of its last touch, 0 = never.

    ``row_state_names``: those of them that hold one number for each row, not one for each of its elements.
    """

    learning_rate: float = 0.01
    state_names: ClassVar[tuple[str, ...]] = ("last_update_step",)
    row_state_names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be a finite number of at least 0, not {self.learning_rate}")

    @property
    def idle_alpha(self) -> float:
        """alpha of the decay of idle rows; 0 is none."""
        return 0.0

    @property
    def idle_momentum(self) -> bool:
        """Whether momentum keeps moving an idle row."""
        return False


@dataclass(frozen=True)
class SGD(RowOptimizer):
    """theta <- theta - eta g."""


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """sum <- sum + g^2; theta <- theta - eta g / (sqrt(sum) + eps), element by element (Duchi et al. 2011)."""

    eps: float = 1e-10
    state_names: ClassVar[tuple[str, ...]] = ("sum", "last_update_step")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("eps", self.eps)


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
class Adam(RowOptimizer):
    """Adam (Kingma and Ba 2015), bias-corrected by the global step, eps outside the root.

    ``moments="dense"``: what torch.optim.Adam does on dense gradients: an idle row goes on moving by its momentum, and
    its moments shrink. ``"lazy"``: what torch.optim.SparseAdam does: an idle row and its moments rest.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    moments: Literal["dense", "lazy"] = "dense"
    state_names: ClassVar[tuple[str, ...]] = ("m", "v", "last_update_step")

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("eps", self.eps)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), not {beta}")
        if self.moments not in MOMENTS:
            raise ValueError(f"moments '{self.moments}' is unknown: use dense or lazy")
        if self.moments == "dense" and not self.beta1 < self.beta2:
            raise ValueError(
                f"moments 'dense' needs beta1 < beta2, not {self.beta1} and {self.beta2}: "
                "else an idle row's movement does not die away; use moments 'lazy'"
            )

    @property
    def idle_momentum(self) -> bool:
        return self.moments == "dense"


@dataclass(frozen=True)
class AdamAR(Adam):
    """Adam with adaptive regularization (Li and Lyu, Algorithm 1), with decay applied at read.

    theta <- theta - lambda theta - eta mhat / (sqrt(vhat) + eps) for every row at every step k, where
    lambda = min(1, alpha (k - s - 1)) and s is the step of the row's last touch. The decay is not multiplied by eta.
    """

    alpha: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.alpha < float("inf"):
            raise ValueError(f"alpha must be a finite number above 0, not {self.alpha}: for no decay use Adam")

    @property
    def idle_alpha(self) -> float:
        return self.alpha


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number above 0, not {value}")
