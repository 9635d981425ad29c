"""Where in the rows a training is. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """The beginning of a window of rows, or the end of them all.

    Attributes:
        file: number of the file, or of the segment of a topic, that is read next.
        row: number of its row that is read next.
        window: number of windows before it.
        rows: number of rows before it.
        examples: of these, those that train, validate and test.
        is_end: whether no row follows.
        bad: number of rows before it that were left out because they are bad; they are not among ``rows``.
        bad_of_block: of these, those of the block of rows in which it lies (trainer.data.one_pass.topic_rows).
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
        """Return the place that ``dataclasses.asdict`` gave; of None the beginning."""
        if document is None:
            return Place()
        train, validation, test = document["examples"]
        return Place(**{**document, "examples": (train, validation, test)})
