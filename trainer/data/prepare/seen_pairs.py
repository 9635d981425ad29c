"""Items of each user in the training split, and the items to draw negatives from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.jagged import sorted_unique
from trainer.data.prepare.arrays import OFFSET, write_array
from trainer.data.prepare.catalogue import Catalogue
from trainer.data.prepare.encode import Encoded
from trainer.data.prepare.example_counts import example_counts
from trainer.data.prepare.examples import Examples, flat
from trainer.data.prepare.negatives import SeenItems
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import TRAIN


class SeenPairs:
    """Collector of the (user, item) pairs of the training split, for BPR and for rankings of all items.

    Drawn negatives are left out.
    """

    def __init__(self, plan: DataPlan, encoded: Encoded):
        self._user, self._item = plan.single("user"), plan.single("item")
        self._draws_negatives = plan.dataset.negatives is not None
        self._num_items = len(encoded.codes[self._item.domain].ids)
        self._parts: list[npt.NDArray[np.int64]] = []

    def add(self, examples: Examples) -> None:
        users, items = flat(examples.features["user"]), flat(examples.features["item"])
        own = (examples.sides == TRAIN) & ~examples.is_negative & (users >= 0) & (items >= 0)
        self._parts.append(sorted_unique(users[own].astype(np.int64) * self._num_items + items[own]))

    def write(
        self,
        directory: Path,
        rows_of: Mapping[str, npt.NDArray[np.int32]],
        num_rows: Mapping[str, int],
        catalogue: Catalogue | None,
    ) -> None:
        """Write the items to draw negatives from, and the items of each user.

        ``seen.items.bin`` has the table rows of the items that negatives are drawn from, or all positions in a
        catalogue. Without a catalogue only items of this training split are drawn, not items that occur only in a warm
        start or a history. ``seen.{shifted,starts}.bin`` hold a SeenItems object by the user's table row.

        The training split in ``directory`` must already have table rows instead of codes; ``rows_of`` has the row of
        each code.
        """
        pairs = np.concatenate(self._parts)
        users = rows_of[self._user.domain][pairs // self._num_items]
        items = rows_of[self._item.domain][pairs % self._num_items]
        counts = example_counts(
            directory / "train", "item", num_rows[self._item.domain], drawn_negatives=self._draws_negatives
        )
        drawable = np.flatnonzero(counts[NUM_SPECIAL_ROWS:] > 0) + NUM_SPECIAL_ROWS
        position = np.full(len(counts), -1, dtype=np.int64)
        position[drawable] = np.arange(len(drawable))
        if catalogue is not None:
            drawable, position = np.arange(len(catalogue)), catalogue.place_of_row(len(counts))
        live = (users >= NUM_SPECIAL_ROWS) & (position[items] >= 0)
        num_users = num_rows[self._user.domain]
        seen = SeenItems.from_pairs(users[live], position[items[live]], num_users, len(drawable))
        for name, array in (("items", drawable), ("shifted", seen.shifted), ("starts", seen.starts)):
            write_array(directory / f"seen.{name}.bin", array, OFFSET)
