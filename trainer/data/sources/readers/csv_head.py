"""The beginning of a CSV file: its encoding, its delimiter, and whether it has a header. Torch-free."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from trainer.data.errors import DataError
from trainer.data.sources.locations import FilePath
from trainer.data.sources.readers.base import BOM, require_utf_8, text_of

_HEAD_BYTES = 1 << 16
_SAMPLE_ROWS = 100
_DELIMITERS = (",", ";", "\t", "|")
_EXCEL = re.compile(rb'"?sep=(.)"?\r?\n', re.IGNORECASE)
_QUOTED = re.compile(rb'"[^"]*"')
_VALUE = re.compile(r"\s*(?:[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\d{4}-\d\d-\d\d\b.*)\s*")
_NO_VALUE = frozenset(("", "na", "n/a", "nan", "null", "none", r"\n", "?", "-"))


class Head(NamedTuple):
    """What separates the fields of a file, and how many lines are above its header."""

    delimiter: str
    skipped_lines: int


def head_of(path: FilePath, delimiter: str | None) -> Head:
    """Return the head of a file, whose fields ``delimiter`` separates; None: what the file says.

    Raises:
        DataError: it is UTF-16, separated by ``::``, or without a header.
    """
    with text_of(path) as stream:
        text = stream.read(_HEAD_BYTES)
    require_utf_8(text, path)
    text = text.removeprefix(BOM)
    excel = _EXCEL.match(text)
    if excel is not None:
        text, delimiter = text[excel.end() :], delimiter or excel[1].decode("latin-1")
    is_whole = len(text) < _HEAD_BYTES
    text = text.lstrip(b"\r\n")
    outside_quotes = _QUOTED.sub(b"", re.split(rb"[\r\n]", text, maxsplit=1)[0])
    found = next((one for one in _DELIMITERS if one.encode() in outside_quotes), None)
    if delimiter is None and found is None and b"::" in outside_quotes:
        raise DataError(
            "has fields separated by '::'",
            where=str(path),
            remedy=r"write tabs, and a header: (printf 'user\titem\trating\n'; sed 's/::/\t/g' FILE) > rows.tsv",
        )
    delimiter = delimiter or found or ","
    lines = csv.reader(io.StringIO(text.decode("utf-8", "replace"), newline=""), delimiter=delimiter)
    sample = list(itertools.islice(filter(None, lines), _SAMPLE_ROWS))
    _require_header(sample if is_whole else sample[:-1], path)
    return Head(delimiter, 0 if excel is None else 1)


def _require_header(sample: Sequence[Sequence[str]], path: FilePath) -> None:
    if len(sample) < 2:
        return
    header, *rows = sample
    widths = {len(row) for row in rows}
    if len(header) not in widths and len(widths) == 1:
        raise DataError(
            f"has {len(header)} fields in its first line and {widths.pop()} in the next ones: {_shown(header)}",
            where=str(path),
            remedy="make its first line the names of its columns, one for each field: no comment and no title above it",
        )
    if _is_row(header, [row for row in rows if len(row) == len(header)]):
        raise DataError(
            f"has values in its first line, where the names of columns belong: {_shown(header)}",
            where=str(path),
            remedy="put a line of names above it, such as user,item,rating (names that are numbers: rename them)",
        )


def _is_row(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Check for a first line of numbers or dates above numbers or dates, without a name."""
    numbers = [str(number) for number in range(len(header))]
    if header == numbers or header == ["", *numbers[:-1]] or not rows:
        return False  # as pandas names columns that have no names
    has_value = False
    for name, column in zip(header, zip(*rows, strict=True), strict=True):
        there = [value for value in column if value.strip().lower() not in _NO_VALUE]
        if not there or name.strip().lower() in _NO_VALUE:
            continue
        above_values = all(_VALUE.fullmatch(value) for value in there)
        is_value = _VALUE.fullmatch(name) is not None
        above_digits = all(re.search(r"\d", value) for value in there)
        if not is_value and (above_values or (above_digits and not re.search(r"\d", name))):
            return False
        has_value |= is_value and above_values
    return has_value


def _shown(fields: Sequence[str]) -> str:
    return ", ".join(fields[:5])[:100]
