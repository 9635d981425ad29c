"""Evaluation of a dataset's ``filter`` on batches of rows. Torch-free.

As in SQL, a comparison with null is neither true nor false, and a row passes if the whole condition is true. NaN is
null.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.errors import DataError
from trainer.data.sources.times import DATE, read_times
from trainer.data.sources.types import is_text
from trainer.spec import row_filter

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


class RowFilter:
    """Filter of rows by a condition on their columns."""

    def __init__(self, text: str):
        self.text = text
        self.columns = row_filter.filter_columns(text)
        self._condition = row_filter.parse_filter(text)

    def __str__(self) -> str:
        return self.text

    def passing(self, batch: pa.RecordBatch, where: str) -> npt.NDArray[np.int64]:
        """Return the positions of the rows of a batch that pass, in order.

        ``where``: the file, for errors.

        Raises:
            DataError: a column is compared with a value of another kind.
        """
        passes = pc.fill_null(_Evaluation(batch, where).of(self._condition), False)
        return np.flatnonzero(passes.to_numpy(zero_copy_only=False))


class _Evaluation:
    def __init__(self, batch: pa.RecordBatch, where: str):
        self._batch, self._where = batch, where

    def of(self, condition: row_filter.Condition) -> pa.Array:
        """Return true, false or null for each row."""
        if isinstance(condition, row_filter.Compare):
            return self._compare(condition)
        if isinstance(condition, row_filter.IsIn):
            column = self._column(condition.column)
            equal = [self._compare(row_filter.Compare(condition.column, "==", value)) for value in condition.values]
            return _joined(pc.or_kleene, equal) if len(equal) else pa.nulls(len(column), pa.bool_())
        if isinstance(condition, row_filter.IsNull):
            return pc.is_null(self._column(condition.column))
        if isinstance(condition, row_filter.Not):
            return pc.invert(self.of(condition.condition))
        function = pc.and_kleene if isinstance(condition, row_filter.AllOf) else pc.or_kleene
        assert isinstance(condition, row_filter.AllOf | row_filter.AnyOf)
        return _joined(function, [self.of(one) for one in condition.conditions])

    def _compare(self, condition: row_filter.Compare) -> pa.Array:
        left, right = condition.left, condition.right
        of_left = self._column(left) if isinstance(left, row_filter.Column) else None
        of_right = self._column(right) if isinstance(right, row_filter.Column) else None
        try:
            if of_right is None and isinstance(right, str) and of_left is not None:
                return _compared(of_left, condition.comparison, right)
            if of_left is None and isinstance(left, str) and of_right is not None:
                return _compared(of_right, _MIRRORED.get(condition.comparison, condition.comparison), left)
            first = of_left if of_left is not None else _scalar(left, of_right)
            second = of_right if of_right is not None else _scalar(right, of_left)
            return _FUNCTIONS[condition.comparison](first, second)
        except (pa.ArrowException, TypeError, ValueError):
            column, other = (left, right) if isinstance(left, row_filter.Column) else (right, left)
            assert isinstance(column, row_filter.Column)
            said = f"column '{other.name}'" if isinstance(other, row_filter.Column) else repr(other)
            kind = self._column(column).type
            raise DataError(
                f"holds {kind}, and the filter compares it with {said}",
                where=f"{self._where}, column '{column.name}'",
                remedy="compare it with a value of its kind in filter of the dataset: text is quoted, numbers are not, "
                "dates are quoted as 'YYYY-MM-DD'",
            ) from None

    def _column(self, column: row_filter.Column) -> pa.Array:
        array = self._batch.column(column.name)
        # Arrow takes NaN for a number that differs from every other number.
        return pc.if_else(pc.is_nan(array), None, array) if pa.types.is_floating(array.type) else array


def _joined(function: Callable[..., Any], arrays: list[pa.Array]) -> pa.Array:
    first, *others = arrays
    for one in others:
        first = function(first, one)
    return first


def _scalar(value: row_filter.Column | row_filter.Constant, beside: pa.Array | None) -> pa.Scalar:
    """Return a number or a boolean as a scalar; each is compared with its own kind only."""
    assert beside is not None
    kind = beside.type
    if pa.types.is_temporal(kind) or is_text(kind) or isinstance(value, bool) != pa.types.is_boolean(kind):
        raise TypeError(value)
    return pa.scalar(value)


def _compared(array: pa.Array, comparison: str, text: str) -> pa.Array:
    """Return a column compared with text, as instants if both are dates or times."""
    compare, kind = _FUNCTIONS[comparison], array.type
    given = read_times(pa.array([text]))
    is_dated = pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    if (is_dated and given.forms[0] < DATE) or not (pa.types.is_temporal(kind) or is_text(kind)):
        raise TypeError(text)
    if not is_text(kind) and not is_dated:
        return compare(array, pa.scalar(text).cast(kind))
    if given.forms[0] < DATE:
        return compare(array, text)
    times = read_times(array)
    instants = pa.array(times.instants, mask=array.is_null().to_numpy(zero_copy_only=False))
    by_instant = compare(instants, given.instants[0])
    return by_instant if is_dated else pc.if_else(pa.array(times.forms >= DATE), by_instant, compare(array, text))
