"""Splits on disk: examples appended per split, vocabulary from training, codes turned into rows. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, UNKNOWN_ROW, GrownTable, IdMap, grow
from trainer.data.columns.jagged import Jagged, sorted_unique
from trainer.data.columns.labels import label_dtype
from trainer.data.columns.numeric import Numeric, fitted
from trainer.data.columns.values import as_ids
from trainer.data.columns.weights import as_factors
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import (
    CODE,
    NUMBERS,
    OFFSET,
    USER_CODES,
    VALUE,
    Appender,
    JaggedAppender,
    map_array,
    weight_file,
)
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.examples import ExampleRows, Examples, take
from trainer.data.prepare.negatives import SeenItems
from trainer.data.prepare.plan import DataPlan, FeaturePlan
from trainer.data.prepare.sequences import SequenceRows
from trainer.data.prepare.split import DROPPED, SPLIT_NAMES, TRAIN

_REMAP_ROWS = 1 << 22
RAW_NUMBERS = "numeric.raw"


class SplitWriter:
    """Files of one split, to which examples are appended.

    They are ``labels.bin``, and ``<feature>.bin`` or ``<feature>.{values,offsets}.bin``. Where evaluation asks for
    users also USER_CODES: a number for each user, known in training or not, -1 for none.
    """

    def __init__(self, directory: Path, plan: DataPlan):
        self.directory = directory
        self.num_examples = 0
        self.num_positives = 0
        self.label_range = (np.inf, -np.inf)
        self.label_sum = 0.0
        self._labels = Appender(directory / "labels.bin", label_dtype(plan.dataset.label))
        self._users = Appender(directory / USER_CODES, CODE) if plan.keeps_users else None
        self._flat = {f.name: Appender(directory / f"{f.name}.bin", CODE) for f in plan.trained if not f.is_list}
        self._lists = {f.name: JaggedAppender(directory / f.name, CODE) for f in plan.trained if f.is_list}
        self._weights = {
            f.name: Appender(weight_file(directory, f.name), VALUE) for f in plan.trained if is_weighted(f)
        }
        self._pooling = {f.name: f.pooling for f in plan.trained}
        self._numeric = Appender(directory / RAW_NUMBERS, np.float64) if plan.numeric else None

    def append(self, examples: Examples, chosen: npt.NDArray[np.int64], numeric: npt.NDArray[np.float64]) -> None:
        """Append chosen examples; ``numeric``: the values of every row of the data, [rows, numeric features]."""
        if self._numeric is not None:
            self._numeric.append(numeric[examples.rows[chosen]].reshape(-1))
        for name, weights in self._weights.items():
            weights.append(as_factors(examples.weights[name].take(chosen), self._pooling[name]))
        labels = examples.labels[chosen]
        self.num_examples += len(labels)
        self.num_positives += int((labels == 1).sum())
        self.label_sum += float(labels.sum(dtype=np.float64))
        if len(labels):
            low, high = self.label_range
            self.label_range = (min(low, float(labels.min())), max(high, float(labels.max())))
        self._labels.append(labels)
        if self._users is not None:
            users = examples.features["user"]
            assert not isinstance(users, Jagged)
            self._users.append(users[chosen])
        for name, appender in self._flat.items():
            column = take(examples.features[name], chosen)
            assert not isinstance(column, Jagged)
            appender.append(column)
        for name, lists in self._lists.items():
            column = take(examples.features[name], chosen)
            # A join may give single ids to an id_list feature: a list of one, or an empty one.
            if not isinstance(column, Jagged):
                column = Jagged(column[column >= 0], np.concatenate([[0], np.cumsum(column >= 0)]))
            lists.append(column.values, column.lengths)

    def close(self) -> None:
        self._labels.close()
        if self._users is not None:
            self._users.close()
        for appender in self._flat.values():
            appender.close()
        for lists in self._lists.values():
            lists.close()
        for weights in self._weights.values():
            weights.close()
        if self._numeric is not None:
            self._numeric.close()


def is_weighted(feature: FeaturePlan) -> bool:
    return feature.use is not None and feature.use.weights is not None


def code_files(plan: DataPlan, directory: Path) -> dict[str, Path]:
    """Return the file of codes of each feature."""
    return {f.name: directory / (f"{f.name}.values.bin" if f.is_list else f"{f.name}.bin") for f in plan.trained}


def write_splits(
    plan: DataPlan, encoded: Encoded, directory: Path
) -> tuple[dict[str, SplitWriter], SeenPairs, SequenceRows]:
    """Write all examples, still as codes; where a model trains on positives the training split keeps them only."""
    seen, sequences = SeenPairs(plan, encoded), SequenceRows(plan, encoded)
    writers = {name: SplitWriter(directory / name, plan) for name in SPLIT_NAMES}
    num_dropped = 0
    try:
        for examples in ExampleRows(plan, encoded).chunks():
            seen.add(examples)
            sequences.add(examples)
            num_dropped += int((examples.sides == DROPPED).sum())
            for side, name in enumerate(SPLIT_NAMES):
                chosen = examples.sides == side
                if plan.positives_only and side == TRAIN:
                    chosen &= examples.labels == 1
                writers[name].append(examples, np.flatnonzero(chosen), encoded.numeric)
    finally:
        for writer in writers.values():
            writer.close()
    train = writers["train"]
    where = f"dataset '{plan.dataset.name}', training split"
    if train.num_examples == 0:
        kind = "BPR" if plan.is_bpr else plan.job.model.kind
        what = f"has no positive row, and {kind} trains on positives" if plan.positives_only else "has no rows"
        raise DataError(what, where=where, remedy="check the label, lower evaluation.split's shares, or add data")
    low, high = train.label_range
    if not plan.positives_only and low == high:
        raise DataError(
            f"every one of its {train.num_examples} labels is {low:g}",
            where=where,
            remedy="check the label's column or rule; where every row is a positive use label: {negatives: ...}",
        )
    return writers, seen, sequences


class SeenPairs:
    """(user, item) codes of the training split's own rows, for BPR and for rankings of all items."""

    def __init__(self, plan: DataPlan, encoded: Encoded):
        self._enabled = plan.keeps_seen
        self._user, self._item = plan.direct("user"), plan.direct("item")
        if not self._enabled:
            return
        assert self._user is not None
        assert self._item is not None
        self._num_items = len(encoded.codes[self._item.domain].ids)
        self._parts: list[npt.NDArray[np.int64]] = []

    def add(self, examples: Examples) -> None:
        if self._enabled:
            users, items = examples.features["user"], examples.features["item"]
            assert not isinstance(users, Jagged)
            assert not isinstance(items, Jagged)
            own = (examples.sides == TRAIN) & ~examples.is_negative & (users >= 0) & (items >= 0)
            self._parts.append(sorted_unique(users[own].astype(np.int64) * self._num_items + items[own]))

    def write(
        self,
        directory: Path,
        rows_of: Mapping[str, npt.NDArray[np.int32]],
        row_counts: Mapping[str, npt.NDArray[np.int64]],
    ) -> None:
        """Write the items to draw negatives from, and what each user had.

        ``seen.items.bin``: the rows that negatives are drawn from (items that occur in this training split: a row that
        only a warm start brought is left alone); ``seen.{shifted,starts}.bin``: SeenItems by user row.
        """
        if not self._enabled:
            return
        assert self._user is not None
        assert self._item is not None
        pairs = np.concatenate(self._parts)
        users, items = (
            rows_of[self._user.domain][pairs // self._num_items],
            rows_of[self._item.domain][pairs % self._num_items],
        )
        counts = row_counts[self._item.domain]
        drawable = np.flatnonzero(counts[NUM_SPECIAL_ROWS:] > 0) + NUM_SPECIAL_ROWS
        position = np.full(len(counts), -1, dtype=np.int64)
        position[drawable] = np.arange(len(drawable))
        live = (users >= NUM_SPECIAL_ROWS) & (position[items] >= 0)
        num_users = len(row_counts[self._user.domain])
        seen = SeenItems.from_pairs(users[live], position[items[live]], num_users, len(drawable))
        for name, array in (("items", drawable), ("shifted", seen.shifted), ("starts", seen.starts)):
            appender = Appender(directory / f"seen.{name}.bin", OFFSET)
            appender.append(array)
            appender.close()


def finish_tables(
    plan: DataPlan,
    encoded: Encoded,
    directory: Path,
    base: Mapping[str, IdMap],
) -> tuple[dict[str, GrownTable], dict[str, npt.NDArray[np.int64]]]:
    """Return per table its rows (those of ``base`` that stay, then new ones), and training occurrences per row."""
    tables, row_counts = {}, {}
    init_from = plan.job.init_from
    files = code_files(plan, directory / "train")
    for table in plan.trained_tables:
        codes = encoded.codes[table]
        counts = np.zeros(len(codes.ids) + 1, dtype=np.int64)  # codes shifted by one: entry 0 counts the missing
        for feature in plan.trained:
            if feature.table == table:
                for piece in _pieces(map_array(files[feature.name], CODE)):
                    counts += np.bincount(piece.astype(np.int64) + 1, minlength=len(counts))
        parent = _as_type_of(codes.ids, base[table], table) if table in base else None
        grown = grow(parent, codes, counts[1:], init_from.retire_after_runs if init_from is not None else None)
        row_counts[table] = np.zeros(grown.num_rows, dtype=np.int64)
        np.add.at(row_counts[table], grown.row_of_code, np.append(counts[1:], counts[0]))
        tables[table] = grown
    return tables, row_counts


def codes_to_rows(
    plan: DataPlan, directory: Path, rows_of: Mapping[str, npt.NDArray[np.int32]], log: Callable[[str], Any]
) -> dict[str, dict[str, float]]:
    """Rewrite every code as its table row, in place; return (and log) the share of unknown per feature and split."""
    shares: dict[str, dict[str, float]] = {}
    for name in SPLIT_NAMES:
        for feature, path in code_files(plan, directory / name).items():
            planned = plan.feature(feature)
            assert planned is not None
            array = map_array(path, CODE, mode="r+")
            unknown = 0
            for piece in _pieces(array):
                piece[:] = rows_of[planned.table][piece]
                unknown += int((piece == UNKNOWN_ROW).sum())
            shares.setdefault(feature, {})[name] = unknown / len(array) if len(array) else 0.0
    for feature, by_split in shares.items():
        log(f"unknown ids of {feature}: " + ", ".join(f"{name} {share:.2%}" for name, share in by_split.items()))
    return shares


def _pieces(array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [array[start : start + _REMAP_ROWS] for start in range(0, len(array), _REMAP_ROWS)]


def _as_type_of(ids: pa.Array, base: IdMap, table: str) -> IdMap:
    kind: Any = "int" if pa.types.is_int64(ids.type) else "string"
    if pa.types.is_integer(base.ids.type) != (kind == "int"):
        raise DataError(
            f"the warm start's ids are {base.ids.type}, this data's are {ids.type}",
            where=f"table '{table}'",
            remedy="convert the column to the earlier type, or start without init_from",
        )
    where = f"table '{table}'"
    return replace(base, ids=as_ids(base.ids, kind, where), retired=as_ids(base.retired, kind, where))


def finish_numeric(plan: DataPlan, directory: Path, base: Sequence[Numeric] | None) -> tuple[Numeric, ...]:
    """Write the numbers as the model reads them, ``NUMBERS`` of each split.

    Statistics are those of the training split, or of a warm start.

    Raises:
        DataError: the warm start has other features or transforms.
    """
    if not plan.numeric:
        return ()
    where = f"dataset '{plan.dataset.name}', training split"
    width = len(plan.numeric)
    if base is None:
        train = _raw_numbers(directory / "train", width)
        features = tuple(fitted(feature, train[:, index], where) for index, feature in enumerate(plan.numeric))
    else:
        features = tuple(base)
        asked = [(one.name, one.transform, one.missing) for one in plan.numeric]
        if [(one.name, one.transform, one.missing) for one in features] != asked:
            raise DataError(
                f"the warm start's numeric features are {_in_words(features)}, this data's {_in_words(plan.numeric)}",
                where=f"dataset '{plan.dataset.name}'",
                remedy="use the same transforms, or start without init_from",
            )
    for name in SPLIT_NAMES:
        raw = _raw_numbers(directory / name, width)
        numbers = Appender(directory / name / NUMBERS, VALUE)
        for start in range(0, len(raw), _REMAP_ROWS // width):
            piece = np.asarray(raw[start : start + _REMAP_ROWS // width])
            numbers.append(
                np.stack([one.apply(piece[:, index]) for index, one in enumerate(features)], axis=1).reshape(-1)
            )
        numbers.close()
        (directory / name / RAW_NUMBERS).unlink()
    return features


def _raw_numbers(directory: Path, width: int) -> npt.NDArray[np.float64]:
    return map_array(directory / RAW_NUMBERS, np.float64).reshape(-1, width)


def _in_words(features: Sequence[Numeric]) -> str:
    return ", ".join(f"{one.name} ({one.transform}, missing {one.missing})" for one in features)
