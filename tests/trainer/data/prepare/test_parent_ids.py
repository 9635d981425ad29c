"""Ids of a refresh's rows that are of another table of the parent: a column in the place of another is no news."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pytest

from trainer.data.columns.dynamic_ids import IdMap, grow
from trainer.data.columns.vocabulary import Codes
from trainer.data.errors import DataError
from trainer.data.prepare.table_rows import check_parent_ids

BRANDS, CATEGORIES = ([f"{kind}{number:02d}" for number in range(30)] for kind in ("brand", "kind"))


def check(learned: Mapping[str, Sequence[object]], now: Mapping[str, Sequence[object]]) -> list[str]:
    base = {table: IdMap(pa.array(ids)) for table, ids in learned.items()}
    grown = {table: grow(base[table], Codes(pa.array(ids)), np.ones(len(ids), np.int64)) for table, ids in now.items()}
    counts = {table: np.zeros(one.num_rows, np.int64) for table, one in grown.items()}
    for table, one in grown.items():
        counts[table][one.row_of_code[:-1]] = 1
    return check_parent_ids(base, grown, counts, "rows.parquet")


def test_ids_of_another_table_are_refused_by_name() -> None:
    learned = {"brand": BRANDS, "category": CATEGORIES, "user": BRANDS + CATEGORIES}
    message = r"features\.brand: 0 of 30 ids are ids of 'brand' in the parent, .*'kind00'.* parent's ids of 'category'"
    with pytest.raises(DataError, match=message):
        check(learned, learned | {"brand": CATEGORIES})
    assert check(learned, learned) == []


def test_news_of_a_day_and_numbers_that_two_tables_have_are_not() -> None:
    users = {"user": BRANDS}
    (warning,) = check(users | {"item": CATEGORIES}, users | {"item": [f"new{number:02d}" for number in range(30)]})
    assert "0 of 30 ids are the parent's: item has 'new00'" in warning
    # Integers from 0 are in every table.
    items = {"item": range(60)}
    assert check(users | items | {"session": range(100, 130)}, users | items | {"session": range(30)}) == []
