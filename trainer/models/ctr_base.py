"""Common base classes of CTR models: pooled rows as field vectors, first-order weights, and the loss of a score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, Axis, ModelInputs, Position, RankingModel, RowColumn, columns_of, pooled_rows
from trainer.models.layers.fused import SplitFields, is_fusible, pairs
from trainer.models.layers.mlp import tower_of
from trainer.models.layers.seeded_init import seeded, uniform
from trainer.spec.models.base import FirstOrderSpec, ModelSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    from trainer.data.batches.batch import Batch


class ClickModel(RankingModel):
    """Base: every feature is a field, whose vector is its pooled row; one logit for each sample."""

    def __init__(self, embeddings: nn.Module, spec: ModelSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.width = len(self.features) * self.dim + self.num_dense  # of all fields and numbers side by side

    def vectors(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        """Return the fields' vectors [b, number of fields, dim]; ``dense``: the batch's numbers, for projections."""
        return self._rows(features, dense, self.dim)

    def _rows(self, features: KeyedJaggedTensor, dense: Tensor | None, columns: int) -> Tensor:
        rows = pooled_rows(self.lookup(features, dense), self.features)
        return rows.unflatten(1, (len(self.features), columns))

    def inputs(self, numbers: Sequence[Position]) -> list[Position]:
        """Return the names of the positions of all field vectors and numeric features, concatenated, [width]."""
        return [*columns_of(self.features, self.dim), *numbers]

    def axes(self, numbers: Sequence[Position]) -> Axes:
        return super().axes(numbers) | self.reading(self.inputs(numbers), "tower")

    def loss(self, batch: Batch) -> Tensor:
        return self.label_losses(self.scores(batch), batch)


class FirstOrderModel(ClickModel):
    """Base: a row [v | w] has dim + 1 columns, the field's vector v and the id's weight w, its first-order term.

    The first-order terms are sum_f w_f + <u, x>, with x the numeric features, whose weights u are dense parameters. In
    lists w is pooled like v; for a projected vector, v and w are columns of the projection. Features that share a table
    share the weights of its ids. v and w are initialised alike (``model.init``), are updated by the row optimizer, and
    learn from zeros (docs/adr/0030).
    """

    def __init__(self, embeddings: nn.Module, spec: ModelSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        with seeded(inputs.seed, "first order"):
            weights = nn.Linear(self.num_dense, 1, bias=False, dtype=torch.float32) if self.num_dense else None
        self.first_order = None if weights is None else weights.to(inputs.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        return super().axes(numbers) | (
            {} if self.first_order is None else {"first_order.weight": {1: Axis(tuple(numbers))}}
        )

    def vectors_and_first_order(self, features: KeyedJaggedTensor, dense: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the fields' vectors [b, number of fields, dim], and the sum of the first-order terms [b]."""
        vectors, linear, _ = self._split(features, dense)
        return vectors, linear

    def vectors_and_terms(self, features: KeyedJaggedTensor, dense: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the fields' vectors [b, number of fields, dim], and their first-order terms and :func:`pairs` [b]."""
        vectors, linear, products = self._split(features, dense)
        return vectors, linear + (pairs(vectors) if products is None else products)

    def _split(self, features: KeyedJaggedTensor, dense: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, products = self._rows(features, dense, self.dim + 1), None
        flat = rows.flatten(1)
        if self.training and is_fusible(flat, ()):
            vectors, linear, products = SplitFields.apply(flat.contiguous(), self.dim)
            vectors = vectors.unflatten(1, (len(self.features), self.dim))
        else:
            vectors, linear = rows[:, :, : self.dim], rows[:, :, self.dim].sum(1)
        numbers = self.numbers(dense)
        if self.first_order is not None and numbers is not None:
            linear = linear + self.first_order(numbers.to(linear.dtype)).squeeze(1)
        return vectors, linear, products


class FirstOrderTowerModel(FirstOrderModel):
    """Base: a tower over the fields' vectors and the numeric features, in addition to the first-order terms."""

    def __init__(self, embeddings: nn.Module, spec: FirstOrderSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.tower = tower_of(spec, inputs, [self.width, *spec.hidden, 1])


class NumericFields(nn.Module):
    """Numeric features as fields, each with a learned vector v_j: x [b, n] -> x_j v_j [b, n, dim].

    Rendle, Factorization Machines, ICDM 2010, equation 1; Song et al., AutoInt, CIKM 2019, equation 4. The layer has n
    dim parameters.
    """

    def __init__(self, dim: int, inputs: ModelInputs):
        super().__init__()
        with seeded(inputs.seed, "numeric fields"):
            self.vectors = uniform(inputs.num_dense, dim, inputs=dim, dtype=inputs.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        """Return the axes of these vectors, as parameter ``numeric.vectors`` of a model."""
        columns = tuple(((), RowColumn(column)) for column in range(self.vectors.shape[1]))
        return {"numeric.vectors": {0: Axis(tuple(numbers)), 1: Axis(columns, reads=False)}}

    def forward(self, dense: Tensor) -> Tensor:
        return dense.to(self.vectors.dtype).unsqueeze(2) * self.vectors
