"""What a training is begun with: where it goes on, and what it calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.record import Position

if TYPE_CHECKING:
    from trainer.training.loop import Trainer

Emit = Callable[..., None]
"""``emit(kind, **fields)``: an event of the run (trainer.runs.events). Called on rank 0 alone."""


@dataclass(frozen=True)
class Resumed:
    """Where a training goes on: its position, and the metrics of the epochs that are evaluated already."""

    position: Position = field(default_factory=Position)
    history: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Hooks:
    """What a training calls.

    Args:
        emit: writes an event.
        should_stop: gives the reason once this rank is to stop.
        save: writes a checkpoint (collective).
        save_best: as ``save``, after an epoch that is the best so far.
        load_best: restores the model from what ``save_best`` wrote, and says where it was.
    """

    emit: Emit = lambda kind, **fields: None
    should_stop: Callable[[], str | None] = lambda: None
    save: Callable[[Trainer], None] = lambda trainer: None
    save_best: Callable[[Trainer], None] = lambda trainer: None
    load_best: Callable[[Trainer], Position] = lambda trainer: trainer.position
