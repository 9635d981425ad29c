"""Splits on disk: examples appended per split, vocabulary from training, codes turned into rows. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, UNKNOWN_ROW, GrownTable, IdMap, grow
from trainer.data.columns.jagged import Jagged, sorted_unique
from trainer.data.columns.labels import label_dtype
from trainer.data.columns.numeric import Numeric, fitted
from trainer.data.columns.values import Kind, as_ids
from trainer.data.columns.vocabulary import Codes, id_type
from trainer.data.columns.weights import as_factors
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import (
    CODE,
    ITEM_PLACES,
    LABELS,
    NUMBERS,
    OFFSET,
    ROW_WEIGHTS,
    USER_CODES,
    VALUE,
    Appender,
    JaggedAppender,
    map_array,
    vector_file,
    weight_file,
    write_array,
)
from trainer.data.prepare.catalogue import Catalogue
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.examples import ExampleRows, Examples, take
from trainer.data.prepare.label_figures import LabelFigures
from trainer.data.prepare.negatives import SeenItems
from trainer.data.prepare.plan import DataPlan, FeaturePlan
from trainer.data.prepare.progress import Progress
from trainer.data.prepare.recent_rows import RecentRows
from trainer.data.prepare.sequences import SequenceRows
from trainer.data.prepare.split import SPLIT_NAMES, TRAIN
from trainer.data.prepare.workers import Workers
from trainer.data.sources.item_table import ITEM_TABLE

_REMAP_ROWS = 1 << 22


class SplitWriter:
    """Files of one split, to which examples are appended.

    They are LABELS, ROW_WEIGHTS where rows have weights, and ``<feature>.bin`` or ``<feature>.{values,offsets}.bin``.
    Where evaluation asks for users also USER_CODES: a number for each user, known in training or not, -1 for none.
    """

    def __init__(self, directory: Path, plan: DataPlan):
        self.directory = directory
        self.num_examples = 0
        self.label_figures = tuple(LabelFigures(task.name) for task in plan.tasks) or (LabelFigures(),)
        self.weight = 0.0
        """Of all its rows, where rows have weights."""
        self._labels = Appender(directory / LABELS, label_dtype(plan.dataset))
        self._row_weights = Appender(directory / ROW_WEIGHTS, VALUE) if plan.dataset.weight is not None else None
        self._users = Appender(directory / USER_CODES, CODE) if plan.keeps_users else None
        self._items = Appender(directory / ITEM_PLACES, CODE) if plan.items is not None else None
        self._flat = {f.name: Appender(directory / f"{f.name}.bin", CODE) for f in plan.trained if not f.is_list}
        self._lists = {f.name: JaggedAppender(directory / f.name, CODE) for f in plan.trained if f.is_list}
        self._weights = {
            f.name: Appender(weight_file(directory, f.name), VALUE) for f in plan.trained if is_weighted(f)
        }
        self._pooling = {f.name: f.pooling for f in plan.trained}
        self._numeric = [Appender(raw_file(directory, one), np.float64) for one in plan.all_numeric]
        self._vectors = {one.name: Appender(vector_file(directory, one.name), VALUE) for one in plan.row_vectors}

    @property
    def num_positives(self) -> int:
        """Examples whose label, of several the first, is 1."""
        return self.label_figures[0].num_positives

    def append_rows(self, examples: Examples, encoded: Encoded, chosen: npt.NDArray[np.int64]) -> None:
        """Append chosen examples' labels, weights and users."""
        labels = examples.labels[chosen]
        self.num_examples += len(labels)
        columns = labels.reshape(len(labels), len(self.label_figures))
        for number, figures in enumerate(self.label_figures):
            figures.add(columns[:, number])
        self._labels.append(labels.reshape(-1))
        if self._row_weights is not None:
            assert encoded.row_weights is not None
            weights = encoded.row_weights[examples.rows[chosen]]
            self.weight += float(weights.sum(dtype=np.float64))
            self._row_weights.append(weights)
        if self._users is not None:
            users = examples.features["user"]
            assert not isinstance(users, Jagged)
            self._users.append(users[chosen])
        if self._items is not None:
            self._items.append(_item_positions(examples)[chosen])

    def append_numbers(self, index: int, numbers: npt.NDArray[np.float64]) -> None:
        """Append chosen examples' values of one numeric feature."""
        self._numeric[index].append(numbers)

    def append_vectors(self, name: str, vectors: npt.NDArray[np.float32]) -> None:
        """Append chosen examples' vectors of one feature, [examples, dim]."""
        self._vectors[name].append(vectors.reshape(-1))

    def append_feature(self, name: str, examples: Examples, chosen: npt.NDArray[np.int64]) -> None:
        """Append chosen examples' ids of one feature, and their weights."""
        if name in self._weights:
            weights = as_factors(examples.weights[name].take(chosen), self._pooling[name])
            self._weights[name].append(weights)
        column = take(examples.features[name], chosen)
        if name in self._flat:
            assert not isinstance(column, Jagged)
            self._flat[name].append(column)
            return
        # A join may give single ids to an id_list feature: a list of one, or an empty one.
        if not isinstance(column, Jagged):
            column = Jagged(column[column >= 0], np.concatenate([[0], np.cumsum(column >= 0)]))
        self._lists[name].append(column.values, column.lengths)

    def close(self) -> None:
        opened: list[Appender | JaggedAppender | None] = [self._labels, self._row_weights, self._users, self._items]
        opened += [*self._numeric, *self._vectors.values()]
        opened += [*self._flat.values(), *self._lists.values(), *self._weights.values()]
        for appender in opened:
            if appender is not None:
                appender.close()


def _item_positions(examples: Examples) -> npt.NDArray[np.int32]:
    positions = examples.features[ITEM_TABLE]
    assert not isinstance(positions, Jagged)
    return positions


def is_weighted(feature: FeaturePlan) -> bool:
    return feature.use is not None and feature.use.weights is not None


def code_files(plan: DataPlan, directory: Path) -> dict[str, Path]:
    """Return the file of codes of each feature."""
    return {f.name: directory / (f"{f.name}.values.bin" if f.is_list else f"{f.name}.bin") for f in plan.trained}


def write_splits(
    plan: DataPlan, encoded: Encoded, directory: Path, workers: Workers, progress: Progress
) -> tuple[dict[str, SplitWriter], SeenPairs, SequenceRows]:
    """Write all examples, still as codes; where a model trains on positives the training split keeps them only."""
    seen, sequences, recent = SeenPairs(plan, encoded), SequenceRows(plan, encoded), RecentRows(plan, encoded)
    writers = {name: SplitWriter(directory / name, plan) for name in SPLIT_NAMES}
    progress.start_writing(encoded.num_rows)
    try:
        for examples in ExampleRows(plan, encoded).chunks():
            seen.add(examples)
            sequences.add(examples)
            recent.add(examples)
            append_examples(plan, writers, examples, encoded, workers)
            progress.add(int(examples.rows[-1] - examples.rows[0]) + 1)
    finally:
        for writer in writers.values():
            writer.close()
    train = writers["train"]
    check_training_split(plan, train.num_examples, train.weight, train.label_figures)
    recent.write(directory)
    return writers, seen, sequences


def check_training_split(plan: DataPlan, num_examples: int, weight: float, labels: Sequence[LabelFigures]) -> None:
    """Check that there is something to learn.

    Args:
        plan: how the examples were made.
        num_examples: of the training split.
        weight: of all its rows, where rows have weights.
        labels: figures of each of its labels.

    Raises:
        DataError: the split is empty, weighs nothing, or has the same label everywhere.
    """
    where = f"dataset '{plan.dataset.name}', training split"
    if num_examples == 0:
        kind = "BPR" if plan.is_bpr else plan.job.model.kind
        what = f"has no positive row, and {kind} trains on positives" if plan.positives_only else "has no rows"
        raise DataError(what, where=where, remedy="check the label, lower evaluation.split's shares, or add data")
    if plan.dataset.weight is not None and not weight:
        raise DataError("every row weighs 0", where=where, remedy="check weight of the dataset, or leave it out")
    for figures in () if plan.positives_only else labels:
        figures.check(where, positives_suffice=plan.job.model.is_softmax_of_batch)


def append_examples(
    plan: DataPlan, writers: Mapping[str, SplitWriter], examples: Examples, encoded: Encoded, workers: Workers
) -> None:
    """Append examples to their splits, the columns side by side."""
    chosen: list[tuple[SplitWriter, npt.NDArray[np.int64]]] = []
    for side, name in enumerate(SPLIT_NAMES):
        mine = examples.sides == side
        if plan.positives_only and side == TRAIN:
            mine &= examples.labels == 1
        chosen.append((writers[name], np.flatnonzero(mine)))

    def append_rows() -> None:
        for writer, places in chosen:
            writer.append_rows(examples, encoded, places)

    def append_feature(name: str) -> None:
        for writer, places in chosen:
            writer.append_feature(name, examples, places)

    def append_numbers(index: int) -> None:
        for writer, places in chosen:
            writer.append_numbers(index, encoded.numeric[index][examples.rows[places]])

    def append_vectors(name: str) -> None:
        for writer, places in chosen:
            writer.append_vectors(name, encoded.vectors[name][examples.rows[places]])

    def append_item_numbers(index: int) -> None:
        assert plan.items is not None
        for writer, places in chosen:
            numbers = plan.items.numbers_at(_item_positions(examples)[places], index)
            writer.append_numbers(len(plan.numeric) + index, numbers)

    columns: list[Callable[[], None]] = [append_rows]
    columns += [functools.partial(append_feature, feature.name) for feature in plan.trained]
    columns += [functools.partial(append_numbers, index) for index in range(len(plan.numeric))]
    columns += [functools.partial(append_vectors, vector.name) for vector in plan.row_vectors]
    columns += [functools.partial(append_item_numbers, index) for index in range(len(plan.item_numeric))]
    workers.map(lambda append: append(), columns)


@dataclass(frozen=True)
class FinishedSplits:
    """Splits whose examples have rows of tables, and what is known of them.

    Attributes:
        encoded: all rows; of a preparation by tasks their ids and a sample of their numbers alone.
        grown: by table, its rows.
        row_counts: by table, training occurrences per row.
        numeric: numeric features, with statistics.
        labels: figures of each label of the training split.
        num_examples: by split.
        num_positives: by split.
        unknown_share: of ids, per feature and split.
    """

    encoded: Encoded
    grown: dict[str, GrownTable]
    row_counts: dict[str, npt.NDArray[np.int64]]
    numeric: tuple[Numeric, ...]
    labels: tuple[LabelFigures, ...]
    num_examples: dict[str, int]
    num_positives: dict[str, int]
    unknown_share: dict[str, dict[str, float]]


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
        catalogue: Catalogue | None = None,
    ) -> None:
        """Write the items to draw negatives from, and what each user had.

        ``seen.items.bin``: the rows that negatives are drawn from (items that occur in this training split: a row that
        only a warm start brought is left alone), or all places of a catalogue; ``seen.{shifted,starts}.bin``: SeenItems
        by user row.
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
        if catalogue is not None:
            drawable, position = np.arange(len(catalogue)), catalogue.place_of_row(len(counts))
        live = (users >= NUM_SPECIAL_ROWS) & (position[items] >= 0)
        num_users = len(row_counts[self._user.domain])
        seen = SeenItems.from_pairs(users[live], position[items[live]], num_users, len(drawable))
        for name, array in (("items", drawable), ("shifted", seen.shifted), ("starts", seen.starts)):
            write_array(directory / f"seen.{name}.bin", array, OFFSET)


def finish_tables(
    plan: DataPlan,
    encoded: Encoded,
    directory: Path,
    base: Mapping[str, IdMap],
    workers: Workers,
) -> tuple[dict[str, GrownTable], dict[str, npt.NDArray[np.int64]]]:
    """Return per table its rows (those of ``base`` that stay, then new ones), and training occurrences per row."""

    def finish(table: str) -> tuple[GrownTable, npt.NDArray[np.int64]]:
        codes = encoded.codes[table]
        counts = occurrences(plan, table, directory / "train", len(codes.ids))
        return finish_table(plan, table, codes, counts, base.get(table))

    tables = plan.trained_tables
    found = dict(zip(tables, workers.map(finish, tables), strict=True))
    return {name: grown for name, (grown, _) in found.items()}, {name: counts for name, (_, counts) in found.items()}


def occurrences(plan: DataPlan, table: str, train: Path, num_ids: int) -> npt.NDArray[np.int64]:
    """Return how often each code occurs in a training split, [num_ids + 1]; entry 0 counts the missing."""
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
    """Return the rows of a table, and training occurrences per row.

    Args:
        plan: how examples are made.
        table: its name.
        codes: its distinct ids, ascending.
        counts: of :func:`occurrences`.
        base: the warm start's ids.
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
    """Rewrite every code as its table row, in place; return (and log) the share of unknown per feature and split."""

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
    """Log the share of unknown ids per feature and split."""
    for feature, by_split in shares.items():
        log(f"unknown ids of {feature}: " + ", ".join(f"{name} {share:.2%}" for name, share in by_split.items()))


def _pieces(array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [array[start : start + _REMAP_ROWS] for start in range(0, len(array), _REMAP_ROWS)]


def _as_type_of(ids: pa.Array, base: IdMap, table: str) -> IdMap:
    kind: Any = "int" if pa.types.is_int64(ids.type) else "string"
    if pa.types.is_uint64(base.ids.type):
        raise DataError(
            "the warm start is from a job of one pass, whose checkpoint has hashes of strings and not the strings",
            where=f"table '{table}'",
            remedy="start from a job with a preparation, or without init_from",
        )
    if pa.types.is_integer(base.ids.type) != (kind == "int"):
        raise DataError(
            f"the warm start's ids are {base.ids.type}, this data's are {ids.type}",
            where=f"table '{table}'",
            remedy="convert the column to the earlier type, or start without init_from",
        )
    where = f"table '{table}'"
    return replace(base, ids=as_ids(base.ids, kind, where), retired=as_ids(base.retired, kind, where))


def ids_before(table: str, kind: Kind, base: IdMap | None, keeps_strings: bool = False) -> IdMap:
    """Return the ids that had a row before a run of one pass, with the run's number; hashes where they are strings.

    Args:
        table: the table.
        kind: of its ids in the rows.
        base: the map of a warm start, None without one.
        keeps_strings: strings are not hashed.

    Raises:
        DataError: the warm start's ids are of another kind, or hashes where strings are kept.
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


def finish_numeric(
    plan: DataPlan, directory: Path, base: Sequence[Numeric] | None, workers: Workers
) -> tuple[Numeric, ...]:
    """Write the numbers as the model reads them, ``NUMBERS`` of each split.

    Statistics are those of the training split, or of a warm start.

    Raises:
        DataError: the warm start has other features or transforms.
    """
    if not plan.all_numeric:
        return ()
    if base is None:
        features = tuple(
            workers.map(lambda one: fit_numbers(plan, one, raw_file(directory / "train", one)), plan.all_numeric)
        )
    else:
        features = inherited_numeric(plan, base)
    write_numbers(features, directory, workers)
    return features


def fit_numbers(plan: DataPlan, feature: Numeric, raw: Path) -> Numeric:
    """Return a numeric feature with the statistics of the training split, whose values as they come are in ``raw``."""
    return fitted(feature, map_array(raw, np.float64), f"dataset '{plan.dataset.name}', training split")


def write_numbers(features: Sequence[Numeric], directory: Path, workers: Workers) -> None:
    """Write ``NUMBERS`` of each split in the place of the values as they come."""
    piece_rows = max(1, _REMAP_ROWS // len(features))
    for name in SPLIT_NAMES:
        raw = [map_array(raw_file(directory / name, one), np.float64) for one in features]
        numbers = Appender(directory / name / NUMBERS, VALUE)
        for start in range(0, len(raw[0]), piece_rows):
            pieces = [(one, column[start : start + piece_rows]) for one, column in zip(features, raw, strict=True)]
            numbers.append(np.stack(workers.map(lambda one: one[0].apply(one[1]), pieces), axis=1).reshape(-1))
        numbers.close()
        for one in features:
            raw_file(directory / name, one).unlink()


def inherited_numeric(plan: DataPlan, base: Sequence[Numeric]) -> tuple[Numeric, ...]:
    """Return the numeric features of a warm start, which are the job's.

    Raises:
        DataError: it has other features or transforms.
    """
    asked = [(one.name, one.transform, one.missing) for one in plan.all_numeric]
    if [(one.name, one.transform, one.missing) for one in base] != asked:
        raise DataError(
            f"the warm start's numeric features are {_in_words(base)}, this data's {_in_words(plan.all_numeric)}",
            where=f"dataset '{plan.dataset.name}'",
            remedy="use the same transforms, or start without init_from",
        )
    return tuple(base)


def raw_file(directory: Path, feature: Numeric) -> Path:
    """Return the file of a feature's values as they come, in a split."""
    return directory / f"{feature.name}.raw"


def _in_words(features: Sequence[Numeric]) -> str:
    return ", ".join(f"{one.name} ({one.transform}, missing {one.missing})" for one in features)
