"""PLE: progressive layered extraction, experts of each label beside shared ones.

Tang et al., Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for Personalized
Recommendations, RecSys 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.base import ModelInputs
from trainer.models.several_labels import Gate, SeveralLabelsModel, experts_of, label_towers, members
from trainer.models.layers.seeded_init import seeded
from trainer.spec.models.several_labels import PLESpec


class PLE(SeveralLabelsModel):
    """z_t = Tower_t(g_t of the last level), levels of extraction over x, all vectors and numbers side by side.

    In each level g_t = sum_i softmax(W_t g_t')_i e_i over the ``label_experts`` of label t and the ``shared_experts``
    (equations 1 to 4), and in all levels but the last g_shared likewise over the experts of all labels and the shared
    ones (section 4.2); g' are those of the level before, x in the first. An expert of label t reads g_t', a shared one
    g_shared'. With one level it is the paper's CGC.

    Parameters, D_1 = F dim + n and D_l = hidden[-1] in later levels, T labels, e = ``label_experts``, s =
    ``shared_experts``: dim for each id; for each level T e + s times the sum of (a + 1) b over neighbouring sizes of
    [D_l, *hidden], T (e + s) D_l for gates and, but in the last, (T e + s) D_l; T times the sum over
    [hidden[-1], *tower_hidden, 1].
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
    """A level of extraction: (g_t [b, m] of each label, g_shared [b, m]) -> the same of this level, [b, hidden[-1]].

    The last one has no gate of its own for what is shared, and gives back what it was given of it.
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
