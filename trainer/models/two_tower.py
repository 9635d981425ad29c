"""Two towers: one over user and context; the other is the item's row, or a tower over that row and item features.

The item vectors can be published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from embeddings.tables.philox import philox4x32, table_key
from trainer.data.columns.dynamic_ids import UNKNOWN_ROW
from trainer.data.columns.hashing import unit_interval
from trainer.models.base import (
    Axes,
    Axis,
    ModelInputs,
    Position,
    RankingModel,
    RowColumn,
    columns_of,
    with_dense,
    with_values,
)
from trainer.models.layers.mlp import tower_of
from trainer.models.losses import in_batch_softmax
from trainer.spec.models.two_tower import TwoTowerSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData

ITEM = "item"


class TwoTower(RankingModel):
    """logit = <u, v> / t + c, with t the temperature, u = MLP(user and context fields), and v the item's row e_item.

    u reads the vectors e_f of all features but the item's, and the numeric features. A projected vector is a field like
    others (trainer.models.base.VectorFields).

    With an item table, v = MLP(e_item, e_f of the table's features, and its numbers). An item without a row reads the
    row of the unknown id, and its features determine v. So that v learns to do without the item's own row, a share
    ``item_id_dropout`` of the training samples reads the unknown id too. With ``normalize`` u and v are scaled to
    length 1 (Yi et al., RecSys 2019, section 5), and logit = (<u, v> + b_item) / t + c, b_item one more column at the
    end of the item's row: a direction hardly tells how popular an item is.

    The loss is ``bce``, ``mse``, or ``sampled_softmax`` over the items of the batch
    (trainer.models.losses.in_batch_softmax), which does not train c.

    The item tower is the item's row or ends in a linear layer. So the loss determines its outputs up to a rotation and
    a scale, which alignment between versions needs. Without ``normalize`` there is no b_item: an item's popularity goes
    into its vector, which consumers read.
    """

    def __init__(self, embeddings: nn.Module, spec: TwoTowerSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.item_vectors = tuple(one for one in inputs.vectors if one.of_item)
        self.context_vectors = tuple(one for one in inputs.vectors if not one.of_item)
        of_items = {key.name for key in inputs.keys if key.of_item} | {one.name for one in self.item_vectors}
        self.item_features = tuple(name for name in self.features if name in of_items)
        self.num_item_numbers, self.seed = inputs.num_item_numbers, inputs.seed
        self.context = tuple(name for name in self.features if name != ITEM and name not in self.item_features)
        if ITEM not in self.features or not self.context:
            names = list(self.features)
            raise ValueError(f"two_tower needs a feature named 'item' and at least one other, not {names}")
        num_context_numbers = self.num_dense - self.num_item_numbers
        self.tower = tower_of(
            spec, inputs, [len(self.context) * self.dim + num_context_numbers, *spec.hidden, self.dim]
        )
        self.item_tower: nn.Module | None = None
        if self.item_features or self.num_item_numbers:
            width = (1 + len(self.item_features)) * self.dim + self.num_item_numbers
            self.item_tower = tower_of(spec, inputs, [width, *spec.hidden, self.dim], number=1)
        self.normalize, self.temperature = spec.normalize, spec.temperature
        self.item_id_dropout = spec.item_id_dropout
        self.bias = nn.Parameter(torch.zeros((), dtype=inputs.dtype))
        # Not a buffer, because it depends on the data: a warm start on other data computes its own.
        self.log_probabilities = torch.zeros(0, dtype=inputs.dtype)

    def begin(self, data: PreparedData) -> None:
        """Compute log Q of each row of the item table, Q the share of training examples with that item.

        Examples count whatever their label.
        """
        if self.loss_kind != "sampled_softmax":
            return
        item = next(key for key in data.keys if key.name == "item")
        counts = np.bincount(np.asarray(data.column("train", item)), minlength=data.tables[item.table].num_rows)
        probabilities = counts / max(counts.sum(), 1)
        # A row without an example is in no batch.
        logs = np.log(probabilities, out=np.zeros(len(probabilities)), where=probabilities > 0)
        self.log_probabilities = torch.from_numpy(logs).to(self.log_probabilities.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        of_context = len(numbers) - self.num_item_numbers
        context = [*columns_of(self.context, self.dim), *numbers[:of_context]]
        items = [*columns_of((ITEM, *self.item_features), self.dim), *numbers[of_context:]]
        found = self.making_vectors() | self.reading(context, "tower") | self.reading(items, "item_tower")
        if self.item_tower is not None:
            # New columns of the item's vector begin at zero, as in a row, so that the product does not change.
            made = Axis(tuple(((), RowColumn(column)) for column in range(self.dim)), reads=False)
            last = f"item_tower.{len(self.item_tower) - 1}"  # type: ignore[arg-type]
            for part in ("weight", "bias"):
                found[f"{last}.{part}"] = {**found.get(f"{last}.{part}", {}), 0: made}
        return found

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        user, item = self.towers(features, dense)
        return (user * item).sum(1) + self.bias

    def towers(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (u / t, v), each [b, dim], or with ``normalize`` ([u, 1] / t, [v, b_item]), each [b, dim + 1].

        ``dense`` [b, n]: the batch's numbers (trainer.data.columns.vectors).
        """
        blocks, numbers = self.lookup(features, dense).to_dict(), self.numbers(dense)
        of_items = self.num_dense - self.num_item_numbers
        context, of_item = (None, None) if numbers is None else (numbers[:, :of_items], numbers[:, of_items:])
        return self._user(blocks, context), self._item(blocks, of_item)

    def _user(self, blocks: dict[str, Tensor], numbers: Tensor | None) -> Tensor:
        rows = torch.cat([blocks[name][:, : self.dim] for name in self.context], dim=1)
        output: Tensor = self.tower(with_dense(rows, numbers))
        if self.normalize:
            output = torch.cat([normalize(output, dim=1), torch.ones_like(output[:, :1])], dim=1)
        return output if self.temperature == 1.0 else output / self.temperature

    def _item(self, blocks: dict[str, Tensor], numbers: Tensor | None) -> Tensor:
        output, bias = blocks[ITEM][:, : self.dim], blocks[ITEM][:, self.dim :]
        if self.item_tower is not None:
            rows = torch.cat([output, *(blocks[name][:, : self.dim] for name in self.item_features)], dim=1)
            output = self.item_tower(with_dense(rows, numbers))
        return torch.cat([normalize(output, dim=1), bias], dim=1) if self.normalize else output

    def both_sides(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.towers(batch.features, batch.dense if self.num_columns else None)

    def user_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        blocks = self.embeddings(features).to_dict()
        if self.vector_fields is not None and self.context_vectors:
            assert dense is not None
            blocks |= self.vector_fields(dense, self.context_vectors)
        num_numbers = self.num_dense - self.num_item_numbers
        return self._user(blocks, dense[:, :num_numbers] if num_numbers and dense is not None else None)

    def user_offsets(self, features: KeyedJaggedTensor) -> Tensor | None:
        return self.bias.expand(features.stride())

    def item_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        blocks = self.embeddings(features).to_dict()
        if self.vector_fields is not None and self.item_vectors:
            assert dense is not None
            blocks |= self.vector_fields(dense, self.item_vectors)
            dense = dense[:, : self.num_item_numbers]
        return self._item(blocks, dense if self.num_item_numbers else None)

    def loss(self, batch: Batch) -> Tensor:
        features = self._with_unknown_items(batch) if self.item_tower is not None and self.training else batch.features
        dense = batch.dense if self.num_columns else None
        if self.loss_kind != "sampled_softmax":
            return self.label_losses(self(features, dense), batch)
        ids = batch.features[ITEM].values()
        if self.log_probabilities.device != ids.device:
            self.log_probabilities = self.log_probabilities.to(ids.device)
        return in_batch_softmax(
            *self.towers(features, dense), batch.labels, self.log_probabilities[ids], batch.global_size
        )

    def _with_unknown_items(self, batch: Batch) -> KeyedJaggedTensor:
        """Return the batch's features, with the items of some samples replaced by the unknown id.

        The choice of samples depends only on the seed, the step and their places in the global batch.
        """
        features = batch.features
        if not self.item_id_dropout:
            return features
        places = np.arange(batch.sample_offset, batch.sample_offset + len(batch), dtype=np.uint64)
        words = philox4x32((batch.step, places, 0, 0), table_key(self.seed, "item_id_dropout"))
        random = unit_interval(words[0].astype(np.uint64) << np.uint64(32) | words[1].astype(np.uint64))
        is_dropped = torch.from_numpy(random < self.item_id_dropout).to(features.values().device)
        start = features.offset_per_key()[features.keys().index(ITEM)]
        values = features.values().clone()
        values[start : start + len(batch)].masked_fill_(is_dropped, UNKNOWN_ROW)
        return with_values(features, values)
