"""Labels of rows (one or several, from a column, a rule or a column's values), and weights of rows. Torch-free."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.base import Column, Problem
from trainer.data.columns.numeric import COMMA_REMEDY, as_floats, has_comma
from trainer.data.columns.values import is_text, is_there
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import LABEL, ROW_WEIGHTS, VALUE
from trainer.data.sources.source import Chunk, Source
from trainer.spec import DatasetSpec, Label, OneOfSeveral, parse_rule

_COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


FIRST_ROWS = 1000
"""Most rows that :func:`check_first_labels` reads."""

_YES = frozenset(
    ("yes", "y", "true", "t", "on", "ok", "pos", "positive", "click", "clicked", "like", "liked", "buy", "bought")
)
_NO = frozenset(("no", "n", "not", "none", "false", "f", "off", "neg", "negative", "non-click", "0"))


def rule_for(column: str, low: float, high: float, distinct: int) -> str:
    """Return a rule, as a manifest writes it, that may turn a column of numbers other than 0 and 1 into labels.

    Of two distinct values the higher is positive. Of several, values from 80% of the highest on are positive, such as 4
    of 5 stars. If the lowest is 0 or negative, as in counts, all values above 0 are.
    """
    limit = f">= {high:g}" if distinct == 2 else f">= {0.8 * high:g}" if low > 0 else "> 0"
    return f"label: {{rule: '{column} {limit}'}}"


def positive_of(texts: Sequence[str]) -> str | None:
    """Return the affirmative one of two texts, such as yes of yes and no; None unless one of exactly two is known."""
    if len(texts) != 2:
        return None
    first, second = (text.strip().lower() for text in texts)
    if first in _YES or second in _NO:
        return texts[0]
    return texts[1] if second in _YES or first in _NO else None


def as_numbers_remedy(column: str, texts: Sequence[str]) -> str:
    """Return the advice, for error messages, to write a column of text as 0 and 1, because no rule reads text."""
    positive = positive_of(texts)
    example = f", in pandas: rows['{column}'] = (rows['{column}'] == {positive or 'WHAT IS POSITIVE'!r}).astype(int)"
    return f"write it as 0 and 1{example}"


@dataclass(frozen=True)
class RowLabels(Column):
    """The label of each row, or several labels per row, [rows, labels].

    ``least`` is the least valid value by label name, for labels that have such a value; a single label's name is
    ``label``.
    """

    dataset: DatasetSpec
    least: Mapping[str, float]
    name = "row labels"

    @property
    def dtype(self) -> np.dtype[Any]:
        return label_dtype(self.dataset)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.dataset.labels),) if self.dataset.labels else ()

    def read(self, chunk: Chunk) -> npt.NDArray[Any]:
        if self.dataset.label is not None:
            return labels_of(chunk, self.dataset.label, self.least.get("label"))
        return several_labels_of(chunk, self.dataset.labels, self.least)

    def problems(self, chunk: Chunk) -> Iterator[Problem]:
        if self.dataset.label is not None:
            yield from label_problems(chunk, self.dataset.label, self.least.get("label"))
        for name, label in self.dataset.labels.items():
            there = is_there(chunk.column(str(label.source_column)))
            if label.mask is not None:
                mask, bad = mask_of(chunk.column(label.mask))
                yield label.mask, "mask that is neither 0 nor 1", bad
                there = there & mask
            for column, reason, rows in label_problems(chunk, label, self.least.get(name)):
                yield column, reason, rows & there


@dataclass(frozen=True)
class RowWeights(Column):
    """The weight of each row, a number of at least 0 in ``column``."""

    column: str
    name = "row weights"
    split_file = ROW_WEIGHTS

    def read(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        numbers, bad = as_floats(chunk.column(self.column))
        bad = bad | ~(numbers >= 0)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise DataError(
                f"the weight of the row is {chunk.column(self.column)[row].as_py()!r}, not a number of at least 0",
                where=chunk.where(self.column, row),
                remedy="correct it, remove the row, or set max_bad_rows of the dataset",
            )
        return numbers.astype(VALUE)

    def problems(self, chunk: Chunk) -> Iterator[Problem]:
        weights, bad = as_floats(chunk.column(self.column))
        yield self.column, "weight of the row that is no number of at least 0", bad | ~(weights >= 0)


def label_dtype(dataset: DatasetSpec) -> np.dtype[Any]:
    """Return the type of stored labels: uint8 for 0 and 1, float32 for values, or for several labels."""
    return LABEL if dataset.label is not None and dataset.label.value is None else VALUE


def check_first_labels(source: Source, dataset: DatasetSpec) -> None:
    """Check that some of the first rows have a number as each label, as far as labels come from columns.

    Raises:
        DataError: no label of the first rows is a number; the error names the first one.
    """
    labels: list[Label] = [label for label in (dataset.label, *dataset.labels.values()) if label is not None]
    columns = [column for label in labels if (column := label.source_column) is not None]
    for chunk in source.stream(columns, FIRST_ROWS) if columns else ():
        for column in columns:
            array = chunk.column(column)
            if not pa.types.is_temporal(array.type) and as_floats(array)[1].all():
                _require_numbers(chunk, column)
        return


def labels_of(
    chunk: Chunk, label: Label, least: float | None = None
) -> npt.NDArray[np.uint8] | npt.NDArray[np.float32]:
    """Return the label of each row: uint8 [rows] of 0 and 1, or float32 [rows] if the spec has ``label.value``.

    The labels come from ``label.column`` or ``label.rule``; with ``label.positive`` all are 1.

    ``least``: least valid number in ``label.value``; if None, any number is valid.

    Raises:
        DataError: naming the first bad value.
    """
    if label.positive is not None:
        return np.ones(len(chunk), dtype=np.uint8)
    assert label.source_column is not None
    _require_numbers(chunk, label.source_column)
    if label.value is not None:
        return _values_of(chunk, label.value, least)
    if label.rule is not None:
        column, comparison, number = parse_rule(label.rule)
        return _COMPARISONS[comparison](_numbers(chunk, column, f"label (rule '{label.rule}')"), number).astype(
            np.uint8
        )
    assert label.column is not None
    values = _numbers(chunk, label.column, "label")
    bad = np.flatnonzero((values != 0) & (values != 1))
    if len(bad):
        rule = rule_for(label.column, float(values.min()), float(values.max()), len(np.unique(values)))
        raise DataError(
            f"the label is {values[bad[0]]}, neither 0 nor 1",
            where=chunk.where(label.column, int(bad[0])),
            remedy=f"correct it, or use a rule, such as {rule}",
        )
    return values.astype(np.uint8)


def label_problems(chunk: Chunk, label: Label, least: float | None) -> Iterator[Problem]:
    """Yield the bad values of one label, an entry for each reason; ``least``: least valid value, None for any."""
    column = label.source_column
    if column is None:
        return
    array = chunk.column(column)
    yield column, "no label", ~is_there(array)
    if pa.types.is_temporal(array.type):
        return
    labels, bad = as_floats(array)
    yield column, "label that is no number", bad | np.isnan(labels)
    if label.column is not None:
        yield column, "label that is neither 0 nor 1", (labels != 0) & (labels != 1)
    if least is not None:
        yield column, f"label below {least:g}", labels < least


def _require_numbers(chunk: Chunk, column: str) -> None:
    array = chunk.column(column)
    if not is_text(array.type):
        return
    bad = np.flatnonzero(as_floats(array)[1])
    if len(bad):
        text = array[int(bad[0])].as_py()
        remedy = as_numbers_remedy(column, array.unique().drop_null().to_pylist())
        if has_comma(text):
            remedy = COMMA_REMEDY
        what = f"the label is {text!r}, and labels are numbers"
        raise DataError(what, where=chunk.where(column, int(bad[0])), remedy=remedy)


def _numbers(chunk: Chunk, column: str, purpose: str) -> npt.NDArray[Any]:
    """Return a column of numbers (or numbers as text), dates or times as int64 or float64; times in microseconds."""
    array = chunk.column(column)
    kind = array.type
    if array.null_count:
        position = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise _bad_number("null", chunk, column, position, purpose)
    try:
        if is_text(kind):
            array = pa.array(as_floats(array)[0])
        elif pa.types.is_temporal(kind):
            array = pc.cast(pc.cast(array, pa.timestamp("us"), safe=False), pa.int64())
        elif pa.types.is_boolean(kind):
            array = array.cast(pa.int64())
        elif pa.types.is_decimal(kind) or pa.types.is_floating(kind):
            array = array.cast(pa.float64())
        else:
            array = array.cast(pa.int64())
    except pa.ArrowException as error:
        raise DataError(
            f"is not a number or time, as the {purpose} must be: {str(error).splitlines()[0]}",
            where=chunk.where(column),
            remedy="convert the column, or name another one",
        ) from None
    numbers = array.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f":
        bad = np.flatnonzero(np.isnan(numbers))
        if len(bad):
            raise _bad_number("NaN", chunk, column, int(bad[0]), purpose)
    return numbers


def _bad_number(what: str, chunk: Chunk, column: str, position: int, purpose: str) -> DataError:
    return DataError(
        f"{what} where the {purpose} must be",
        where=chunk.where(column, position),
        remedy="fill the value in, or remove the row",
    )


def _values_of(chunk: Chunk, column: str, least: float | None) -> npt.NDArray[np.float32]:
    numbers = _numbers(chunk, column, "label")
    bad = np.flatnonzero(~(np.abs(numbers.astype(np.float64)) <= np.finfo(VALUE).max))
    if len(bad):
        raise DataError(
            f"the label is {numbers[bad[0]]}, which is no finite float32",
            where=chunk.where(column, int(bad[0])),
            remedy="correct it, or remove the row",
        )
    below = np.flatnonzero(numbers < (-np.inf if least is None else least))
    if len(below):
        raise DataError(
            f"the label is {numbers[below[0]]}, but its loss needs counts or durations of at least {least:g}",
            where=chunk.where(column, int(below[0])),
            remedy="correct it, remove the row, or use loss mse",
        )
    return numbers.astype(VALUE)


def several_labels_of(
    chunk: Chunk, labels: Mapping[str, OneOfSeveral], least: Mapping[str, float]
) -> npt.NDArray[np.float32]:
    """Return several labels of each row, float32 [rows, labels]; an absent label is NaN.

    A label is absent if its source column is null or its mask is 0. ``least`` is the least valid value by label name.

    Raises:
        DataError: naming the first bad value of a present label or of a mask.
    """
    found = np.full((len(chunk), len(labels)), np.nan, dtype=VALUE)
    for number, (name, label) in enumerate(labels.items()):
        there = present(chunk, label)
        rows = Chunk(chunk.file, chunk.rows[there], chunk.batch.filter(pa.array(there)))
        found[there, number] = labels_of(rows, label, least.get(name))
    return found


def present(chunk: Chunk, label: OneOfSeveral) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows in which the given label, one of several, is present.

    Raises:
        DataError: a mask is neither 0 nor 1.
    """
    column = label.source_column
    assert column is not None
    there = is_there(chunk.column(column))
    if label.mask is None:
        return there
    mask, bad = mask_of(chunk.column(label.mask))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise DataError(
            f"the mask is {chunk.column(label.mask)[row].as_py()!r}, neither 0 nor 1",
            where=chunk.where(label.mask, row),
            remedy="write 1 where the label is there and 0 where it is not, or leave mask out: null is absent too",
        )
    return there & mask


def mask_of(array: pa.Array) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return two flags for each value of a column of masks: it is 1; it is neither 0 nor 1."""
    numbers, bad = as_floats(array)
    return numbers == 1, bad | ~((numbers == 0) | (numbers == 1))
