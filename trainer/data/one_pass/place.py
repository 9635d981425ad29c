"""Where in the rows a training is. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """The beginning of a window of rows, or the end of them all.

    Attributes:
        file: number of the file that is read next.
        row: number of its row that is read next.
        window: number of windows before it.
        rows: number of rows before it.
        examples: of these, those that train, validate and test.
        is_end: whether no row follows.
    """

    file: int = 0
    row: int = 0
    window: int = 0
    rows: int = 0
    examples: tuple[int, int, int] = (0, 0, 0)
    is_end: bool = False

    @staticmethod
    def of_json(document: Mapping[str, Any] | None) -> Place:
        """Return the place that ``dataclasses.asdict`` gave; of None the beginning."""
        if document is None:
            return Place()
        train, validation, test = document["examples"]
        return Place(**{**document, "examples": (train, validation, test)})
