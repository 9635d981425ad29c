"""Position of one-pass training in the rows that it reads. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Position at the beginning of a window of rows, or at the end of all rows.

    Attributes:
        file: number of the next file, or of the next segment of a topic.
        row: number of the next row in that file or segment.
        window: number of windows before this position.
        rows: number of rows before this position.
        examples: numbers of training, validation and test rows among them.
        is_end: True if no row follows.
        bad: number of bad rows before this position, which were left out and are not counted in ``rows``.
        bad_of_block: number of bad rows in the block of rows at this position (trainer.data.one_pass.topic_rows).
    """

    file: int = 0
    row: int = 0
    window: int = 0
    rows: int = 0
    examples: tuple[int, int, int] = (0, 0, 0)
    is_end: bool = False
    bad: int = 0
    bad_of_block: int = 0

    @staticmethod
    def of_json(document: Mapping[str, Any] | None) -> Place:
        """Return the position described by a dictionary that ``dataclasses.asdict`` made; for None, the beginning."""
        if document is None:
            return Place()
        train, validation, test = document["examples"]
        return Place(**{**document, "examples": (train, validation, test)})
