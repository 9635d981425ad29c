"""Vectors of items and inputs of users, by a model's towers: rankings use them, and so does publication."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from trainer.data.batches.bags import bags_of
from trainer.data.batches.number_columns import item_numbers
from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.columns.hashing import Int64s
from trainer.data.prepare.examples import take
from trainer.models.base import RankingModel


@torch.no_grad()
def tower_outputs(model: RankingModel, data: PreparedColumns, positions: Int64s, device: torch.device) -> Tensor:
    """Return the item vectors [b, d] of the catalogue's items at ``positions`` [b].

    Collective if the model's tables are sharded.
    """
    catalogue = data.catalogue
    assert catalogue is not None
    parts = {name: take(column, positions) for name, column in catalogue.features.items()}
    features = bags_of(data.keys, {**parts, "item": catalogue.rows[positions]}, len(positions))
    numbers = item_numbers(data, positions)
    return model.item_side(features.to(device), None if numbers is None else torch.from_numpy(numbers).to(device))


class UserTowerInputs:
    """Inputs of the user tower for the users of a split.

    Features other than the user are read from the user's first row in the split. ``reads_rows``: True if there are such
    features, so that only users with a row in the split have inputs.
    """

    def __init__(self, data: PreparedColumns, split: str):
        self._keys, self._columns = data.keys, {}
        others = [key for key in data.keys if key.name not in ("user", "item") and not key.of_item]
        self.reads_rows = not data.is_bpr and bool(others)
        if self.reads_rows:
            self._columns = {key.name: data.column(split, key) for key in others}
            users = np.asarray(data.column(split, next(key for key in data.keys if key.name == "user")))
            self._users, self._first = np.unique(users, return_index=True)

    def bags(self, users: Int64s) -> KeyedJaggedTensor:
        """Return a sample for each of ``users``, rows of the user table [n], with the features of the user tower."""
        parts: dict[str, Any] = {"user": users}
        if self._columns:
            rows = self._first[np.searchsorted(self._users, users)]
            parts |= {name: take(column, rows) for name, column in self._columns.items()}
        return bags_of(self._keys, parts, len(users))
