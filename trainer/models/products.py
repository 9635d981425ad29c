"""PNN, DLRM, DCN-V2, xDeepFM: products of vectors before, after or parallel to a tower.

Qu et al., Product-based Neural Networks for User Response Prediction, ICDM 2016. Naumov et al., Deep Learning
Recommendation Model for Personalization and Recommendation Systems, 2019. Wang et al., DCN V2, WWW 2021. Lian et al.,
xDeepFM, KDD 2018.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.models.base import Axes, Axis, ModelInputs, Position, pairs_of, with_dense
from trainer.models.ctr_base import ClickModel, FirstOrderTowerModel
from trainer.models.layers.fused import CrossLayers, is_fusible, is_hooked
from trainer.models.layers.mlp import tower_of
from trainer.models.layers.seeded_init import seeded, uniform
from trainer.spec.models.products import DCNv2Spec, DLRMSpec, PNNSpec, XDeepFMSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class PNN(ClickModel):
    """logit = MLP([e_f over the fields f | x | <e_f, e_g> for f < g]), x the numeric features.

    The first layer is the paper's l_1 = relu(l_z + l_p + b_1) of IPNN, linear and product signals, with a weight
    for each product where the paper factorizes the weights of a unit. By the linear signals rows learn from zeros.

    Number of parameters for F fields and n numeric features. L(sizes) is the sum of (a + 1) b over neighbouring sizes
    a, b.

    - rows: dim for each id
    - tower: L([F dim + n + F (F - 1) / 2, *hidden, 1])
    """

    def __init__(self, embeddings: nn.Module, spec: PNNSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        # No buffer: it is no state. Not computed in forward: the exporter to ONNX does not know how.
        self.pairs = torch.triu_indices(len(self.features), len(self.features), 1)
        self.tower = tower_of(spec, inputs, [self.width + self.pairs.shape[1], *spec.hidden, 1])

    def axes(self, numbers: Sequence[Position]) -> Axes:
        return self.making_vectors() | self.reading([*self.inputs(numbers), *pairs_of(self.features)], "tower")

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors = self.vectors(features, dense)
        first, second = self.pairs.to(vectors.device)
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.tower(torch.cat([with_dense(vectors.flatten(1), self.numbers(dense)), products], dim=1)).squeeze(1)


NUMBERS = ""
"""Name of the vector made of all numeric features; no feature has this name."""


class DLRM(ClickModel):
    """logit = MLP([z | <e_i, e_j> for i < j]) over the fields' vectors e and z, the bottom MLP of the numeric features.

    z is one more vector in the products (section 2.5); without numeric features there is no bottom MLP, and z is left
    out.

    The bottom MLP is [n, *hidden, dim], its last layer followed by ReLU too, as in the paper's code. Without numeric
    features the logit depends only on products of rows: rows that start from zeros get no gradient, and such a start is
    refused.

    Number of parameters for F fields and n numeric features. L(sizes) is the sum of (a + 1) b over neighbouring sizes
    a, b.

    - rows: dim for each id
    - bottom MLP, with numeric features: L([n, *hidden, dim])
    - top MLP: L([dim + (F + 1) F / 2, *hidden, 1]); without numeric features L([F (F - 1) / 2, *hidden, 1])
    """

    def __init__(self, embeddings: nn.Module, spec: DLRMSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        num_vectors = len(self.features) + bool(self.num_dense)
        if num_vectors < 2:
            raise ValueError(f"dlrm multiplies pairs of vectors, and there is one feature, {self.features[0]}: use dnn")
        sizes = [self.num_dense, *spec.hidden, self.dim]
        self.bottom = tower_of(spec, inputs, sizes, number=1, logits=False) if self.num_dense else None
        # No buffer: it is no state. Not computed in forward: the exporter to ONNX does not know how.
        self.pairs = torch.triu_indices(num_vectors, num_vectors, 1)
        sizes = [self.pairs.shape[1] + (self.dim if self.num_dense else 0), *spec.hidden, 1]
        self.top = tower_of(spec, inputs, sizes)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        below = [NUMBERS] if self.num_dense else []
        # The columns of z are outputs of units, so new ones are not zero.
        units = [((name,), column) for name in below for column in range(self.dim)]
        seen = [*units, *pairs_of([*below, *self.features])]
        return self.making_vectors() | self.reading(numbers, "bottom") | self.reading(seen, "top")

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        vectors = self.vectors(features, dense)
        seen, numbers = [], self.numbers(dense)
        if self.bottom is not None and numbers is not None:
            seen = [self.bottom(numbers.to(vectors.dtype))]
            vectors = torch.cat([seen[0].unsqueeze(1), vectors], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = self.pairs.to(products.device)
        return self.top(torch.cat([*seen, products[:, first, second]], dim=1)).squeeze(1)


class DCNv2(ClickModel):
    """x_0 = concat of v_f, and of the numeric features; cross layers x_{l+1} = x_0 o (W_l x_l + b_l) + x_l, equation 1.

    ``stacked``: logit = MLP(x_L), figure 1a. ``parallel``: logit = <w, [x_L | h]> + c, figure 1b, h the last hidden
    layer of the MLP on x_0. ``low_rank`` r: W_l = U_l V_l^T, equation 2, U and V [D, r]. The mixture of low-rank
    experts (equation 3) is not implemented.

    Number of parameters for F fields and n numeric features, with D = F dim + n. L(sizes) is the sum of (a + 1) b over
    neighbouring sizes a, b.

    - rows: dim for each id
    - each cross layer: D^2 + D; with ``low_rank`` 2 D r + D
    - ``stacked``: L([D, *hidden, 1])
    - ``parallel``: L([D, *hidden]) for the MLP, D + hidden[-1] + 1 for w and c
    """

    def __init__(self, embeddings: nn.Module, spec: DCNv2Spec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.parallel = spec.structure == "parallel"
        with seeded(inputs.seed, "cross"):
            layers = (CrossLayer(self.width, spec.low_rank, inputs.dtype) for _ in range(spec.cross_layers))
            self.cross = nn.ModuleList(layers)
        sizes = [self.width, *spec.hidden] if self.parallel else [self.width, *spec.hidden, 1]
        self.tower = tower_of(spec, inputs, sizes, logits=not self.parallel)
        if self.parallel:
            with seeded(inputs.seed, "output"):
                self.output = nn.Linear(self.width + sizes[-1], 1, dtype=torch.float32).to(inputs.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        inputs = self.inputs(numbers)
        reads, gives = Axis(tuple(inputs)), Axis(tuple(inputs), reads=False)
        found = super().axes(numbers)
        for number, layer in enumerate(self.cross):
            *_, last = maps = [f"cross.{number}.maps.{one}" for one in range(len(layer.maps))]  # type: ignore[arg-type]
            found |= {maps[0]: {1: reads}, f"cross.{number}.bias": {0: gives}}
            found[last] = {**found.get(last, {}), 0: gives}
        if self.parallel:
            hidden = [((), column) for column in range(self.output.in_features - len(inputs))]
            found["output.weight"] = {1: Axis((*inputs, *hidden))}
        return found

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        first = with_dense(self.vectors(features, dense).flatten(1), self.numbers(dense))
        x = self._crossed(first)
        if not self.parallel:
            return self.tower(x).squeeze(1)
        # Concatenating them would copy them, and the gradient of each.
        ends = self.output.weight.split([self.width, self.output.in_features - self.width], dim=1)
        last = functional.linear(x, ends[0], self.output.bias) + functional.linear(self.tower(first), ends[1])
        return last.squeeze(1)

    def _crossed(self, first: Tensor) -> Tensor:
        layers = cast(Iterable[CrossLayer], self.cross)
        parameters = [parameter for layer in layers for parameter in (*layer.maps, layer.bias)]
        is_plain = len(parameters) == 2 * len(self.cross) and not any(map(is_hooked, self.cross))
        if self.training and is_plain and is_fusible(first, parameters):
            fused: Tensor = CrossLayers.apply(first.contiguous(), *parameters)
            return fused
        x = first
        for layer in layers:
            x = layer(first, x)
        return x


class CrossLayer(nn.Module):
    """Cross layer: (x_0, x), each [b, D] -> x_0 o (W x + b) + x, o elementwise; if a rank is given, W = U V^T."""

    def __init__(self, width: int, rank: int | None, dtype: torch.dtype):
        super().__init__()
        if rank is None:
            self.maps = nn.ParameterList([uniform(width, width, inputs=width, dtype=dtype)])
        else:
            down, up = uniform(rank, width, inputs=width, dtype=dtype), uniform(width, rank, inputs=rank, dtype=dtype)
            self.maps = nn.ParameterList([down, up])
        self.bias = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        h = x
        for weight in self.maps:
            h = h @ weight.T
        return first * (h + self.bias) + x


class XDeepFM(FirstOrderTowerModel):
    """logit = sum_f w_f + <u, x> + <w_cin, p+> + MLP(concat of v_f, and x), equation 9; p+ of the :class:`CIN`.

    Its b is that of the tower's last layer. Numeric features are first-order and deep.

    Number of parameters for F fields and n numeric features. L(sizes) is the sum of (a + 1) b over neighbouring sizes
    a, b.

    - rows: dim + 1 for each id
    - u: n
    - tower: L([F dim + n, *hidden, 1])
    - CIN: sum over k of H_k (1 + H_{k-1} F), H_0 = F (section 3.2)
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
        """Return the axes of this network's parameters, as module ``cin`` of a model; ``features``: its fields."""
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
        # Only sums of the last layer are used, and products can be summed over columns before they are mapped: d times
        # fewer multiply-adds, and no [b, d, H F].
        sums = maps.transpose(1, 2) @ first  # [b, H, F]
        pooled.append(sums.flatten(1) @ last.T)
        return torch.cat(pooled, dim=1) @ self.output
