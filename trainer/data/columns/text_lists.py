"""Lists written as text: ``a|b``, or in brackets as JSON, Python and PostgreSQL write them. Torch-free.

``[27, 9]``, ``["a", "b"]``, ``['a', 'b']``, ``(27, 9)`` and ``{27,9}`` are lists, and ``[]`` is an empty list. Elements
are taken as text, with quotes and escapes resolved; ``None``, ``null`` and ``nan`` without quotes are null. Any other
value is split at ``|``: blanks around elements are removed, and a value without ``|`` is a list of one element. An
empty element is null.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.errors import DataError
from trainer.data.sources.source import Chunk

LIST_SEPARATOR = "|"
_UNCLEAR = r"[^\s,;][\s,;]+[^\s,;]"
REMEDY = 'write lists as 27|9, [27, 9] or ["a", "b"], or use type: id where each value is one id'
# Round brackets mark a list only if they contain a comma: "(no genres listed)" is an id.
_BRACKETS = r"(?s)^\s*(\[.*\]|\{.*\}|\(.*,.*\)|\(\s*(-?\d+|\"[^\"]*\"|'[^']*')?\s*\))\s*$"
_QUOTED = r"""(?s)"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_SEVERAL = r"[\]})][^\[\](){},]*\|"
_MAYBE_BRACKETS = r"^\s*[\[{(]"
_ELEMENT = re.compile(
    r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<plain>(?!\.\.\.)[^\s,"'\[\]{}()|]+))\s*(?:,|\Z)""",
    re.DOTALL,
)
_BLANKS_OR_NOTHING = r"\|\s*(\||$)|^\s*\||\|\s|\s\||^\s|\s$"
_EMPTY_SET = "set()"
_NULLS = frozenset(("None", "null", "NULL", "nan", "NaN"))


def split(array: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """Return the lists of a column of text (null for null and empty texts), and a mask of the unreadable texts."""
    array = pc.if_else(pc.equal(array, ""), None, pc.if_else(pc.equal(array, _EMPTY_SET), "[]", array))
    bracketed = in_brackets(array)
    if not pc.any(bracketed).as_py():
        return _split_at_pipes(array), np.zeros(len(array), dtype=bool)
    coded = array.dictionary_encode()
    texts = coded.dictionary.to_pylist()
    lists = [
        elements(text) if is_bracketed else [part.strip() or None for part in text.split(LIST_SEPARATOR)]
        for text, is_bracketed in zip(texts, in_brackets(coded.dictionary).to_pylist(), strict=True)
    ]
    found = pa.array(lists, pa.large_list(pa.large_string())).take(coded.indices)
    return found, pc.and_(array.is_valid(), found.is_null()).to_numpy(zero_copy_only=False)


def _split_at_pipes(array: pa.Array) -> pa.Array:
    """Split texts at pipes and strip blanks; an empty element is null."""
    lists = pc.split_pattern(array, LIST_SEPARATOR)
    if not pc.any(pc.match_substring_regex(array, _BLANKS_OR_NOTHING)).as_py():
        return lists
    parts = pc.utf8_trim_whitespace(lists.values)
    parts = pc.if_else(pc.equal(parts, ""), None, parts)
    return type(lists).from_arrays(lists.offsets, parts, mask=lists.is_null())


def in_brackets(array: pa.Array) -> pa.Array:
    """Return a mask of the texts in brackets, well-formed or not; False for null."""
    maybe = pc.fill_null(pc.match_substring_regex(array, _MAYBE_BRACKETS), False)
    if not pc.any(maybe).as_py():
        return maybe
    bare = pc.replace_substring_regex(array, _QUOTED, "''")
    whole = pc.and_not(pc.match_substring_regex(array, _BRACKETS), pc.match_substring_regex(bare, _SEVERAL))
    return pc.and_(maybe, pc.fill_null(whole, False))


def elements(text: str) -> list[str | None] | None:
    """Return the elements of a list in brackets, None where it is not well-formed.

    Elements of several words need quotes: their blanks might separate elements.
    """
    inner, found, end = text.strip()[1:-1].strip(), list[str | None](), 0
    while end < len(inner):
        match = _ELEMENT.match(inner, end)
        if match is None:
            return None
        element = match["plain"]
        if element is None and (element := _unquoted(match["quoted"])) is None:
            return None
        found.append(None if match["plain"] in _NULLS else element or None)
        end = match.end()
    return found


def _unquoted(quoted: str) -> str | None:
    if "\\" not in quoted:
        return quoted[1:-1]
    with contextlib.suppress(ValueError, SyntaxError):
        parse: Any = json.loads if quoted[0] == '"' else ast.literal_eval
        text = str(parse(quoted))
        text.encode()
        return text
    return None


def unclear(texts: pa.Array) -> list[str]:
    """Return the texts that may be lists or ids."""
    return list(texts.filter(pc.match_substring_regex(texts, _UNCLEAR)).to_pylist())


def parts(text: str) -> list[str]:
    """Return the ids of a text that may be a list, if it is a list."""
    return re.split(r"[\s,;]+", text.strip())


def require_clear(chunks: Iterable[Chunk], column: str) -> None:
    """Check that it is clear what separates the elements of a column's lists, where these are text.

    Raises:
        DataError: a value such as ``27,9`` or ``27 9`` may be a list or one id, and no value has a pipe.
    """
    error: DataError | None = None
    for chunk in chunks:
        texts = chunk.column(column)
        if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
            return
        plain = texts.filter(pc.invert(in_brackets(texts)))
        if pc.any(pc.match_substring(plain, LIST_SEPARATOR)).as_py():
            return
        if error is None and pc.any(pc.match_substring_regex(plain, _UNCLEAR)).as_py():
            rows = pc.and_(pc.match_substring_regex(texts, _UNCLEAR), pc.invert(in_brackets(texts)))
            row = pc.index(rows, True).as_py()
            what = f"{texts[row].as_py()[:60]!r} may be a list or one id, and no value has '{LIST_SEPARATOR}'"
            error = DataError(what, where=chunk.where(column, row), remedy=REMEDY)
    if error is not None:
        raise error
