"""Columns of a version's items in words, such as titles; and items by the values of a column, for colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from embeddings.vectors.item_columns import ItemColumns
from embeddings.vectors.item_vectors import find_rows, keys_of
from service.web.charts.axes import NUM_COLOURS

TITLES = ("title", "name")
"""Columns that come first."""
MAX_CATEGORIES = 24
"""Most values of a column among the drawn items for which it is offered as their colour."""
OTHERS = "others"


def words_of(columns: ItemColumns | None, ids: Sequence[Any]) -> list[str]:
    """Return the values of each item, a title first, as one text; empty without any."""
    if columns is None:
        return [""] * len(ids)
    names = sorted(columns.columns, key=lambda name: name not in TITLES)
    rows = zip(*(values_of(columns, name, ids) for name in names), strict=True)
    return [" · ".join(", ".join(map(str, values)) for values in row if values) for row in rows]


def values_of(columns: ItemColumns, name: str, ids: Sequence[Any]) -> list[list[Any]]:
    """Return the values of each item in a column: none, one, or those of its list."""
    if not ids:
        return []
    rows = find_rows(columns.keys, keys_of(ids, query=True))
    found = columns.columns[name].take(pa.array([row if row >= 0 else None for row in rows], pa.int64())).to_pylist()
    return [[] if value is None else value if isinstance(value, list) else [value] for value in found]


def categories(columns: ItemColumns | None, ids: Sequence[Any]) -> dict[str, list[str]]:
    """Return the columns by which items can be coloured, each with the first value of every item as text.

    Such a column has two values or more among the items, but few.
    """
    if columns is None:
        return {}
    found = {
        name: [str(values[0]) if values else "none" for values in values_of(columns, name, ids)]
        for name in columns.columns
    }
    return {name: values for name, values in found.items() if 2 <= len(set(values)) <= MAX_CATEGORIES}


def coloured(values: Iterable[str]) -> tuple[list[tuple[str, int]], list[int]]:
    """Return the legend, (category, number of items) by colour, and the colour of each item, from 1 on.

    The most frequent values have a colour each; if there are more than colours, the last is that of all others.
    """
    values = list(values)
    counts = Counter(values).most_common()
    own = counts if len(counts) <= NUM_COLOURS else counts[: NUM_COLOURS - 1]
    rest = len(values) - sum(number for _, number in own)
    colours = {value: place for place, (value, _) in enumerate(own, 1)}
    return own + ([(OTHERS, rest)] if rest else []), [colours.get(value, NUM_COLOURS) for value in values]
