"""Writing of examples to the files of their split (training, validation or test), with codes for ids."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.columns.dynamic_ids import GrownTable
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.labels import RowWeights, label_dtype
from trainer.data.columns.numeric import Numeric
from trainer.data.columns.weights import as_factors
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import (
    CODE,
    ITEM_PLACES,
    LABELS,
    USER_CODES,
    VALUE,
    Appender,
    JaggedAppender,
    weight_file,
)
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.examples import ExampleRows, Examples, flat, take
from trainer.data.prepare.label_figures import LabelFigures
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.progress import Progress
from trainer.data.prepare.seen_pairs import SeenPairs
from trainer.data.prepare.sequences import SequenceRows
from trainer.data.prepare.split import SPLIT_NAMES, TRAIN, TimeLimits
from trainer.data.prepare.workers import Workers
from trainer.data.sources.item_table import ITEM_TABLE


class SplitWriter:
    """Writer that appends examples to the files of one split.

    The files are LABELS, ROW_WEIGHTS if rows have weights, and ``<feature>.bin`` or, for lists,
    ``<feature>.{values,offsets}.bin``. If evaluation needs users, USER_CODES has a number for each example's user, also
    for users without training examples, and -1 for none.
    """

    def __init__(self, directory: Path, plan: DataPlan):
        self.directory = directory
        self.num_examples = 0
        self.label_figures = tuple(LabelFigures(task.name) for task in plan.tasks) or (LabelFigures(),)
        self.weight = 0.0
        """Sum of the weights of the split's examples; 0 if rows have no weights."""
        self._labels = Appender(directory / LABELS, label_dtype(plan.dataset))
        self._users = Appender(directory / USER_CODES, CODE) if plan.keeps_users else None
        self._items = Appender(directory / ITEM_PLACES, CODE) if plan.items is not None else None
        self._flat = {f.name: Appender(directory / f"{f.name}.bin", CODE) for f in plan.trained if not f.is_list}
        self._lists = {f.name: JaggedAppender(directory / f.name, CODE) for f in plan.trained if f.is_list}
        self._weights = {
            f.name: Appender(weight_file(directory, f.name), VALUE)
            for f in plan.trained
            if f.use is not None and f.use.weights is not None
        }
        self._pooling = {f.name: f.pooling for f in plan.trained}
        self._values = {
            one.name: Appender(directory / one.split_file, one.dtype)
            for one in (*plan.values, *plan.item_numeric)
            if one.split_file is not None
        }

    @property
    def num_positives(self) -> int:
        """Number of examples whose label is 1; with several labels, the first label counts."""
        return self.label_figures[0].num_positives

    def append_rows(self, examples: Examples, chosen: npt.NDArray[np.int64]) -> None:
        """Append the labels, users and item positions of the examples at the positions ``chosen``."""
        labels = examples.labels[chosen]
        self.num_examples += len(labels)
        columns = labels.reshape(len(labels), len(self.label_figures))
        for number, figures in enumerate(self.label_figures):
            figures.add(columns[:, number])
        self._labels.append(labels.reshape(-1))
        if self._users is not None:
            self._users.append(flat(examples.features["user"])[chosen])
        if self._items is not None:
            self._items.append(flat(examples.features[ITEM_TABLE])[chosen])

    def append_values(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append values [examples, ...] of the column ``name``."""
        if name == RowWeights.name:
            self.weight += float(values.sum(dtype=np.float64))
        self._values[name].append(values.reshape(-1))

    def append_feature(self, name: str, examples: Examples, chosen: npt.NDArray[np.int64]) -> None:
        """Append one feature's ids, and their weights if it has any, of the examples at the positions ``chosen``."""
        if name in self._weights:
            weights = as_factors(examples.weights[name].take(chosen), self._pooling[name])
            self._weights[name].append(weights)
        column = take(examples.features[name], chosen)
        if name in self._flat:
            self._flat[name].append(flat(column))
            return
        # A join may give single ids to an id_list feature: a list of one, or an empty one.
        if not isinstance(column, Jagged):
            column = Jagged(column[column >= 0], np.concatenate([[0], np.cumsum(column >= 0)]))
        self._lists[name].append(column.values, column.lengths)

    def close(self) -> None:
        opened: list[Appender | JaggedAppender | None] = [self._labels, self._users, self._items]
        opened += [*self._values.values(), *self._flat.values(), *self._lists.values(), *self._weights.values()]
        for appender in opened:
            if appender is not None:
                appender.close()


def code_files(plan: DataPlan, directory: Path) -> dict[str, Path]:
    """Return the path of the file with codes, by feature, in the folder of a split."""
    return {f.name: directory / (f"{f.name}.values.bin" if f.is_list else f"{f.name}.bin") for f in plan.trained}


def write_splits(
    plan: DataPlan, encoded: Encoded, directory: Path, workers: Workers, progress: Progress
) -> tuple[dict[str, SplitWriter], SeenPairs | None, SequenceRows | None]:
    """Write all examples, with codes for ids, and return the splits' writers, the seen items and the sequences.

    If the model trains on positives only, the training split gets only positive examples.
    """
    seen = SeenPairs(plan, encoded) if plan.keeps_seen else None
    sequences = SequenceRows(plan, encoded) if plan.is_sequence else None
    writers = {name: SplitWriter(directory / name, plan) for name in SPLIT_NAMES}
    progress.start_writing(encoded.num_rows)
    try:
        rows = ExampleRows(plan, encoded)
        for line in ("" if rows.negatives is None else rows.negatives.in_words(), rows.item_features.in_words()):
            if line:
                progress.log(line)
        for examples in rows.chunks():
            if seen is not None:
                seen.add(examples)
            if sequences is not None:
                sequences.add(examples)
            append_examples(plan, writers, examples, encoded, workers, rows.item_features.names)
            progress.add(int(examples.rows[-1] - examples.rows[0]) + 1)
    finally:
        for writer in writers.values():
            writer.close()
    train = writers["train"]
    check_training_split(plan, train.num_examples, train.weight, train.label_figures)
    return writers, seen, sequences


def check_training_split(plan: DataPlan, num_examples: int, weight: float, labels: Sequence[LabelFigures]) -> None:
    """Check that a model can learn something from the training split.

    ``weight``: sum of its examples' weights, if rows have weights; ``labels``: figures of each of its labels.

    Raises:
        DataError: the split is empty, all its weights are 0, or all its labels are equal.
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
    plan: DataPlan,
    writers: Mapping[str, SplitWriter],
    examples: Examples,
    encoded: Encoded,
    workers: Workers,
    of_item: frozenset[str] = frozenset(),
) -> None:
    """Append examples to the files of their splits, the columns in parallel.

    ``of_item`` names the numbers and vectors that a drawn negative takes from a row of its own item.
    """
    chosen: list[tuple[SplitWriter, npt.NDArray[np.int64]]] = []
    for side, name in enumerate(SPLIT_NAMES):
        mine = examples.sides == side
        if plan.positives_only and side == TRAIN:
            mine &= examples.labels == 1
        chosen.append((writers[name], np.flatnonzero(mine)))

    def append_rows() -> None:
        for writer, places in chosen:
            writer.append_rows(examples, places)

    def append_feature(name: str) -> None:
        for writer, places in chosen:
            writer.append_feature(name, examples, places)

    def append_values(name: str) -> None:
        rows = examples.item_rows if name in of_item else examples.rows
        for writer, places in chosen:
            writer.append_values(name, encoded.values[name][rows[places]])

    def append_item_numbers(name: str) -> None:
        assert plan.items is not None
        for writer, places in chosen:
            positions = flat(examples.features[ITEM_TABLE])[places]
            writer.append_values(name, plan.items.values_at(positions, name))

    columns: list[Callable[[], None]] = [append_rows]
    columns += [functools.partial(append_feature, feature.name) for feature in plan.trained]
    columns += [functools.partial(append_values, one.name) for one in plan.values if one.split_file is not None]
    columns += [functools.partial(append_item_numbers, one.name) for one in plan.item_numeric]
    workers.map(lambda append: append(), columns)


@dataclass(frozen=True)
class FinishedSplits:
    """Splits whose examples have table rows instead of codes, with their tables and figures.

    Attributes:
        encoded: all rows; after a preparation by tasks, only their distinct ids and a sample of their numbers.
        row_counts: table -> the number of occurrences of each row in the training split.
        unknown_share: share of unknown ids by feature and split.
        time_limits: times that separate the splits of a split by time; None for other splits.
        seen, sequences: collectors, to be written once ids have table rows; None after a preparation by tasks.
    """

    encoded: Encoded
    grown: dict[str, GrownTable]
    row_counts: dict[str, npt.NDArray[np.int64]]
    numeric: tuple[Numeric, ...]
    labels: tuple[LabelFigures, ...]
    num_examples: dict[str, int]
    num_positives: dict[str, int]
    unknown_share: dict[str, dict[str, float]]
    time_limits: TimeLimits | None = None
    seen: SeenPairs | None = None
    sequences: SequenceRows | None = None
