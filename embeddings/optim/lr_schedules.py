"""Learning-rate schedules: pure functions of the step, so that a resume needs no state and the future is known.

Step k = 1, 2, ... trains with ``learning_rate * factor``. Each class names a scheduler of torch.optim.lr_scheduler.
With the same settings it gives that scheduler's learning rates, stepped once after each optimizer step. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Schedule:
    """A linear warmup over the first ``warmup_steps`` steps (LinearLR from ``start_factor``), then :meth:`_after`.

    After a warmup the steps are counted from its end, as torch's SequentialLR does.
    """

    warmup_steps: int = 0
    start_factor: float = 0.0

    def __post_init__(self) -> None:
        _check(self.warmup_steps >= 0, f"warmup_steps must be at least 0, not {self.warmup_steps}")
        _check(0.0 <= self.start_factor <= 1.0, f"start_factor must lie in [0, 1], not {self.start_factor}")

    def factors(self, steps: np.ndarray | int) -> np.ndarray:
        """Return the factors of the learning rate at ``steps`` (from 1): float64 in [0, 1], of their shape."""
        elapsed = np.asarray(steps, dtype=np.float64) - 1.0
        if not self.warmup_steps:
            return self._after(np.maximum(elapsed, 0.0))
        warm = self.start_factor + (1.0 - self.start_factor) * elapsed / self.warmup_steps
        after = self._after(np.maximum(elapsed - self.warmup_steps, 0.0))
        return np.where(elapsed < self.warmup_steps, np.clip(warm, 0.0, 1.0), after)

    @property
    def settled(self) -> int | None:
        """A step from which on the factor is constant; None: it never is."""
        decaying = self._decaying
        return None if decaying is None else 1 + self.warmup_steps + decaying

    @property
    def _decaying(self) -> int | None:
        """The number of steps after the warmup for which the factor changes; None: forever."""
        return 0

    def _after(self, elapsed: np.ndarray) -> np.ndarray:
        return np.ones_like(elapsed)


@dataclass(frozen=True)
class Constant(Schedule):
    """The constant factor 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.warmup_steps == 0, "a constant schedule has no warmup: use LinearWarmup")


@dataclass(frozen=True)
class LinearWarmup(Schedule):
    """LinearLR: from ``start_factor`` at step 1 up to 1 at step ``warmup_steps`` + 1, then constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.warmup_steps > 0, f"linear_warmup: warmup_steps must be at least 1, not {self.warmup_steps}")


@dataclass(frozen=True)
class Cosine(Schedule):
    """CosineAnnealingLR: from 1 down to ``final_factor`` within ``decay_steps`` steps, where it stays."""

    decay_steps: int = 0
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.decay_steps > 0, f"cosine: decay_steps must be at least 1, not {self.decay_steps}")
        _check(0.0 <= self.final_factor <= 1.0, f"final_factor must lie in [0, 1], not {self.final_factor}")

    @property
    def _decaying(self) -> int | None:
        return self.decay_steps

    def _after(self, elapsed: np.ndarray) -> np.ndarray:
        turn = np.pi * np.minimum(elapsed, self.decay_steps) / self.decay_steps
        return self.final_factor + (1.0 - self.final_factor) * (1.0 + np.cos(turn)) / 2.0


@dataclass(frozen=True)
class StepDecay(Schedule):
    """StepLR: the factor is multiplied by ``gamma`` after every ``every_steps`` steps."""

    every_steps: int = 0
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.every_steps > 0, f"step: every_steps must be at least 1, not {self.every_steps}")
        _check(0.0 < self.gamma <= 1.0, f"step: gamma must lie in (0, 1], not {self.gamma}")

    @property
    def _decaying(self) -> int | None:
        return 0 if self.gamma == 1.0 else None

    def _after(self, elapsed: np.ndarray) -> np.ndarray:
        return self.gamma ** np.floor(elapsed / self.every_steps)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
