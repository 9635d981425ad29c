"""xDeepFM: the compressed interaction network, CIN (Lian et al., xDeepFM, KDD 2018)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, Axis, ModelInputs, Position, with_dense
from trainer.models.ctr_base import FirstOrderTowerModel
from trainer.models.layers.seeded_init import seeded, uniform
from trainer.spec.models.products import XDeepFMSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class XDeepFM(FirstOrderTowerModel):
    """logit = sum_f w_f + <u, x> + <w_cin, p+> + MLP(concat of v_f, and x), equation 9; p+ of the :class:`CIN`.

    Its b is that of the tower's last layer. Numeric features are first-order and deep.

    Parameters: (dim + 1) for each id; of the tower [F dim + n, *hidden, 1], for F fields and n numeric features, sum of
    (a + 1) b over neighbouring sizes, and n; of the CIN sum over k of H_k (1 + H_{k-1} F), H_0 = F (section 3.2).
    """

    def __init__(self, embeddings: nn.Module, spec: XDeepFMSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.cin = CIN(len(self.features), spec.cin_layers, seed=inputs.seed, dtype=inputs.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        return super().axes(numbers) | self.cin.axes(self.features)

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors, linear = self.vectors_and_first_order(features, dense)
        return linear + self.cin(vectors) + self.tower(with_dense(vectors.flatten(1), self.numbers(dense))).squeeze(1)


class CIN(nn.Module):
    """Compressed interaction network: X^0 [b, F, d] -> <w, p+> [b].

    The feature maps are X^k_h = sum over i, j of W^k_hij (X^{k-1}_i o X^0_j), equation 6, o elementwise; p^k_h = the
    sum of X^k_h over d, equation 7; p+ = all of them.

    There is no activation between layers, the setting with which the paper does best (section 4.4.3), and every map
    goes both to the next layer and to the output.
    """

    def __init__(self, num_fields: int, layers: Sequence[int], *, seed: int, dtype: torch.dtype):
        super().__init__()
        with seeded(seed, "cin"):
            self.weights = nn.ParameterList(
                uniform(maps, before * num_fields, inputs=before * num_fields, dtype=dtype)
                for before, maps in itertools.pairwise([num_fields, *layers])
            )
            self.output = uniform(sum(layers), inputs=sum(layers), dtype=dtype)

    def axes(self, features: Sequence[str]) -> Axes:
        """Return the axes of a model's parameters ``cin``."""
        found: Axes = {}
        before: list[Position] = [((name,), 0) for name in features]
        for number, weight in enumerate(self.weights):
            products = (((*of, name), column) for of, column in before for name in features)
            found[f"cin.weights.{number}"] = {1: Axis(tuple(products))}
            before = [((), column) for column in range(len(weight))]
        sizes = enumerate(len(weight) for weight in self.weights)
        maps = tuple(((), (number, column)) for number, size in sizes for column in range(size))
        return found | {"cin.output": {0: Axis(maps)}}

    def forward(self, vectors: Tensor) -> Tensor:
        first = vectors.transpose(1, 2)  # [b, d, F]
        maps, pooled = first, []
        *inner, last = self.weights
        for weight in inner:
            # All products of a sample and a column, and one matrix product for every map: [b, d, H F] x [H F, H'].
            products = maps.unsqueeze(3) * first.unsqueeze(2)
            maps = products.flatten(2) @ weight.T
            pooled.append(maps.sum(1))
        # Of the last layer nothing but the sums is asked, and products can be summed over columns before they are
        # mapped: d times fewer multiply-adds, and no [b, d, H F].
        sums = maps.transpose(1, 2) @ first  # [b, H, F]
        pooled.append(sums.flatten(1) @ last.T)
        return torch.cat(pooled, dim=1) @ self.output
