"""Types of columns of ids: integers where each value is written as its integer, else text. Torch-free."""

from __future__ import annotations

import math
import re

import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.sources.types import is_list, is_text

# Whole floats as pandas writes them. From 1e+16 on they were rounded; such ids are refused when they are read.
_WHOLE_FLOAT = r"^((0|-?[1-9][0-9]{0,18})(\.0)?|-?[1-9](\.[0-9]+)?e\+(1[6-9]|[2-9][0-9]|[1-9][0-9]{2}))$"
_WRITTEN = r"^(0|-?[1-9][0-9]{0,18})$"
_DIGITS = r"^-?[0-9]+$"
_NUMBER = (
    r"^\s*([-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|0x[0-9a-f]+"
    r"|[-+]?(nan|inf|infinity)(\([^)]*\))?|true|false|na|n/a|null|none)\s*$"
)
_NUMBERS = (pa.int64(), pa.float64())


def are_written_as_integers(texts: pa.Array) -> bool:
    """Check that each text is how an int64 is written, such as 7 and not 007, +7, 7.0 or 1e3; nulls pass."""
    # Arrow takes long over each text that is no integer; most columns of text begin with one.
    if not pc.all(pc.match_substring_regex(texts.slice(0, 1), _WRITTEN), min_count=0).as_py():
        return False
    # Arrow also accepts -0, and any digits after a leading zero.
    zeros = pc.starts_with(texts, "0")
    if (
        pc.any(pc.starts_with(texts, "-0")).as_py()
        or not pc.all(pc.equal(texts.filter(zeros), "0"), min_count=0).as_py()
    ):
        return False
    try:
        texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return False
    return True


def some_are_written_as_integers(texts: pa.Array) -> bool:
    """Check that some texts are how integers are written, and others are not."""
    found = pc.match_substring_regex(texts, _WRITTEN)
    return bool(pc.any(found).as_py()) and not pc.all(found).as_py()


def is_written_as_integer(text: str) -> bool:
    """Check whether a text is how an int64 is written."""
    return re.fullmatch(_WRITTEN, text) is not None and -(2**63) <= int(text) < 2**63


def number_of(text: str) -> int | None:
    """Return the int64 that a reader of numbers makes of a text, such as 7 of 007, +7, 7.0 or 0x7; None for others."""
    plain = text.strip().lower()
    if not plain.isascii() or re.fullmatch(_NUMBER, plain) is None:
        return None
    if plain in ("true", "false"):
        return int(plain == "true")
    if plain.startswith("0x"):
        number = int(plain, 16)
    elif re.fullmatch(_DIGITS, plain):
        number = int(plain)
    else:
        value = math.nan if plain.strip("+-").startswith(("n", "i")) else float(plain)
        number = int(value) if value.is_integer() else 2**63
    return number if -(2**63) <= number < 2**63 else None


class WrittenIds:
    """The type of an id column in a file without declared types, found from its values as text.

    Attributes:
        type: null, int64, float64 (whole numbers, some written 17.0) or string.
        is_number_like: True if every value can be parsed as a number.
        example: a value that is no integer.
    """

    def __init__(self) -> None:
        self.type = pa.null()
        self.is_number_like = True
        self.example: str | None = None

    def add(self, texts: pa.Array) -> None:
        if self.type == pa.string() and not self.is_number_like:
            return
        texts = texts.drop_null() if texts.null_count else texts
        if not len(texts):
            return
        type_ = _type_of(texts)
        self.is_number_like = self.is_number_like and (type_ != pa.string() or _all_match(texts, _NUMBER))
        if type_ == pa.string() and self.example is None:
            others = texts.filter(pc.invert(pc.match_substring_regex(texts, _WRITTEN)))
            self.example = str((others if len(others) else texts)[0].as_py())
        self.type = common_written_type(self.type, type_)


def common_written_type(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """Return the narrowest type that holds the values of two types, both of which :class:`WrittenIds` can return."""
    if left == right or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    return pa.float64() if left in _NUMBERS and right in _NUMBERS else pa.string()


def are_mixed(left: pa.DataType, right: pa.DataType) -> bool:
    """Check whether one type is text and the other a number."""
    return (left == pa.string() and right in _NUMBERS) or (right == pa.string() and left in _NUMBERS)


def common_id_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """Return the text type if one type is text and the other integers, also in lists; None for other types."""
    if is_list(left):
        value = common_id_type(left.value_type, right.value_type if is_list(right) else right)
        return None if value is None else pa.large_list(value)
    if is_list(right):
        right = right.value_type
    return pa.large_string() if any(map(is_text, (left, right))) and any(map(_is_integer, (left, right))) else None


def _is_integer(type_: pa.DataType) -> bool:
    is_whole = pa.types.is_decimal(type_) and type_.scale == 0
    return bool(is_whole or pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_boolean(type_))


def _type_of(texts: pa.Array) -> pa.DataType:
    if are_written_as_integers(texts):
        return pa.int64()
    is_float = _all_match(texts, _WHOLE_FLOAT) and not _all_match(texts, _DIGITS)
    return pa.float64() if is_float else pa.string()


def _all_match(texts: pa.Array, pattern: str) -> bool:
    # The first value already decides for most columns of text.
    parts = (texts.slice(0, 1), texts.slice(1)) if len(texts) > 1 else (texts,)
    return all(pc.all(pc.match_substring_regex(part, pattern, ignore_case=True)).as_py() for part in parts)
