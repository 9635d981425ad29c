"""Check that the ids of a refresh's rows are its parent's. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, GrownTable, IdMap
from trainer.data.errors import DataError
from trainer.data.sources.key_matches import LEAST_FOUND, KeyMatches, likely_reason, shown

MOST = 0.9
"""Share of unknown ids that another table of the parent has, from which on it is that table's column that is read."""


def check_parent_ids(
    base: Mapping[str, IdMap],
    grown: Mapping[str, GrownTable],
    row_counts: Mapping[str, npt.NDArray[np.int64]],
    uri: str,
) -> list[str]:
    """Return a warning for each table whose ids are the parent's but for how they are written.

    A table whose ids are all new warns of nothing here: news of another day are such, and drift tells of them.

    Args:
        base: the parent's ids by table.
        grown: the tables with this run's ids.
        row_counts: occurrences of each row in this run's training split.
        uri: where the rows are.

    Raises:
        DataError: (nearly) no id of any table is the parent's, or those of a table of text are of another table there.
    """
    total, warnings, told = KeyMatches(), [], []
    for table in sorted(base.keys() & grown.keys()):
        occurs = row_counts[table][NUM_SPECIAL_ROWS:] > 0
        ids = grown[table].ids.ids.filter(pa.array(occurs))
        found = KeyMatches.of(ids, grown[table].parent_rows[NUM_SPECIAL_ROWS:][occurs])
        total.add(found)
        if not found.exceeds(1.0 - LEAST_FOUND):
            continue
        other = _table_with(found.unknown, {name: one for name, one in base.items() if name != table})
        if other is not None and base[table].is_text:
            raise DataError(
                f"{found.num_found:,} of {found.num_keys:,} ids are the parent's of '{table}', and such as "
                f"{shown(found.unknown)} are its ids of '{other}'",
                where=f"{uri}, features.{table}",
                remedy=f"read the column of '{table}' again, or give the feature another name: rows of an id mean what "
                "its column meant",
            )
        what = f"{table} has {shown(found.unknown)}, the parent {shown(base[table].ids)}"
        reason = likely_reason(found.unknown, base[table].ids)
        told.append(what if reason is None else f"{what}: {reason}")
        if reason is not None:
            warnings.append(f"{uri}: {found.num_found:,} of {found.num_keys:,} ids go on: {told[-1]}")
    if total.exceeds(1.0 - LEAST_FOUND):
        raise DataError(
            f"{total.num_found:,} of {total.num_keys:,} ids of the rows are ids of the parent: {'; '.join(told)}",
            where=f"{uri}, init_from",
            remedy="write ids as the parent's rows had them, name the parent of these rows, or leave init_from out",
        )
    return warnings


def _table_with(ids: Sequence[str], tables: Mapping[str, IdMap]) -> str | None:
    """Return the table that has most of these ids, None if none has."""
    asked = pa.array(ids, pa.large_string())
    for name, there in tables.items():
        is_there = pc.is_in(asked, there.ids.cast(pa.large_string()))
        if len(ids) and (pc.sum(is_there).as_py() or 0) >= MOST * len(ids):
            return name
    return None
