"""Base class of columns with one value per row, such as a number, a vector, a label or a time. Torch-free.

A subclass for each kind of value defines how values are read, which are bad, and which file keeps them. Preparation on
one or several hosts, one-pass training and scoring all use these objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from trainer.data.sources.key_matches import KeyMatches
from trainer.data.sources.source import Chunk

Mask = npt.NDArray[np.bool_]
Problem = tuple[str, str, Mask]
"""Name of a column, reason why values are bad, and mask of the rows with such values, bool [rows]."""


class Column(ABC):
    """A column with one value per row.

    ``name`` is unique among the values of a plan. Names of features have no blank; other names have one.
    """

    name: str

    type_of_first: ClassVar[bool] = False
    """True if the type of the values is only known once the first rows are read; :attr:`dtype` is then a default."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row's value."""
        return ()

    @property
    def split_file(self) -> str | None:
        """Name of the file that keeps the values of a split's examples; None if they are not kept."""
        return None

    @abstractmethod
    def read(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Return the values of the chunk's rows, [rows, *shape].

        Raises:
            DataError: naming the first bad value.
        """

    def apply(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return values that :meth:`read` gave, converted to the form that a model reads."""
        return values

    def problems(self, chunk: Chunk) -> Iterator[Problem]:
        """Yield the bad values of the chunk's rows, one entry for each reason."""
        yield from ()

    def matches(self, chunk: Chunk, found: npt.NDArray[Any]) -> KeyMatches | None:
        """Return counts of the keys that were found; None for columns that look no values up by keys.

        ``found``: the values of the rows, as :meth:`read` returned them.
        """
        return None
