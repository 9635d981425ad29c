"""Held-out rows of a job on which it is compared with the served version.

The served version's job was not trained on them either, and its model knows their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.checkpoint.format import Checkpoint
from trainer.checkpoint.record import TrainingRecord
from trainer.checkpoint.warm_start import dataset_of, profile_of_rows
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.hashing import Int64s, derive_key, random_words
from trainer.data.columns.jagged import Jagged
from trainer.data.prepare.drift import HELD_OUT_FROM, open_profile
from trainer.data.prepare.sequences import TARGET
from trainer.data.prepare.split import SPLIT_SEED
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.evaluation import Evaluation, Split
from trainer.spec.stored_specs import read

MAX_ROWS = 200_000
"""Most rows that are scored by both models; if there are more, the rows with the lowest hashes are scored."""
HELD_OUT = ("validation", "test")

Known = Mapping[str, npt.NDArray[np.bool_]]
"""Flags by table: True for each code whose id both models know, bool [number of codes]."""


class NotComparableError(Exception):
    """Two models cannot be compared; the message says why, in words that follow a colon."""


class Chosen(NamedTuple):
    """A split, and row numbers in it, int64 [n], ascending."""

    split: str
    rows: Int64s


def splits_of_both(job: JobSpec, dataset: DatasetSpec, data: PreparedData, served: Checkpoint) -> tuple[str, ...]:
    """Return the job's held-out splits that have no row that the served model was trained on.

    - ``random``: both jobs hold out the same (user, item) pairs, if the shares of this job are no larger.
    - ``time``: this job's held-out rows begin no earlier than those of the served version's job.
    - ``per_user_last``: a user's last rows are new, or were held out before, if this job holds out no more of them.
    - ``column``: never, because the split of the served version's rows is unknown.

    With early stopping, validation rows chose the model's epoch: then only test rows are compared.

    Raises:
        NotComparableError: there is no such split.
    """
    record, split = TrainingRecord.of(served), job.evaluation.split
    before = Split.model_validate(read(read(record.job, JobSpec, "evaluation"), Evaluation, "split"))
    there = [name for name in HELD_OUT if data.num_examples[name]]
    if job.early_stopping is not None and "test" in there:
        there = ["test"]
    if not there:
        raise NotComparableError("the job holds no rows out")
    if split.kind != before.kind:
        raise NotComparableError(f"evaluation.split is {split.kind}, the served version's was {before.kind}")
    if split.kind == "column":
        raise NotComparableError("a split by column does not say which rows the served version was trained on")
    if split.kind == "random":
        there = _same_pairs(split, before, there, (dataset, dataset_of(served)))
    elif split.kind == "per_user_last":
        if _held_of_user(split) > _held_of_user(before):
            raise NotComparableError("the job holds more rows of a user out than the served version's")
    else:
        _require_later(dataset, data, profile_of_rows(served))
    return tuple(there)


def _same_pairs(
    split: Split, before: Split, there: list[str], datasets: tuple[DatasetSpec, DatasetSpec | None]
) -> list[str]:
    if not all(one is not None and _has_pairs(one) for one in datasets):
        raise NotComparableError(
            "a random split holds out the same rows every day only if the features user and item read columns, which "
            "they do not. After a warm start its metrics are too good, as the parent trained on rows that are held out "
            "now: name these features, or split by time"
        )
    largest = before.validation + before.test + 1e-9
    shares = {"test": split.test, "validation": split.test + split.validation}
    there = [name for name in there if shares[name] <= largest]
    if not there:
        raise NotComparableError("evaluation.split holds more rows out than the served version's job did")
    return there


def _has_pairs(dataset: DatasetSpec) -> bool:
    """Return True if rows have one user and one item that are read from columns."""
    found = (dataset.features.get(name) for name in ("user", "item"))
    return all(one is not None and one.type == "id" and one.join is None and one.derive is None for one in found)


def _held_of_user(split: Split) -> int:
    return split.num_test * (split.test > 0) + split.num_validation * (split.validation > 0)


def _require_later(dataset: DatasetSpec, data: PreparedData, before: Mapping[str, Any] | None) -> None:
    now = {} if data.profile_path is None else open_profile(data.profile_path)
    trained_until, held_out_from = ((profile or {}).get(HELD_OUT_FROM) for profile in (before, now))
    types = [((profile or {}).get("types") or {}).get(str(dataset.ordering)) for profile in (before, now)]
    if trained_until is None or held_out_from is None or types[0] != types[1]:
        raise NotComparableError("nothing says up to which time the served version was trained")
    if held_out_from < trained_until:
        raise NotComparableError("held-out rows begin before the time up to which the served version was trained")


def choose(data: PreparedData, splits: Sequence[str], known: Known) -> list[Chosen]:
    """Return at most MAX_ROWS rows of these splits, all of whose ids are known; the same rows on every rank."""
    found = [(split, np.flatnonzero(_known_rows(data, split, known))) for split in splits]
    words = [random_words(derive_key(SPLIT_SEED, number), rows) for number, (_, rows) in enumerate(found)]
    everything = np.concatenate(words)
    if len(everything) > MAX_ROWS:
        limit = np.partition(everything, MAX_ROWS)[MAX_ROWS]
        found = [(split, rows[word < limit]) for (split, rows), word in zip(found, words, strict=True)]
    return [Chosen(split, rows) for split, rows in found]


def _known_rows(data: PreparedData, split: str, known: Known) -> npt.NDArray[np.bool_]:
    """Return flags of the rows of a split, True for rows all of whose ids are known: bool [n]."""
    if data.sequence is not None:
        return _known_sequences(data, split, known[data.keys[0].table])
    found = np.ones(data.num_examples[split], dtype=bool)
    for key in data.keys[:-1] if data.is_bpr else data.keys:
        column = data.checked_column(split, key)
        if isinstance(column, Jagged):
            found &= _all_of_each(known[key.table][column.values], column.offsets)
        else:
            found &= known[key.table][column]
    return found


def _known_sequences(data: PreparedData, split: str, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    assert data.sequence is not None
    positions = np.asarray(data.sequences.held[split])
    history = data.sequences.history(split, positions)[0].last(data.sequence["history"])
    targets = data.sequences.items[positions]
    return known[targets] & _all_of_each(known[history.values], history.offsets)


def _all_of_each(values: npt.NDArray[np.bool_], offsets: Int64s) -> npt.NDArray[np.bool_]:
    """Return flags of lists, True for lists whose values are all true, and for empty lists: bool [n].

    ``values``: values of all lists, concatenated; list i is ``values[offsets[i]:offsets[i + 1]]``.
    """
    missing = np.append(0, np.cumsum(~values))
    found: npt.NDArray[np.bool_] = missing[offsets[1:]] == missing[offsets[:-1]]
    return found


def column_of(data: PreparedData, chosen: Sequence[Chosen], name: str) -> Int64s:
    """Return the codes of a feature of single ids in the chosen rows, one split after the other, int64 [n].

    For a sequence model, ``item`` is the item to predict, and ``user`` is the number of its user.
    """
    parts = []
    for split, rows in chosen:
        if data.sequence is None:
            key = next(key for key in data.keys if key.name == name)
            parts.append(np.asarray(data.column(split, key))[rows])
        else:
            positions = np.asarray(data.sequences.held[split])[rows]
            sequences = data.sequences
            user = np.searchsorted(sequences.starts, positions, side="right") - 1
            parts.append(sequences.items[positions] if name in ("item", TARGET) else user)
    return np.concatenate(parts).astype(np.int64)
