"""Models with several labels: a score for each label, products of probabilities, a weighted sum of losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from trainer.models.base import Axes, ModelInputs, Position, pooled_rows, with_dense
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.mlp import tower_of
from trainer.models.layers.seeded_init import seeded
from trainer.models.losses import pointwise_loss
from trainer.spec.label_tasks import in_topological_order
from trainer.spec.models.several_labels import ESMMSpec, MMoESpec, PLESpec, SeveralLabelsSpec, SharedBottomSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    from trainer.data.batches.batch import Batch


class SeveralLabelsModel(ClickModel):
    """Base: a score for each label [b, labels], in the order of the dataset.

    A label that is conditional on another (``given``) has over all rows the probability sigmoid(z) = sigmoid(z_given)
    sigmoid(own score). The loss of a sample is sum_t weight_t share_t l_t(z_t, y_t), with share_t 0 if label t is
    absent.
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
        """Yield the names of the modules whose input is x, all vectors and numbers concatenated."""
        raise NotImplementedError

    def axes(self, numbers: Sequence[Position]) -> Axes:
        return self.making_vectors() | self.reading(self.inputs(numbers), *self.readers())

    def own_scores(self, x: Tensor) -> Sequence[Tensor]:
        """Return for each label its own score [b], before products with other labels, from inputs ``x`` [b, width]."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        scores = self.scores(batch)
        there = ~batch.labels.isnan()
        shares = there.to(scores.dtype) if batch.shares is None else batch.shares.to(scores.dtype)
        # Scores of absent labels are replaced by 0, so that they cannot make the sum infinite.
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
    """Gate over experts: (x [b, m], experts [b, n, d]) -> sum_i softmax(W x)_i expert_i [b, d].

    Ma et al., MMoE, KDD 2018, equations 5 to 7.
    """

    def __init__(self, inputs: int, experts: int, dtype: torch.dtype):
        super().__init__()
        self.linear = nn.Linear(inputs, experts, bias=False, dtype=torch.float32).to(dtype)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        return (self.linear(x).softmax(1).unsqueeze(2) * experts).sum(1)


def members(name: str, modules: Any) -> Iterator[str]:
    """Yield the names of the modules in a ModuleList that is the attribute ``name`` of a model."""
    return (f"{name}.{number}" for number in range(len(modules)))


def label_towers(spec: SeveralLabelsSpec, inputs: ModelInputs, sizes: Sequence[int], *, first: int) -> nn.ModuleList:
    """Return a tower for each label, [b, sizes[0]] -> [b, 1].

    ``first``: number of the first tower; initial weights depend on the number, so towers must have different numbers.
    """
    return nn.ModuleList(tower_of(spec, inputs, sizes, number=first + number) for number in range(len(inputs.tasks)))


def experts_of(spec: SeveralLabelsSpec, inputs: ModelInputs, width: int, count: int, *, first: int) -> nn.ModuleList:
    """Return ``count`` experts, [b, width] -> [b, hidden[-1]], whose layers are all hidden layers.

    ``first``: number of the first expert; initial weights depend on the number.
    """
    sizes = [width, *spec.hidden]
    return nn.ModuleList(tower_of(spec, inputs, sizes, number=first + number, logits=False) for number in range(count))


class SharedBottom(SeveralLabelsModel):
    """z_t = Tower_t(f(x)), x all vectors and numbers side by side, f the hidden layers of ``hidden``.

    Caruana, Multitask Learning, 1997, as Ma et al., MMoE, KDD 2018, figure 1a and equation 1, draw it.

    Number of parameters for F fields, n numeric features and T labels, with D = F dim + n. L(sizes) is the sum of
    (a + 1) b over neighbouring sizes a, b.

    - rows: dim for each id
    - shared layers: L([D, *hidden])
    - towers: T L([hidden[-1], *tower_hidden, 1])
    """

    def __init__(self, embeddings: nn.Module, spec: SharedBottomSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.bottom = tower_of(spec, inputs, [self.width, *spec.hidden], logits=False)
        self.towers = label_towers(spec, inputs, [spec.hidden[-1], *spec.tower_hidden, 1], first=1)

    def readers(self) -> Iterator[str]:
        yield "bottom"

    def own_scores(self, x: Tensor) -> Sequence[Tensor]:
        shared = self.bottom(x)
        return [tower(shared).squeeze(1) for tower in self.towers]


class MMoE(SeveralLabelsModel):
    """z_t = Tower_t(sum_i softmax(W_t x)_i f_i(x)), equations 5 to 7, x all vectors and numbers side by side.

    Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018. f_i are
    ``experts`` MLPs of sizes ``hidden``, without an output layer.

    Number of parameters for F fields, n numeric features and T labels, with D = F dim + n. L(sizes) is the sum of
    (a + 1) b over neighbouring sizes a, b.

    - rows: dim for each id
    - experts: ``experts`` L([D, *hidden])
    - gates: T ``experts`` D
    - towers: T L([hidden[-1], *tower_hidden, 1])
    """

    def __init__(self, embeddings: nn.Module, spec: MMoESpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.experts = experts_of(spec, inputs, self.width, spec.experts, first=0)
        with seeded(inputs.seed, "gates"):
            self.gates = nn.ModuleList(Gate(self.width, spec.experts, inputs.dtype) for _ in inputs.tasks)
        self.towers = label_towers(spec, inputs, [spec.hidden[-1], *spec.tower_hidden, 1], first=spec.experts)

    def readers(self) -> Iterator[str]:
        yield from members("experts", self.experts)
        yield from members("gates", self.gates)

    def own_scores(self, x: Tensor) -> Sequence[Tensor]:
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        pairs = zip(self.towers, self.gates, strict=True)
        return [tower(gate(x, experts)).squeeze(1) for tower, gate in pairs]


class PLE(SeveralLabelsModel):
    """z_t = Tower_t(g_t of the last level), levels of extraction over x, all vectors and numbers side by side.

    In each level g_t = sum_i softmax(W_t g_t')_i e_i over the ``label_experts`` of label t and the ``shared_experts``
    (equations 1 to 4), and in all levels but the last g_shared likewise over the experts of all labels and the shared
    ones (section 4.2); g' are those of the level before, x in the first. An expert of label t reads g_t', a shared one
    g_shared'. With one level it is the paper's CGC. Tang et al., Progressive Layered Extraction (PLE): A Novel
    Multi-Task Learning (MTL) Model for Personalized Recommendations, RecSys 2020.

    Number of parameters for T labels, e = ``label_experts`` and s = ``shared_experts``. D_l is the number of inputs of
    level l: F dim + n for the first level, hidden[-1] for later levels. L(sizes) is the sum of (a + 1) b over
    neighbouring sizes a, b.

    - rows: dim for each id
    - experts of level l: (T e + s) L([D_l, *hidden])
    - gates of the labels in level l: T (e + s) D_l
    - gate of the shared experts in level l, except in the last level: (T e + s) D_l
    - towers: T L([hidden[-1], *tower_hidden, 1])
    """

    def __init__(self, embeddings: nn.Module, spec: PLESpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.levels, first, width = nn.ModuleList(), 0, self.width
        for number in range(spec.levels):
            level = Level(spec, inputs, width, number=number, first=first)
            self.levels.append(level)
            first, width = first + level.num_experts, spec.hidden[-1]
        self.towers = label_towers(spec, inputs, [width, *spec.tower_hidden, 1], first=first)

    def readers(self) -> Iterator[str]:
        first: Any = self.levels[0]
        for number, experts in enumerate(first.own):
            yield from members(f"levels.0.own.{number}", experts)
        yield from members("levels.0.shared", first.shared)
        yield from members("levels.0.gates", first.gates)
        yield "levels.0.shared_gate"

    def own_scores(self, x: Tensor) -> Sequence[Tensor]:
        states, shared = [x] * len(self.tasks), x
        for level in self.levels:
            states, shared = level(states, shared)
        return [tower(state).squeeze(1) for tower, state in zip(self.towers, states, strict=True)]


class Level(nn.Module):
    """A level of PLE: (g_t of each label, g_shared), each [b, m] -> the next (g_t, g_shared), each [b, hidden[-1]].

    The last level has no gate for g_shared, and returns it unchanged.
    """

    def __init__(self, spec: PLESpec, inputs: ModelInputs, width: int, *, number: int, first: int):
        super().__init__()
        num_labels, own, shared = len(inputs.tasks), spec.label_experts, spec.shared_experts
        self.num_experts = num_labels * own + shared
        self.own = nn.ModuleList(
            experts_of(spec, inputs, width, own, first=first + label * own) for label in range(num_labels)
        )
        self.shared = experts_of(spec, inputs, width, shared, first=first + num_labels * own)
        with seeded(inputs.seed, f"gates {number}"):
            self.gates = nn.ModuleList(Gate(width, own + shared, inputs.dtype) for _ in range(num_labels))
            last = number + 1 == spec.levels
            self.shared_gate = None if last else Gate(width, self.num_experts, inputs.dtype)

    def forward(self, states: list[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        of_all = [expert(shared) for expert in self.shared]
        of_labels = [[expert(x) for expert in experts] for experts, x in zip(self.own, states, strict=True)]  # type: ignore[attr-defined]
        mixed = [
            gate(x, torch.stack([*own, *of_all], dim=1))
            for gate, x, own in zip(self.gates, states, of_labels, strict=True)
        ]
        if self.shared_gate is None:
            return mixed, shared
        everything = [output for own in of_labels for output in own] + of_all
        return mixed, self.shared_gate(shared, torch.stack(everything, dim=1))


class ESMM(SeveralLabelsModel):
    """z_t = MLP_t(x), x all vectors and numbers side by side, which all labels share.

    Ma et al., Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion Rate, SIGIR
    2018. With ``tasks: {buy: {given: click}}``: P(buy) = P(click) P(buy | click), equation 1, whose second factor is
    sigmoid(z_buy). The losses are those of click and of buy over all rows, equation 3, so that the tower of buy learns
    from rows without a click too.

    Number of parameters for F fields, n numeric features and T labels, with D = F dim + n. L(sizes) is the sum of
    (a + 1) b over neighbouring sizes a, b.

    - rows: dim for each id
    - towers: T L([D, *hidden, 1])
    """

    def __init__(self, embeddings: nn.Module, spec: ESMMSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.towers = label_towers(spec, inputs, [self.width, *spec.hidden, 1], first=0)

    def readers(self) -> Iterator[str]:
        return members("towers", self.towers)

    def own_scores(self, x: Tensor) -> Sequence[Tensor]:
        return [tower(x).squeeze(1) for tower in self.towers]
