"""Starting point and callbacks of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.record import Position

if TYPE_CHECKING:
    from trainer.training.loop import Trainer

Emit = Callable[..., None]
"""``emit(kind, **fields)`` writes an event of the run (trainer.runs.events). The function is called only on rank 0."""


@dataclass(frozen=True)
class Resumed:
    """Point from which a training continues: its position, and the metrics of the epochs evaluated so far."""

    position: Position = field(default_factory=Position)
    history: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Hooks:
    """Callbacks of a training; ``save``, ``save_best`` and ``load_best`` are collective.

    ``should_stop`` returns the reason if this rank is to stop, else None. ``save_best`` writes a separate checkpoint
    after an epoch that is the best so far. ``load_best`` restores the model that it wrote last, and returns its
    position; None if it wrote none.
    """

    emit: Emit = lambda kind, **fields: None
    should_stop: Callable[[], str | None] = lambda: None
    save: Callable[[Trainer], None] = lambda trainer: None
    save_best: Callable[[Trainer], None] = lambda trainer: None
    load_best: Callable[[Trainer], Position | None] = lambda trainer: trainer.position
