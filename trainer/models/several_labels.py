"""The common part of the models of several labels: a score for each, products of probabilities, the sum of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from trainer.models.base import Axes, ModelInputs, Position, pooled_rows, with_dense
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.mlp import tower_of
from trainer.models.losses import pointwise_loss
from trainer.spec.label_tasks import in_topological_order
from trainer.spec.models.several_labels import SeveralLabelsSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    from trainer.data.batches.batch import Batch


class SeveralLabelsModel(ClickModel):
    """Base: a score for each label [b, labels], in the order of the dataset.

    A label that is ``given`` another has the probability sigmoid(z) = sigmoid(z_given) sigmoid(own score), over all
    rows. The loss of a sample is sum_t weight_t share_t l_t(z_t, y_t), the share being 0 where the label is absent.
    """

    def __init__(self, embeddings: nn.Module, spec: SeveralLabelsSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        if not inputs.tasks:
            raise ValueError(f"{spec.kind} learns several labels: give labels of the dataset")
        self.tasks = inputs.tasks
        places = {task.name: number for number, task in enumerate(self.tasks)}
        given = {name: task.given for name, task in spec.tasks.items()}
        self.given = [(places[name], places[other]) for name, other in in_topological_order(given, places)]

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        x = with_dense(pooled_rows(self.lookup(features, dense), self.features), self.numbers(dense))
        scores = list(self.own_scores(x))
        for number, given in self.given:
            scores[number] = product_logit(scores[given], scores[number])
        return torch.stack(scores, dim=1)

    def readers(self) -> Iterator[str]:
        """Yield the names of the modules that read x."""
        raise NotImplementedError

    def axes(self, numbers: Sequence[Position]) -> Axes:
        return self.making_vectors() | self.reading(self.inputs(numbers), *self.readers())

    def own_scores(self, x: Tensor) -> Sequence[Tensor]:
        """Return for each label its own score [b] of rows and numbers side by side [b, width]."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        scores = self.scores(batch)
        there = ~batch.labels.isnan()
        shares = there.to(scores.dtype) if batch.shares is None else batch.shares.to(scores.dtype)
        # A score that no label is compared with is taken for 0: whatever it is, it must not make the sum infinite.
        counted, labels = shares > 0, batch.labels.nan_to_num()
        total = scores.new_zeros(len(scores))
        for number, task in enumerate(self.tasks):
            own = scores[:, number].where(counted[:, number], scores.new_zeros(()))
            losses = pointwise_loss(task.loss, own, labels[:, number], **task.settings)
            total = total + task.weight * shares[:, number] * losses
        return total


def product_logit(first: Tensor, second: Tensor) -> Tensor:
    """Return z with sigmoid(z) = sigmoid(first) sigmoid(second), without a logarithm of 0.

    z = b - log(1 + (1 + e^b) e^-a) for scores a and b, as 1 - p q = ((1 + e^-a) (1 + e^-b) - 1) p q.
    """
    return second - softplus(softplus(second) - first)


class Gate(nn.Module):
    """(x [b, m], experts [b, n, d]) -> sum_i softmax(W x)_i expert_i [b, d] (Ma et al. 2018, equations 5 to 7)."""

    def __init__(self, inputs: int, experts: int, dtype: torch.dtype):
        super().__init__()
        self.linear = nn.Linear(inputs, experts, bias=False, dtype=torch.float32).to(dtype)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        return (self.linear(x).softmax(1).unsqueeze(2) * experts).sum(1)


def members(name: str, modules: Any) -> Iterator[str]:
    """Yield the names of the modules of a list."""
    return (f"{name}.{number}" for number in range(len(modules)))


def label_towers(spec: SeveralLabelsSpec, inputs: ModelInputs, sizes: Sequence[int], *, first: int) -> nn.ModuleList:
    """Return a tower for each label, [b, sizes[0]] -> [b, 1]; ``first`` tells them apart from other towers."""
    return nn.ModuleList(tower_of(spec, inputs, sizes, number=first + number) for number in range(len(inputs.tasks)))


def experts_of(spec: SeveralLabelsSpec, inputs: ModelInputs, width: int, count: int, *, first: int) -> nn.ModuleList:
    """Return so many experts, [b, width] -> [b, hidden[-1]], all of whose layers are hidden ones."""
    sizes = [width, *spec.hidden]
    return nn.ModuleList(tower_of(spec, inputs, sizes, number=first + number, logits=False) for number in range(count))
