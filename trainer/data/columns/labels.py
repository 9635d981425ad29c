"""Labels from a column or a rule, or a column's values. Torch-free."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.values import as_numbers
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import LABEL, VALUE
from trainer.data.sources.source import Chunk
from trainer.spec import Label, parse_rule

_COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def label_dtype(label: Label) -> np.dtype[Any]:
    """Return how labels are kept: uint8 where they are 0 or 1, float32 where they are values."""
    return LABEL if label.value is None else VALUE


def labels_of(chunk: Chunk, label: Label) -> npt.NDArray[np.uint8] | npt.NDArray[np.float32]:
    """Return 0 or 1 per row, from ``label.column`` or ``label.rule``; the numbers of ``label.value``.

    Raises:
        DataError: at the first bad value.
    """
    if label.value is not None:
        return _values_of(chunk, label.value)
    if label.rule is not None:
        column, comparison, number = parse_rule(label.rule)
        return _COMPARISONS[comparison](as_numbers(chunk, column, f"label (rule '{label.rule}')"), number).astype(
            np.uint8
        )
    assert label.column is not None
    values = as_numbers(chunk, label.column, "label")
    bad = np.flatnonzero((values != 0) & (values != 1))
    if len(bad):
        raise DataError(
            f"the label is {values[bad[0]]}, neither 0 nor 1",
            where=chunk.where(label.column, int(bad[0])),
            remedy=f"correct it, or use a rule such as label: {{rule: '{label.column} >= 1'}}",
        )
    return values.astype(np.uint8)


def _values_of(chunk: Chunk, column: str) -> npt.NDArray[np.float32]:
    numbers = as_numbers(chunk, column, "label")
    bad = np.flatnonzero(~(np.abs(numbers.astype(np.float64)) <= np.finfo(VALUE).max))
    if len(bad):
        raise DataError(
            f"the label is {numbers[bad[0]]}, which is no finite float32",
            where=chunk.where(column, int(bad[0])),
            remedy="correct it, or remove the row",
        )
    return numbers.astype(VALUE)
