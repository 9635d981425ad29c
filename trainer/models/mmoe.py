"""MMoE: experts, mixed for each label by its own gate.

Ma et al., Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts, KDD 2018.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from trainer.models.base import ModelInputs
from trainer.models.several_labels import Gate, SeveralLabelsModel, experts_of, label_towers, members
from trainer.models.layers.seeded_init import seeded
from trainer.spec.models.several_labels import MMoESpec


class MMoE(SeveralLabelsModel):
    """z_t = Tower_t(sum_i softmax(W_t x)_i f_i(x)), equations 5 to 7, x all vectors and numbers side by side.

    f_i are ``experts`` of ``hidden`` layers, all hidden ones. Parameters, D = F dim + n and T labels: dim for each id;
    ``experts`` times the sum of (a + 1) b over neighbouring sizes of [D, *hidden]; T times ``experts`` D, and T times
    the sum over [hidden[-1], *tower_hidden, 1].
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
