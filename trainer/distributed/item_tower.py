"""The item side of items of a catalogue: what rankings multiply with users, and what is published."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.data.batches.bags import bags_of
from trainer.data.batches.keys import Key
from trainer.data.columns.hashing import Int64s
from trainer.data.prepare.catalogue import Catalogue
from trainer.data.prepare.examples import take
from trainer.models.base import RankingModel


@torch.no_grad()
def tower_outputs(
    model: RankingModel, keys: Sequence[Key], catalogue: Catalogue, places: Int64s, device: torch.device
) -> Tensor:
    """Return the item side of the items at ``places``, [b, d]. Collective where the model's tables are sharded."""
    parts = {name: take(column, places) for name, column in catalogue.features.items()}
    features = bags_of(keys, {**parts, "item": catalogue.rows[places]}, len(places))
    numbers = torch.from_numpy(catalogue.numbers[places]).to(device) if catalogue.numbers.shape[1] else None
    return model.item_side(features.to(device), numbers)
