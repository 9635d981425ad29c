"""Columns in the types of the data layer: ids as int64 or large_string, lists of ids, numbers. Torch-free."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns import text_lists
from trainer.data.errors import DataError
from trainer.data.sources.id_types import are_written_as_integers
from trainer.data.sources.id_types import some_are_written_as_integers as some_are_written_as_integers
from trainer.data.sources.source import Chunk
from trainer.data.sources.types import element_type as element_type
from trainer.data.sources.types import is_list, is_text
from trainer.data.sources.types import is_there as is_there

Kind = Literal["int", "string"]


def id_kind(type_: pa.DataType, where: str) -> Kind:
    """Return the kind of ids of a column type: integers or strings.

    Raises:
        DataError: the type is neither.
    """
    if (
        pa.types.is_integer(type_)
        or pa.types.is_boolean(type_)
        or pa.types.is_floating(type_)
        or pa.types.is_null(type_)
        or (pa.types.is_decimal(type_) and type_.scale == 0)
    ):
        return "int"
    if is_text(type_):
        return "string"
    raise DataError(f"holds {type_}: ids are integers or strings", where=where, remedy="convert the column")


def as_ids(array: pa.Array, kind: Kind, where: str) -> pa.Array:
    """Return ids as int64 or large_string, nulls kept; NaN is null.

    Raises:
        DataError: a value is not of this kind; a float must be a whole number, small enough to be exact.
    """
    try:
        if kind == "string":
            if not is_text(array.type):
                array = as_ids(array, "int", where)
            return array.cast(pa.large_string())
        if is_text(array.type):
            _require_written_as_integers(array, where)
        elif id_kind(array.type, where) == "int" and pa.types.is_floating(array.type):
            array = pc.if_else(pc.is_nan(array), None, array)
            _require_exact(array, where)
        return array.cast(pa.int64())
    except pa.ArrowException as error:
        raise DataError(
            f"has an id that is no 64-bit integer: {str(error).splitlines()[0]}",
            where=where,
            remedy="write the column as text, or as int64: ids are between -2^63 and 2^63 - 1",
        ) from None


def _require_written_as_integers(texts: pa.Array, where: str) -> None:
    """Check that every text is the usual form of its integer, because 7 and 007 would be one integer but two ids."""
    if are_written_as_integers(texts):
        return
    wrong = next(one for one in texts if one.is_valid and not are_written_as_integers(pa.array([one.as_py()])))
    raise DataError(
        f"has an id that is no 64-bit integer in its usual form: '{wrong}'; the other ids of its table are integers",
        where=where,
        remedy="make every id of this table an integer, without zeros in front, or every one a string",
    )


def exact_below(type_: pa.DataType) -> int:
    """Return the number below which a column of floats holds every integer."""
    return int(2 ** (np.finfo(type_.to_pandas_dtype()).nmant + 1))


def _require_exact(array: pa.Array, where: str) -> None:
    """Check that floats were not rounded: from 2^53 on two integers are one float64, and two ids one row."""
    bounds = pc.min_max(array).as_py()
    largest = max((abs(one) for one in bounds.values() if one is not None), default=0)
    if exact_below(array.type) <= largest < 2**63:
        raise DataError(
            f"has the id {largest:.0f} in a column of {array.type}, which cannot hold every integer of that size",
            where=where,
            remedy="write the column as integers, or as text: pandas turns integers with missing values into floats",
        )


def require_ids(chunk: Chunk, column: str) -> None:
    """Check that no id of a feature with ``missing: error`` is missing.

    Raises:
        DataError: at the first missing id.
    """
    missing = ~is_there(chunk.column(column))
    if missing.any():
        raise DataError(
            "the id is missing, and the feature says missing: error",
            where=chunk.where(column, int(np.flatnonzero(missing)[0])),
            remedy="fill it in, remove the row, or set max_bad_rows of the dataset",
        )


def as_lists(chunk: Chunk, column: str, split: bool = True) -> tuple[pa.Array, npt.NDArray[np.int64]]:
    """Return (elements, lengths) of a column of lists; null lists and elements that are null or NaN are left out.

    A single value is a list of one value; with ``split``, text is a list as :mod:`trainer.data.columns.text_lists`
    says.

    Raises:
        DataError: at the first text in brackets that is no list.
    """
    array = chunk.column(column)
    elements, parents, unreadable = raw_lists(array, split)
    if unreadable.any():
        row = int(np.flatnonzero(unreadable)[0])
        what = f"{array[row].as_py()[:60]!r} is no list of texts or numbers with commas between them"
        raise DataError(what, where=chunk.where(column, row), remedy=text_lists.REMEDY)
    there = is_there(elements)
    if not there.all():
        parents, elements = parents[there], elements.filter(pa.array(there))
    return elements, np.bincount(parents, minlength=len(array)).astype(np.int64)


def raw_lists(array: pa.Array, split: bool = True) -> tuple[pa.Array, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the elements of a column's lists, nulls included; the row of each element; a mask of unreadable rows.

    Lists are read as by :func:`as_lists`.
    """
    unreadable = np.zeros(len(array), dtype=bool)
    if pa.types.is_null(array.type):
        array = array.cast(pa.large_list(pa.null()))
    if split and is_text(array.type):
        array, unreadable = text_lists.split(array)
    if not is_list(array.type):
        array = pa.LargeListArray.from_arrays(pa.array(np.arange(len(array) + 1), type=pa.int64()), array, mask=None)
    parents = pc.list_parent_indices(array).to_numpy(zero_copy_only=False).astype(np.int64)
    return pc.list_flatten(array), parents, unreadable
