"""Columns of values: what each row has one of, such as a number, a vector, a label or a time. Torch-free.

A class for each kind says how it is read, which of its values are bad, and what of it is kept. Preparation on one host
and on several, training in one pass and scoring ask the same object.
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
"""Column, reason and rows of bad values."""


class Column(ABC):
    """A column of values.

    Attributes:
        name: its name among the columns of a plan; only that of a feature has no blank.
    """

    name: str

    type_of_first: ClassVar[bool] = False
    """True if its values have the type of the first rows, and not :attr:`dtype`."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its values."""
        return np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row's value."""
        return ()

    @property
    def split_file(self) -> str | None:
        """File with its values of a split's examples; None: a split does not keep them."""
        return None

    @abstractmethod
    def read(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Return the values of the rows, [rows, *shape].

        Raises:
            DataError: at the first bad one.
        """

    def apply(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return values as a model reads them."""
        return values

    def problems(self, chunk: Chunk) -> Iterator[Problem]:
        """Yield bad values."""
        yield from ()

    def matches(self, chunk: Chunk, found: npt.NDArray[Any]) -> KeyMatches | None:
        """Count the keys that were found, where values are looked up."""
        return None
