"""Shared bottom: hidden layers that all labels share, and a tower for each (Caruana, Multitask Learning, 1997)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from trainer.models.base import ModelInputs
from trainer.models.several_labels import SeveralLabelsModel, label_towers
from trainer.models.layers.mlp import tower_of
from trainer.spec.models.several_labels import SharedBottomSpec


class SharedBottom(SeveralLabelsModel):
    """z_t = Tower_t(f(x)), x all vectors and numbers side by side, f the layers of ``hidden``, all hidden ones.

    As Ma et al., MMoE, KDD 2018, figure 1a and equation 1, draw it. Parameters, D = F dim + n and T labels: dim for
    each id; the sum of (a + 1) b over neighbouring sizes of [D, *hidden], and T times that of
    [hidden[-1], *tower_hidden, 1].
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
