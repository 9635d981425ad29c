"""The interface between models and the training loop, and the parts that models share."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from trainer.data.batches.keys import Key
from trainer.data.columns.hashing import derive_key
from trainer.data.columns.vectors import Vector
from trainer.models.layers.fused import Stack
from trainer.models.losses import pointwise_loss
from trainer.spec.label_tasks import LabelTask
from trainer.spec.models.base import ModelSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor, KeyedTensor

    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData


@dataclass(frozen=True)
class ModelInputs:
    """Arguments for building a model, in addition to its spec.

    ``keys``: keys of its batches, in their order. ``num_dense``: number of numeric features that
    :meth:`RankingModel.forward` takes (``reads_numbers`` of its spec). ``num_item_numbers``: how many of these, at the
    end, are features of the item table. Both numbers include the columns of vectors with ``mode: as_given``.
    ``vectors``: the projected vectors; in a batch's ``dense`` their columns follow the numeric features.

    Initial values are a function of ``seed``, drawn in float32 and cast to ``dtype``. ``dropout``:
    ``regularizers.dropout`` of the job, for models that apply it themselves. ``tasks``: labels of the dataset, for
    models with several labels.
    """

    keys: tuple[Key, ...]
    num_dense: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    tasks: tuple[LabelTask, ...] = ()
    num_item_numbers: int = 0
    vectors: tuple[Vector, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the model's fields: the keys' names, followed by the projected vectors' names."""
        return (*(key.name for key in self.keys), *(one.name for one in self.vectors))


Position = tuple[tuple[str, ...], Hashable]
"""Name of a position along an axis of a parameter: (names of the features that it belongs to, column within them)."""


class RowColumn(NamedTuple):
    """A column of embedding vectors, as the column part of a :data:`Position`.

    On a warm start, a column that the parent's vectors did not have is zero in all rows and projections, so weights
    that multiply it may start as in a new model.
    """

    number: Hashable


class Axis(NamedTuple):
    """Names of the positions along an axis of a parameter.

    ``reads``: True if the positions are inputs of the parameter, False if they are outputs.
    """

    names: tuple[Position, ...]
    reads: bool = True


Axes = dict[str, dict[int, Axis]]
"""Names of positions by parameter and by number of the axis; axes that are not listed keep their order."""


class Blocks:
    """Stand-in for a KeyedTensor with the methods that models call: field -> block [b, columns]."""

    def __init__(self, blocks: Mapping[str, Any]):
        self._blocks = dict(blocks)

    def keys(self) -> list[str]:
        return list(self._blocks)

    def values(self) -> Tensor:
        return torch.cat(list(self._blocks.values()), dim=1)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._blocks)

    def __getitem__(self, name: str) -> Any:
        return self._blocks[name]


class VectorFields(nn.Module):
    """x_f [b, dim_f] -> W_f x_f + b_f [b, columns_f] for each vector f, which itself is not trained.

    A missing vector is zeros, and reads as b_f. Initial weights are torch's default for a linear layer, drawn from the
    seed and the vector's name.

    ``columns``: vector's name -> number of columns of its projection. The ``vectors`` of ``inputs`` are in the order of
    their columns in a batch's ``dense``.
    """

    def __init__(self, columns: Mapping[str, int], inputs: ModelInputs):
        super().__init__()
        self.vectors: tuple[Vector, ...] = inputs.vectors
        # Named with a prefix, because a feature may have the name of a method of ModuleDict, such as items or values.
        self.projections = nn.ModuleDict()
        for one in self.vectors:
            # A generator uses only the low 32 bits of its seed: they must depend on both the seed and the name.
            key = derive_key(inputs.seed, zlib.crc32(one.name.encode())) % 2**32
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(key)
                projection = nn.Linear(one.dim, columns[one.name], dtype=torch.float32)
            self.projections[f"of_{one.name}"] = projection.to(inputs.dtype)

    @property
    def num_columns(self) -> int:
        """Number of columns of a batch's ``dense`` that the vectors take."""
        return sum(one.dim for one in self.vectors)

    def forward(self, numbers: Tensor, vectors: Sequence[Vector] | None = None) -> dict[str, Tensor]:
        """Return {name: projection [b, columns]} of the vectors.

        ``vectors``: vectors to project; None: all vectors. ``numbers`` [b, n] must end with their columns.
        """
        chosen = self.vectors if vectors is None else vectors
        first = numbers.shape[1] - sum(one.dim for one in chosen)
        fields = {}
        for one in chosen:
            projection = self.projections[f"of_{one.name}"]
            assert isinstance(projection, nn.Linear)
            given = numbers[:, first : first + one.dim]
            fields[one.name] = projection(given.to(projection.weight.dtype))
            first += one.dim
        return fields


class RankingModel(nn.Module):
    """Base of all models: from pooled embedding rows to one score per sample (or one per sample and label).

    ``embeddings`` maps a KeyedJaggedTensor to a KeyedTensor of pooled rows, one [b, dim] block per feature. The module
    is built on the meta device and replaced by its sharded form, so a model uses it only in :meth:`forward`.
    """

    embeddings: nn.Module
    is_sequence: ClassVar[bool] = False
    """True if ``embeddings`` returns a row for each id (trainer.models.next_item), not a pooled row for each bag."""
    targets: ClassVar[tuple[str, ...]] = ()
    """Features whose ids are the targets of the loss (the label side of SSE); empty if the target is ``labels``."""
    reads_training_rows: ClassVar[bool] = False
    """True if scores depend on the training rows, which :meth:`begin` reads."""
    loss_kind: str = "bce"
    """Name of the job's loss (trainer.spec.losses.loss_of), for models that support several losses."""
    loss_settings: Mapping[str, float | None] = MappingProxyType({})
    """Keyword arguments of the loss, other than scores and labels (trainer.spec.losses.loss_settings_of)."""

    def __init__(self, embeddings: nn.Module, spec: ModelSpec, inputs: ModelInputs):
        super().__init__()
        self.embeddings = embeddings
        self.features = inputs.features
        self.dim, self.num_dense = spec.embedding_dim, inputs.num_dense
        self.vector_fields: VectorFields | None = None
        if inputs.vectors:
            columns = {one.name: spec.table_columns(one.name) for one in inputs.vectors}
            self.vector_fields = VectorFields(columns, inputs)

    @property
    def num_columns(self) -> int:
        """Number of columns of a batch's ``dense``: numeric features, followed by projected vectors."""
        return self.num_dense + (0 if self.vector_fields is None else self.vector_fields.num_columns)

    def lookup(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Any:
        """Return a block [b, columns] for each field: pooled rows of ids, and projections of the vectors in ``dense``.

        ``dense``: the batch's numbers [b, num_columns]; None if the model reads none.
        """
        pooled = self.embeddings(features)
        if self.vector_fields is None:
            return pooled
        assert dense is not None
        return Blocks({**pooled.to_dict(), **self.vector_fields(dense)})

    def numbers(self, dense: Tensor | None) -> Tensor | None:
        """Return the numeric features [b, num_dense] in a batch's ``dense`` [b, num_columns], None without any."""
        if dense is None or self.vector_fields is None:
            return dense
        return dense[:, : self.num_dense] if self.num_dense else None

    def forward(self, *inputs: Any, **keywords: Any) -> Tensor:
        """Return scores (logits) [b], or [b, labels] from a model with several labels.

        It is called as ``forward(features)``, or as ``forward(features, dense)`` by a model that reads numeric
        features or vectors, with the batch's ``dense`` [b, num_columns].
        """
        raise NotImplementedError

    def scores(self, batch: Batch) -> Tensor:
        """Return the scores of a batch's samples, as :meth:`forward` does."""
        return self(batch.features, batch.dense) if self.num_columns else self(batch.features)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of each sample [b]; the training loop sums them and divides by the global batch size."""
        raise NotImplementedError

    def label_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the losses [b] of ``scores`` [b] against the batch's labels, times the rows' weights if any."""
        losses = pointwise_loss(self.loss_kind, scores, batch.labels, **self.loss_settings)
        return losses if batch.shares is None else losses * batch.shares.to(losses.dtype)

    def evaluate(self, batch: Batch, catalogue: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the inputs of metrics (trainer.evaluation.evaluator): scores and labels of a batch, each [n, ...].

        ``catalogue``: the tensor that :meth:`catalogue` returned.
        """
        return self.scores(batch), batch.labels

    def user_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        """Return the user's factor of the score, [b, d]; only the user's features in ``features`` are not empty.

        ``dense`` [b, n]: the batch's numbers without those of the item table, if the model reads any. Implemented by
        models that rank all items for a user (their spec sets ``ranks_all_items``).
        """
        raise NotImplementedError

    def user_offsets(self, features: KeyedJaggedTensor) -> Tensor | None:
        """Return the term [b] that <user side, item side> lacks to the score; None: nothing is lacking."""
        return None

    def item_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        """Return the item's factor of the score, [b, d]; only the item's features in ``features`` are not empty.

        ``dense`` [b, n]: the numbers of the item table, if the model reads any.
        <user side, item side> is the score up to a term that is the same for all items of a user.
        """
        raise NotImplementedError

    def both_sides(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return :meth:`user_side` and :meth:`item_side` of a batch's rows, each [b, d]."""
        return self.user_side(batch.features), self.item_side(batch.features)

    def catalogue(self, data: PreparedData, device: torch.device | None = None) -> Tensor | None:
        """Return a tensor computed once that the evaluation of every batch reads; None if it reads none. Collective.

        ``device``: the model's device; None: the CPU.
        """
        return None

    def begin(self, data: PreparedData) -> None:
        """Set initial values that are computed from the data, such as a mean label.

        ``data`` is a trainer.data.batches.prepared.PreparedData.
        """

    def axes(self, numbers: Sequence[Position]) -> Axes:
        """Return the axes of dense parameters along which each position belongs to features.

        A warm start moves the parent's values to the positions of the same features in the job's model.

        ``numbers``: names of the numeric features, [num_dense].
        """
        return self.making_vectors()

    def making_vectors(self) -> Axes:
        """Return the axes of the projections of vectors; their outputs are named like columns of table rows."""
        found: Axes = {}
        for name, projection in () if self.vector_fields is None else self.vector_fields.projections.items():
            assert isinstance(projection, nn.Linear)
            of, columns = (name.removeprefix("of_"),), range(projection.out_features)
            # Columns that follow the vector in a row stay behind it.
            axis = Axis(tuple((of, RowColumn(divmod(column, self.dim))) for column in columns), reads=False)
            found |= {f"vector_fields.projections.{name}.{part}": {0: axis} for part in ("weight", "bias")}
        return found

    def reading(self, names: Iterable[Position], *modules: str) -> Axes:
        """Return the input axes of the first layers of ``modules``; ``names``: positions of their inputs, in order.

        Raises ValueError if such a layer has another number of inputs: a warm start would move weights to wrong inputs.
        """
        axis, found = Axis(tuple(names)), {}
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2 or not name.startswith(
                tuple(f"{module}.{part}." for module in modules for part in ("0", "linear"))
            ):
                continue
            if parameter.shape[1] != len(axis.names):
                raise ValueError(
                    f"{type(self).__name__}: {name} reads {parameter.shape[1]} inputs, but axes() names "
                    f"{len(axis.names)}: let axes() name each input, in order"
                )
            found[name] = {1: axis}
        return found

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) of everything outside the embedding tables, in a fixed order."""
        return [(name, p) for name, p in self.named_parameters() if not name.startswith("embeddings.")]


def columns_of(features: Iterable[str], count: int) -> list[Position]:
    """Return the names of all columns of the features' concatenated vectors, ``count`` for each feature."""
    return [((name,), RowColumn(column)) for name in features for column in range(count)]


def pairs_of(features: Sequence[str]) -> list[Position]:
    """Return the positions' names for the products of all pairs of features, in the order of torch.triu_indices."""
    return [((min(pair), max(pair)), 0) for pair in itertools.combinations(features, 2)]


def mlp(sizes: Sequence[int], *, seed: int, dtype: torch.dtype) -> nn.Sequential:
    """Return linear layers of the given sizes with ReLU between them, none after the last.

    Initial weights are torch's default, drawn from ``seed`` alone in float32 and then cast: the same on every rank and,
    up to rounding, in every dtype.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs, dtype=torch.float32), nn.ReLU()]
    return Stack(*layers[:-1]).to(dtype)


def with_values(features: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    """Return ``features`` with other ids or rows ``values``, in the same bags and with the same weights."""
    return type(features)(
        keys=features.keys(),
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        offsets=features.offsets(),
        stride=features.stride(),
    )


def with_dense(rows: Tensor, dense: Tensor | None) -> Tensor:
    """Return the input of a tower [b, m + n]: ``rows`` [b, m], followed by the numeric features ``dense`` [b, n]."""
    return rows if dense is None else torch.cat([rows, dense.to(rows.dtype)], dim=1)


def pooled_rows(pooled: KeyedTensor | Blocks, features: Sequence[str]) -> Tensor:
    """Return the blocks of ``features`` in a KeyedTensor concatenated in this order, [b, sum of dims].

    The order does not depend on the sharding plan.
    """
    if list(features) == pooled.keys():
        # They are contiguous already: splitting them would copy them and their gradient.
        values: Tensor = pooled.values()
        return values
    blocks = pooled.to_dict()
    return torch.cat([blocks[name] for name in features], dim=1)
