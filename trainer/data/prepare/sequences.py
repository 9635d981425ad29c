"""Each user's items in order, for sequence models: collected while examples are written, mapped by every rank.

A sequence holds one user's positive rows of all splits, ordered by time, then by row number; its readers leave out what
a model must not see. Rows without a user or an item are in no sequence. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.jagged import Jagged, gather_spans
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import CODE, LABEL, OFFSET, map_array, open_ids, write_array, write_ids
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.examples import Examples, flat
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import DROPPED, SPLIT_NAMES, TRAIN

FOLDER = "sequences"
USERS_FILE = "users.arrow"
ITEM, TARGET, NEGATIVE = SEQUENCE_KEYS = ("item", "item__target", "item__negative")
Int64s = npt.NDArray[np.int64]


class SequenceRows:
    """Collector of positive examples, chunk by chunk. Sorting needs memory for three integers per positive example."""

    def __init__(self, plan: DataPlan, encoded: Encoded):
        self._where = f"dataset '{plan.dataset.name}', training split"
        self._orders = encoded.order(str(plan.dataset.ordering))
        self._ids = encoded.codes[plan.single("user").domain].ids if plan.publishes_users else None
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []

    def add(self, examples: Examples) -> None:
        """Add examples, which hold codes, in ascending order of rows."""
        users, items = flat(examples.features["user"]), flat(examples.features["item"])
        positive = (
            (examples.sides != DROPPED) & ~examples.is_negative & (examples.labels == 1) & (users >= 0) & (items >= 0)
        )
        orders = np.asarray(self._orders[examples.rows[positive]])
        self._parts.append((users[positive], items[positive], examples.sides[positive], orders))

    def write(self, directory: Path, row_of_item: npt.NDArray[np.int32]) -> None:
        """Write the files of :class:`Sequences` under ``directory``.

        Raises:
            DataError: no user has two items to train on.
        """
        users, items, sides, orders = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        self._parts.clear()
        by_time = np.lexsort((orders, users))  # stable: equal times stay in the order of rows
        users, items, sides = users[by_time], row_of_item[items[by_time]], sides[by_time]
        starts = np.append(np.flatnonzero(np.r_[True, users[1:] != users[:-1]]), len(users))
        if self._ids is not None:
            (directory / FOLDER).mkdir(exist_ok=True)
            write_ids(directory / FOLDER / USERS_FILE, self._ids.take(pa.array(users[starts[:-1]])))
        seen = np.append(0, np.cumsum(sides == TRAIN))
        train_starts = seen[starts]
        if np.diff(train_starts).max(initial=0) < 2:
            raise DataError(
                "no user has two positive rows, and sequences need two",
                where=self._where,
                remedy="check label, order and the feature 'user', or add data",
            )
        files: dict[str, tuple[npt.NDArray[Any], npt.DTypeLike]] = {
            "items": (items, CODE),
            "sides": (sides, LABEL),
            "starts": (starts, OFFSET),
            "train_items": (items[sides == TRAIN], CODE),
            "train_starts": (train_starts, OFFSET),
        }
        for side, name in enumerate(SPLIT_NAMES):
            if side != TRAIN:
                before = np.append(0, np.cumsum(sides < side))
                held = np.flatnonzero(sides == side)
                start = starts[np.searchsorted(starts, held, side="right") - 1]
                files[name] = (held[before[held] > before[start]], OFFSET)
        for name, (array, dtype) in files.items():
            write_array(directory / FOLDER / f"{name}.bin", array, dtype)


class Sequences:
    """The sequences of all users, memory-mapped.

    Sequence s is ``items[starts[s] : starts[s + 1]]``, table rows; ``sides`` has the split of each item. ``train``: the
    items of the training split only. ``held``: split -> the positions in ``items`` of the examples to evaluate, which
    are those with a history.
    """

    def __init__(self, directory: Path):
        folder = self._folder = directory / FOLDER
        self.items: npt.NDArray[np.int32] = map_array(folder / "items.bin", CODE)
        self.sides: npt.NDArray[np.uint8] = map_array(folder / "sides.bin", LABEL)
        self.starts: Int64s = map_array(folder / "starts.bin", OFFSET)
        self.train = Jagged(map_array(folder / "train_items.bin", CODE), map_array(folder / "train_starts.bin", OFFSET))
        self.held: dict[str, Int64s] = {
            name: map_array(folder / f"{name}.bin", OFFSET) for name in SPLIT_NAMES if name != "train"
        }

    def user_ids(self) -> pa.Array:
        """Return the raw id of each sequence's user, memory-mapped; kept only for jobs that publish users."""
        return open_ids(self._folder / USERS_FILE)

    def history(self, split: str, places: Int64s) -> tuple[Jagged, Jagged]:
        """Return two lists for each held-out example: the items before it, and all items of its user in any split.

        Both lists are in order, oldest first. The first list has items of earlier splits only: for a test example,
        items of training and validation.
        """
        user = np.searchsorted(self.starts, places, side="right") - 1
        start = self.starts[user]
        before = gather_spans(self.items, start, places - start)
        known = gather_spans(self.sides, start, places - start).values < SPLIT_NAMES.index(split)
        counts = np.append(0, np.cumsum(known))
        everything = gather_spans(self.items, start, self.starts[user + 1] - start)
        return Jagged(before.values[known], counts[before.offsets]), everything


class Windows:
    """Training sequences in pieces of at most ``length`` next-item predictions, each prediction in exactly one piece.

    Piece 0 of a sequence ends with its last item, and the pieces before it have full length: an item of position t > 0
    is predicted once in each epoch, from the items before it in its piece.
    """

    def __init__(self, train: Jagged, length: int):
        self._train, self._length = train, length
        self._first = np.append(0, np.cumsum(-(-np.maximum(train.lengths - 1, 0) // length)))

    def __len__(self) -> int:
        return int(self._first[-1])

    def spans(self, windows: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return (sequence, begin, end) of each window.

        A window holds items [begin, end) of ``train.values``: at least 2, at most length + 1.
        """
        sequence = np.searchsorted(self._first, windows, side="right") - 1
        end = self._train.offsets[sequence + 1] - (windows - self._first[sequence]) * self._length
        return sequence, np.maximum(end - self._length - 1, self._train.offsets[sequence]), end
