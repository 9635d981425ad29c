"""Types of a column in the files of one dataset: the fields of structs, and the type that holds several. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

FieldPath = tuple[str, ...]


def fields_of(schema: pa.Schema) -> Iterator[tuple[FieldPath, pa.DataType]]:
    """Yield the path and type of every column; the fields of a struct, at any depth, take the struct's place."""
    for field in schema:
        yield from _leaves((field.name,), field.type)


def field_of(batch: pa.RecordBatch, path: FieldPath) -> pa.Array:
    """Return the column at a path; a field of a null struct is null."""
    column = batch.column(path[0])
    return pc.struct_field(column, list(path[1:])) if len(path) > 1 else column


def common_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """Return a type in which the values of both types keep their meaning; None if there is none.

    - Numbers: integers and floats of any width have a common type. Booleans count as the integers 0 and 1.
    - Text: dictionary-encoded and plain text have a common type.
    - Times: dates count as times.
    - A column without any value fits every type.

    A number, a text and a time have no common type with one another.
    """
    if left == right:
        return left
    left, right = plain_type(left), plain_type(right)
    if left == right or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    if is_list(left) and is_list(right):
        values = common_type(left.value_type, right.value_type)
        return None if values is None else pa.large_list(values)
    if is_text(left) and is_text(right):
        return pa.large_string()
    if _is_number(left) and _is_number(right):
        return _common_number(left, right)
    if pa.types.is_decimal(left) and pa.types.is_decimal(right):
        return _common_decimal(left, right)
    return _common_time(left, right)


def is_read_by_row(left: pa.DataType, right: pa.DataType) -> bool:
    """Return True if values of either type may turn out, row by row, to be readable as the other type.

    Such pairs of types are text with numbers or times, and single values with lists of them.
    """
    left, right = map(element_type, map(plain_type, (left, right)))
    if is_text(left) or is_text(right):
        return all(is_text(one) or _is_number(one) or _is_time(one) for one in (left, right))
    return common_type(left, right) is not None


def plain_type(type_: pa.DataType) -> pa.DataType:
    """Return the type without dictionaries, runs and views of text, which many of Arrow's functions do not know."""
    if pa.types.is_dictionary(type_) or pa.types.is_run_end_encoded(type_):
        return plain_type(type_.value_type)
    if pa.types.is_string_view(type_):
        return pa.large_string()
    if is_list(type_) and (value := plain_type(type_.value_type)) != type_.value_type:
        return pa.large_list(value)
    return type_


def plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows with every column in its :func:`plain_type`, and null instead of empty texts."""
    arrays = [_without_empty(_plain(array)) for array in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names) if arrays else batch


def _plain(array: pa.Array) -> pa.Array:
    if pa.types.is_run_end_encoded(array.type):
        return _plain(pc.run_end_decode(array))
    if pa.types.is_dictionary(array.type):
        # Arrow cannot decode dictionaries of views.
        array = pa.DictionaryArray.from_arrays(array.indices, _plain(array.dictionary))
    type_ = plain_type(array.type)
    return array if array.type == type_ else array.cast(type_)


def _without_empty(array: pa.Array) -> pa.Array:
    """Return text, or lists of text, with null for each empty text, because CSV cannot tell the two apart."""
    type_, is_list_ = array.type, is_list(array.type)
    texts = array.flatten() if is_list_ else array
    if not is_text(texts.type) or pc.min(pc.binary_length(texts)).as_py() != 0:
        return array
    texts = pc.if_else(pc.equal(texts, ""), None, texts)
    if not is_list_:
        return texts
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, texts, mask=array.is_null()).cast(type_)


def is_list(type_: pa.DataType) -> bool:
    """Return True if each value is a list."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def element_type(type_: pa.DataType) -> pa.DataType:
    """Return the type of single values: a list's element, or the type itself."""
    return type_.value_type if is_list(type_) else type_


def _leaves(path: FieldPath, type_: pa.DataType) -> Iterator[tuple[FieldPath, pa.DataType]]:
    if not pa.types.is_struct(type_):
        yield path, type_
        return
    for number in range(type_.num_fields):
        field = type_.field(number)
        yield from _leaves((*path, field.name), field.type)


def is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_boolean(type_))


def _is_time(type_: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(type_) or pa.types.is_date(type_))


def _common_number(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(left) or pa.types.is_floating(right):
        return pa.float64()
    unsigned = pa.types.is_unsigned_integer(left) and pa.types.is_unsigned_integer(right)
    return pa.uint64() if unsigned else pa.int64()


def _common_decimal(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    scale = max(left.scale, right.scale)
    digits = max(left.precision - left.scale, right.precision - right.scale) + scale
    return pa.decimal256(digits, scale) if digits <= 76 else None


def _common_time(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """Return a type in microseconds, the unit in which times are read; None if only one of the types has a zone."""
    kinds = (left, right)
    if not all(_is_time(kind) for kind in kinds):
        return None
    if all(pa.types.is_date(kind) for kind in kinds):
        return pa.date32()
    zones = {kind.tz is None for kind in kinds if pa.types.is_timestamp(kind)}
    if len(zones) > 1 or (zones == {False} and any(pa.types.is_date(kind) for kind in kinds)):
        return None
    return pa.timestamp("us", None if zones == {True} else "UTC")


def is_there(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that are neither null nor NaN."""
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_floating(array.type):
        return valid & ~np.isnan(pc.fill_null(array, np.nan).to_numpy(zero_copy_only=False))
    return valid
