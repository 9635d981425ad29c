"""Which rows of a batch pass a dataset's ``filter``. Torch-free.

As in SQL, a comparison with null is neither true nor false, and a row passes where the whole is true. NaN is null.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.errors import DataError
from trainer.spec.row_filter import (
    AllOf,
    AnyOf,
    Column,
    Compare,
    Condition,
    Constant,
    IsIn,
    IsNull,
    Not,
    filter_columns,
    parse_filter,
)

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


class RowFilter:
    """The rows that pass a condition on their columns."""

    def __init__(self, text: str):
        self.text = text
        self.columns = filter_columns(text)
        self._condition = parse_filter(text)

    def __str__(self) -> str:
        return self.text

    def passing(self, batch: pa.RecordBatch, where: str) -> npt.NDArray[np.int64]:
        """Return the positions of the rows of a batch that pass, in order.

        Args:
            batch: has the columns that the filter reads.
            where: the file, for errors.

        Raises:
            DataError: a column has values of another kind than it is compared with.
        """
        passes = pc.fill_null(_Evaluation(batch, where).of(self._condition), False)
        return np.flatnonzero(passes.to_numpy(zero_copy_only=False))


class _Evaluation:
    def __init__(self, batch: pa.RecordBatch, where: str):
        self._batch, self._where = batch, where

    def of(self, condition: Condition) -> pa.Array:
        """Return true, false or null for each row."""
        if isinstance(condition, Compare):
            return self._compare(condition)
        if isinstance(condition, IsIn):
            column = self._column(condition.column)
            equal = [self._compare(Compare(condition.column, "==", value)) for value in condition.values]
            return _joined(pc.or_kleene, equal) if len(equal) else pa.nulls(len(column), pa.bool_())
        if isinstance(condition, IsNull):
            return pc.is_null(self._column(condition.column))
        if isinstance(condition, Not):
            return pc.invert(self.of(condition.condition))
        function = pc.and_kleene if isinstance(condition, AllOf) else pc.or_kleene
        assert isinstance(condition, AllOf | AnyOf)
        return _joined(function, [self.of(one) for one in condition.conditions])

    def _compare(self, condition: Compare) -> pa.Array:
        left, right = condition.left, condition.right
        of_left = self._column(left) if isinstance(left, Column) else None
        of_right = self._column(right) if isinstance(right, Column) else None
        try:
            first = of_left if of_left is not None else _scalar(left, of_right)
            second = of_right if of_right is not None else _scalar(right, of_left)
            return _FUNCTIONS[condition.comparison](first, second)
        except (pa.ArrowException, TypeError, ValueError):
            column, other = (left, right) if isinstance(left, Column) else (right, left)
            assert isinstance(column, Column)
            said = f"column '{other.name}'" if isinstance(other, Column) else repr(other)
            kind = self._column(column).type
            raise DataError(
                f"holds {kind}, and the filter compares it with {said}",
                where=f"{self._where}, column '{column.name}'",
                remedy="compare it with a value of its kind in filter of the dataset: text is quoted, numbers are not, "
                "dates are quoted as 'YYYY-MM-DD'",
            ) from None

    def _column(self, column: Column) -> pa.Array:
        array = self._batch.column(column.name)
        # To Arrow NaN is a number, which differs from every other.
        return pc.if_else(pc.is_nan(array), None, array) if pa.types.is_floating(array.type) else array


def _joined(function: Callable[..., Any], arrays: list[pa.Array]) -> pa.Array:
    first, *others = arrays
    for one in others:
        first = function(first, one)
    return first


def _scalar(value: Column | Constant, beside: pa.Array | None) -> pa.Scalar:
    """Return a value as what it is compared with: a date, a time or a boolean column has values of its own type."""
    assert beside is not None
    scalar = pa.scalar(value)
    kind = beside.type
    if isinstance(value, str) and not pa.types.is_temporal(kind) and not _is_text(kind):
        raise TypeError(value)
    if isinstance(value, bool) != pa.types.is_boolean(kind):
        raise TypeError(value)
    if pa.types.is_temporal(kind):
        if not isinstance(value, str):
            raise TypeError(value)
        return scalar.cast(pa.timestamp("us")).cast(kind) if pa.types.is_timestamp(kind) else scalar.cast(kind)
    if _is_text(kind) and not isinstance(value, str):
        raise TypeError(value)
    return scalar


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
