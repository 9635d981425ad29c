"""How large the models of trainer/models are: columns of their tables, dense parameters, activations, multiply-adds.
The arithmetic of the papers, before anything is built. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.spec.checks.models import FIRST_ORDER_MODELS, PAIR_MODELS

if TYPE_CHECKING:
    from trainer.spec import Model

# Of a hidden layer of b units, what normalisation over the batch holds beside it: float64 input, difference, outcome.
_NORMALISED = 6


@dataclass(frozen=True)
class ModelSize:
    """The dense part of a model.

    ``parameters``; for each sample ``tower``, the widths of its layers, input and output among them, ``interaction``,
    the numbers that all other layers keep for backward, ``widest``, the most that one of them needs at once, and
    ``multiply_adds`` of a forward pass.
    """

    parameters: int = 0
    tower: int = 0
    interaction: int = 0
    widest: int = 0
    multiply_adds: int = 0

    def __add__(self, other: ModelSize) -> ModelSize:
        return ModelSize(
            self.parameters + other.parameters,
            self.tower + other.tower,
            self.interaction + other.interaction,
            max(self.widest, other.widest),
            self.multiply_adds + other.multiply_adds,
        )


def table_columns(model: Model, table: str) -> int:
    """Columns of a table, as ``table_dim`` of trainer.models has them: the vector, and beside it a first-order weight,
    a bias or item2vec's output vector."""
    dim = model.embedding_dim
    if model.kind == "item2vec":
        return 2 * dim
    if model.kind in FIRST_ORDER_MODELS or model.kind == "mf":
        return dim + 1
    return dim + 1 if model.kind == "bpr" and table == "item" else dim


def model_size(
    model: Model, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0
) -> ModelSize:
    """The dense part of ``model`` over so many features, ``num_dense`` numeric ones beside them.

    Args:
        num_lists, list_ids: for din, how many of the features are lists with a target, and their ids in an example.
    """
    kind, dim, width = model.kind, model.embedding_dim, num_features * model.embedding_dim + num_dense
    hidden = model.hidden
    if kind in PAIR_MODELS or kind == "item2vec":
        return ModelSize()
    if kind == "sasrec":
        return _sasrec(model, width)
    if kind == "gru4rec":
        return _gru4rec(model)
    if kind == "two_tower":
        return _tower(model, [width - dim, *hidden, dim]) + ModelSize(1, dim, 0, 0, dim)
    if kind == "fm":
        fields = width - num_dense + num_dense * dim
        return ModelSize(1 + num_dense + num_dense * dim, 0, fields + dim, fields, 2 * fields)
    if kind in FIRST_ORDER_MODELS:
        size = _tower(model, [width, *hidden, 1]) + ModelSize(parameters=num_dense)
        if kind == "deepfm":
            fields = num_features * dim
            size += ModelSize(interaction=fields + dim, widest=fields, multiply_adds=2 * fields)
        return size + _cin(model.cin_layers, num_features, dim) if kind == "xdeepfm" else size
    if kind == "dlrm":
        return _dlrm(model, num_features, num_dense)
    if kind == "dcnv2":
        return _dcnv2(model, width)
    if kind == "autoint":
        return _autoint(model, num_features, num_dense)
    if kind == "finalmlp":
        return _finalmlp(model, width)
    if kind == "wukong":
        return _wukong(model, num_features, num_dense)
    size = _tower(model, [width, *hidden, 1])
    return size + _attention(model, num_lists, list_ids) if kind == "din" else size


def layers(sizes: Sequence[int]) -> tuple[int, int]:
    """(parameters, multiply-adds) of linear layers with biases: sum of (a + 1) b, and of a b, over neighbours a, b."""
    pairs = list(itertools.pairwise(sizes))
    return sum((a + 1) * b for a, b in pairs), sum(a * b for a, b in pairs)


def _tower(model: Model, sizes: Sequence[int], *, logits: bool = True) -> ModelSize:
    """trainer.models.layers.mlp.tower of these sizes."""
    parameters, multiply_adds = layers(sizes)
    outputs = sizes[1:-1] if logits else sizes[1:]
    between = list(itertools.pairwise(sizes))[: len(outputs)]
    kept = 0
    if model.batch_norm:
        parameters += 2 * sum(outputs)
        kept += _NORMALISED * sum(outputs)
    if model.residual:
        shortcuts = sum(a * b for a, b in between if a != b)
        parameters, multiply_adds, kept = parameters + shortcuts, multiply_adds + shortcuts, kept + sum(outputs)
    return ModelSize(parameters, sum(sizes), kept, max(sizes), multiply_adds)


def _cin(maps: Sequence[int], num_fields: int, dim: int) -> ModelSize:
    """Of the last layer sums over columns alone (trainer.models.xdeepfm)."""
    size = ModelSize(parameters=sum(maps))
    *inner, last = itertools.pairwise([num_fields, *maps])
    for before, after in inner:
        products = before * num_fields
        size += ModelSize(
            after * products, 0, dim * (products + after), 2 * dim * (products + after), dim * after * products
        )
    before, after = last
    products = before * num_fields
    kept = products + after
    return size + ModelSize(after * products, 0, kept, 2 * kept + dim * before, (dim + after) * products)


def _dcnv2(model: Model, width: int) -> ModelSize:
    weights = width * width if model.low_rank is None else 2 * width * model.low_rank
    cross = ModelSize(weights + width, 0, 3 * width + (model.low_rank or 0), 3 * width, weights + width)
    size = ModelSize()
    for _ in range(model.cross_layers):
        size += cross
    if model.structure == "stacked":
        return size + _tower(model, [width, *model.hidden, 1])
    sizes = [width, *model.hidden]
    output = width + sizes[-1]
    return size + _tower(model, sizes, logits=False) + ModelSize(output + 1, 0, output, output, output)


def _dlrm(model: Model, num_features: int, num_dense: int) -> ModelSize:
    dim, vectors = model.embedding_dim, num_features + bool(num_dense)
    pairs = vectors * (vectors - 1) // 2
    square = vectors * vectors
    size = ModelSize(0, num_features * dim, square + vectors * dim, square, square * dim)
    if num_dense:
        size += _tower(model, [num_dense, *model.hidden, dim], logits=False)
    return size + _tower(model, [pairs + (dim if num_dense else 0), *model.hidden, 1])


def _wukong(model: Model, num_features: int, num_dense: int) -> ModelSize:
    dim, rank, outputs = model.embedding_dim, model.fm_rank, model.fm_vectors + model.linear_vectors
    vectors = num_features + bool(num_dense)
    size = ModelSize(tower=vectors * dim)
    if num_dense:
        parameters, multiply_adds = layers([num_dense, *model.hidden, dim])
        size += ModelSize(parameters, 0, num_dense + sum(model.hidden) + dim, 0, multiply_adds)
    for _ in range(model.interaction_layers):
        sizes = [vectors * rank, *model.fm_hidden, model.fm_vectors * dim]
        parameters, multiply_adds = layers(sizes)
        linear = model.linear_vectors * vectors + (outputs * vectors if outputs != vectors else 0)
        parameters += linear + vectors * rank + 2 * vectors * rank + 2 * dim
        kept = dim * rank + 2 * vectors * rank + sum(sizes) + 4 * outputs * dim
        size += ModelSize(parameters, 0, kept, kept, multiply_adds + (linear + 2 * vectors * rank) * dim)
        vectors = outputs
    return size + _tower(model, [vectors * dim, *model.hidden, 1])


def _autoint(model: Model, num_features: int, num_dense: int) -> ModelSize:
    fields, heads = num_features + num_dense, model.attention_heads
    width, units = model.embedding_dim, heads * model.attention_units
    size = ModelSize(parameters=num_dense * width, tower=fields * width)
    if model.hidden:
        size += _tower(model, [fields * width, *model.hidden, 1])
    for _ in range(model.attention_layers):
        # Four maps, what attention makes of them, and the weights of pairs.
        kept = fields * (width + 6 * units) + heads * fields * fields
        multiply_adds = 4 * fields * width * units + 2 * fields * fields * units
        size += ModelSize(4 * width * units, 0, kept, kept, multiply_adds)
        width = units
    return size + ModelSize(fields * units + (not model.hidden), 0, fields * units, 0, fields * units)


def _finalmlp(model: Model, width: int) -> ModelSize:
    dim, streams = model.embedding_dim, (model.hidden, model.second_hidden or model.hidden)
    size = ModelSize(tower=width)
    for told, hidden in zip((model.first_gate, model.second_gate), streams, strict=True):
        sizes = [max(1, len(told)) * dim, *model.gate_hidden, width]
        parameters, multiply_adds = layers(sizes)
        if told:
            size += ModelSize(parameters, 0, sum(sizes) + 2 * width, width, multiply_adds)
        else:
            # Once for a batch, not for each sample.
            size += ModelSize(parameters + dim)
        size += _tower(model, [width, *hidden], logits=False)
    first, second = streams[0][-1], streams[1][-1]
    products = first * second // model.fusion_heads
    return size + ModelSize(first + second + 1 + products, 0, 2 * (first + second), 0, first + second + products)


def _attention(model: Model, num_lists: int, list_ids: float) -> ModelSize:
    dim, units = model.embedding_dim, sum(model.attention_hidden)
    parameters, multiply_adds = layers([4 * dim, *model.attention_hidden, 1])
    if model.attention_activation != "relu":
        parameters += units
    # Of each id: its row, the target's, what both make, weighted; and the layers.
    kept = 8 * dim + units * (2 + (_NORMALISED if model.attention_activation == "dice" else 1))
    kept = int(list_ids * kept)
    return ModelSize(num_lists * parameters, 0, kept, kept, int(list_ids * multiply_adds))


def _sasrec(model: Model, width: int) -> ModelSize:
    dim = model.embedding_dim
    block = 3 * dim * dim + 2 * (dim * dim + dim) + 4 * dim
    sizes = [width, *model.hidden, 1]
    # Rough: what a tower of the same words would keep.
    return ModelSize(
        model.length * dim + model.blocks * block + 2 * dim, sum(sizes), 0, 0, model.length * model.blocks * block
    )


def _gru4rec(model: Model) -> ModelSize:
    dim, layers = model.embedding_dim, model.gru_layers
    # Of each position its row, and of each layer the gates, what they were made of, and the state.
    kept = model.length * dim * (2 + 9 * layers)
    return ModelSize(
        layers * (6 * dim * dim + 6 * dim), 0, kept, 3 * model.length * dim, model.length * layers * 6 * dim * dim
    )
