"""Position of a one-pass training in the rows. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """The beginning of a window of rows, or the end of them all.

    Attributes:
        file: number of the next file, or of the next segment of a topic.
        row: number of its next row.
        window: number of windows before it.
        rows: number of rows before it.
        examples: of these rows, the numbers that train, validate and test.
        is_end: True if no row follows.
        bad: number of bad rows before it, which were left out and are not counted in ``rows``.
        bad_of_block: number of these in its own block of rows (trainer.data.one_pass.topic_rows).
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
        """Return the position of a document that ``dataclasses.asdict`` made; the beginning for None."""
        if document is None:
            return Place()
        train, validation, test = document["examples"]
        return Place(**{**document, "examples": (train, validation, test)})
