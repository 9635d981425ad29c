"""Vectors of the items of a catalogue, by the model's item tower: rankings use them, and they are published."""

from __future__ import annotations

import torch
from torch import Tensor

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
