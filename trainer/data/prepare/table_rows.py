"""Assignment of table rows to ids (first ids kept from a warm start, then new ids), and of splits' codes to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, UNKNOWN_ROW, GrownTable, IdMap, grow
from trainer.data.columns.values import Kind, as_ids
from trainer.data.columns.vocabulary import Codes, id_type
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import CODE, map_array
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.plan import DataPlan, FeaturePlan
from trainer.data.prepare.split import SPLIT_NAMES
from trainer.data.prepare.workers import Workers
from trainer.data.prepare.writing import code_files
from trainer.data.sources.id_types import is_written_as_integer, number_of
from trainer.data.sources.key_matches import LEAST_FOUND, KeyMatches, likely_reason, shown

_PIECE_ROWS = 1 << 22


def finish_tables(
    plan: DataPlan, encoded: Encoded, directory: Path, base: Mapping[str, IdMap], workers: Workers
) -> tuple[dict[str, GrownTable], dict[str, npt.NDArray[np.int64]]]:
    """Return {table: (ids with their rows)} and {table: number of each row's occurrences in the training split}.

    Ids of ``base`` (the warm start's, by table) that are kept come first, then new ids.
    """

    def finish(table: str) -> tuple[GrownTable, npt.NDArray[np.int64]]:
        codes = encoded.codes[table]
        counts = occurrences(plan, table, directory / "train", len(codes.ids))
        return finish_table(plan, table, codes, counts, base.get(table))

    tables = plan.trained_tables
    found = dict(zip(tables, workers.map(finish, tables), strict=True))
    return {name: grown for name, (grown, _) in found.items()}, {name: counts for name, (_, counts) in found.items()}


def occurrences(plan: DataPlan, table: str, train: Path, num_ids: int) -> npt.NDArray[np.int64]:
    """Return counts of a table's codes in the training split, int64 [num_ids + 1]; entry 0 counts missing ids."""
    files = code_files(plan, train)
    counts = np.zeros(num_ids + 1, dtype=np.int64)
    for feature in plan.trained:
        if feature.table == table:
            for piece in _pieces(map_array(files[feature.name], CODE)):
                counts += np.bincount(piece.astype(np.int64) + 1, minlength=len(counts))
    return counts


def finish_table(
    plan: DataPlan, table: str, codes: Codes, counts: npt.NDArray[np.int64], base: IdMap | None
) -> tuple[GrownTable, npt.NDArray[np.int64]]:
    """Return a table's ids with their rows, and the number of each row's occurrences in the training split.

    The ids of ``codes`` ascend; ``counts`` are their :func:`occurrences`; ``base`` are the warm start's ids, if any.
    """
    parent = None if base is None else _as_type_of(codes.ids, base, table)
    init_from = plan.job.init_from
    grown = grow(parent, codes, counts[1:], init_from.retire_after_runs if init_from is not None else None)
    row_counts = np.zeros(grown.num_rows, dtype=np.int64)
    np.add.at(row_counts, grown.row_of_code, np.append(counts[1:], counts[0]))
    return grown, row_counts


def codes_to_rows(
    plan: DataPlan,
    directory: Path,
    rows_of: Mapping[str, npt.NDArray[np.int32]],
    workers: Workers,
    log: Callable[[str], Any],
) -> dict[str, dict[str, float]]:
    """Replace every code in the splits' files by its table row; return and log the share of unknown ids.

    The shares are by feature, then by split.
    """

    def rewrite(feature: FeaturePlan) -> dict[str, float]:
        shares = {}
        for name in SPLIT_NAMES:
            array = map_array(code_files(plan, directory / name)[feature.name], CODE, mode="r+")
            unknown = 0
            for piece in _pieces(array):
                rows = rows_of[feature.table][piece]
                piece[:] = rows
                unknown += int(np.count_nonzero(rows == UNKNOWN_ROW))
            shares[name] = unknown / len(array) if len(array) else 0.0
        return shares

    found = {feature.name: one for feature, one in zip(plan.trained, workers.map(rewrite, plan.trained), strict=True)}
    tell_unknown(found, log)
    return found


def tell_unknown(shares: Mapping[str, Mapping[str, float]], log: Callable[[str], Any]) -> None:
    """Log the shares of unknown ids, given by feature and split."""
    for feature, by_split in shares.items():
        log(f"unknown ids of {feature}: " + ", ".join(f"{name} {share:.2%}" for name, share in by_split.items()))


def _pieces(array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [array[start : start + _PIECE_ROWS] for start in range(0, len(array), _PIECE_ROWS)]


def _as_type_of(ids: pa.Array, base: IdMap, table: str) -> IdMap:
    kind: Any = "int" if pa.types.is_int64(ids.type) else "string"
    if pa.types.is_uint64(base.ids.type):
        raise DataError(
            "the warm start is from a job of one pass, whose checkpoint has hashes of strings and not the strings",
            where=f"table '{table}'",
            remedy="start from a job with a preparation, or without init_from",
        )
    if kind == "int" and not pa.types.is_integer(base.ids.type):
        raise _of_other_type(kind, base, table)
    where = f"table '{table}'"
    if kind == "string" and pa.types.is_integer(base.ids.type):
        others = [text for text in ids.to_pylist() if not is_written_as_integer(text)]
        _require_told_apart(others, base.ids, where)
        if len(others) == len(ids):
            raise _of_other_type(kind, base, table)
    return replace(base, ids=as_ids(base.ids, kind, where), retired=as_ids(base.retired, kind, where))


def _of_other_type(kind: Kind, base: IdMap, table: str) -> DataError:
    return DataError(
        f"the warm start's ids are {base.ids.type}, this data's are {id_type(kind)}",
        where=f"table '{table}'",
        remedy="convert the column to the earlier type, or start without init_from",
    )


def _require_told_apart(others: list[str], integers: pa.Array, where: str) -> None:
    """Check that no text can be read as one of the warm start's integers, which may stand for several texts."""
    numbers = pa.array([number_of(text) for text in others], pa.int64())
    found = np.flatnonzero(Codes(as_ids(integers, "int", where)).encode(numbers) >= 0)
    if len(found):
        text, number = others[found[0]], numbers[int(found[0])]
        raise DataError(
            f"{len(found):,} ids are text that the warm start has as integers, such as '{text}' as {number}: "
            "the warm start may have read several of them as one integer",
            where=where,
            remedy="start without init_from, and publish to a new collection; or write the ids as these integers",
        )


def ids_before(table: str, kind: Kind, base: IdMap | None, keeps_strings: bool = False) -> IdMap:
    """Return the ids that have a table row before a one-pass run begins, with the run's number; strings are hashed.

    ``base``: ids of the warm start, if any. With ``keeps_strings``, strings are not hashed.

    Raises:
        DataError: the warm start's ids are of another kind, or are hashes although strings are to be kept.
    """
    none = pa.array([], id_type(kind))
    if base is None:
        base = IdMap(none)
    elif kind == "int" or not pa.types.is_uint64(base.ids.type):
        base = _as_type_of(none, base, table)
    elif keeps_strings:
        raise DataError(
            "the warm start is from a job of one pass that published none of its strings, and holds hashes of them",
            where=f"table '{table}'",
            remedy="start from a job with a preparation or one that publishes this feature, or leave publish or "
            "init_from out",
        )
    return replace(base if keeps_strings else base.hashed(), run=base.run + 1)


MOST = 0.9
"""If another table of the parent has at least this share of the unknown ids, that table's column was read by mistake.
"""


def check_parent_ids(
    base: Mapping[str, IdMap],
    grown: Mapping[str, GrownTable],
    row_counts: Mapping[str, npt.NDArray[np.int64]],
    uri: str,
) -> list[str]:
    """Return a warning for each table whose ids differ from the parent's only in the way they are written.

    A table whose ids are all new gives no warning: another day's news articles are all new, and
    :mod:`trainer.data.prepare.drift` reports that.

    ``base`` has the parent's ids by table; ``row_counts`` the occurrences of each row in this run's training split.

    Raises:
        DataError: nearly no id of any table is among the parent's, or the text ids of a table are the parent's ids of
            another table.
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
                f"{found.num_found:,} of {found.num_keys:,} ids are ids of '{table}' in the parent, but ids such as "
                f"{shown(found.unknown)} are the parent's ids of '{other}'",
                where=f"{uri}, features.{table}",
                remedy=f"read the column that '{table}' had before, or give the feature another name: table rows keep "
                "the meaning of that column",
            )
        what = f"{table} has {shown(found.unknown)}, the parent {shown(base[table].ids)}"
        reason = likely_reason(found.unknown, base[table].ids)
        told.append(what if reason is None else f"{what}: {reason}")
        if reason is not None:
            warnings.append(f"{uri}: {found.num_found:,} of {found.num_keys:,} ids are the parent's: {told[-1]}")
    if total.exceeds(1.0 - LEAST_FOUND):
        raise DataError(
            f"{total.num_found:,} of {total.num_keys:,} ids of the rows are ids of the parent: {'; '.join(told)}",
            where=f"{uri}, init_from",
            remedy="write ids as the parent's rows had them, name the parent of these rows, or leave init_from out",
        )
    return warnings


def _table_with(ids: Sequence[str], tables: Mapping[str, IdMap]) -> str | None:
    """Return the name of the first table that has at least the share ``MOST`` of these ids; None if none has."""
    asked = pa.array(ids, pa.large_string())
    for name, there in tables.items():
        is_there = pc.is_in(asked, there.ids.cast(pa.large_string()))
        if len(ids) and (pc.sum(is_there).as_py() or 0) >= MOST * len(ids):
            return name
    return None
