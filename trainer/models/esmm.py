"""ESMM: the entire space multi-task model.

Ma et al., Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion Rate, SIGIR 2018.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from trainer.models.base import ModelInputs
from trainer.models.several_labels import SeveralLabelsModel, label_towers, members
from trainer.spec.models.several_labels import ESMMSpec


class ESMM(SeveralLabelsModel):
    """z_t = MLP_t(x), x all vectors and numbers side by side, which all labels share.

    With ``tasks: {buy: {given: click}}``: P(buy) = P(click) P(buy | click), equation 1, of which the second factor is
    sigmoid(z_buy); the losses are of click and of buy over all rows, equation 3, so that what is bought is learned of
    rows without a click too. Parameters, D = F dim + n and T labels: dim for each id; T times the sum of (a + 1) b over
    neighbouring sizes of [D, *hidden, 1].
    """

    def __init__(self, embeddings: nn.Module, spec: ESMMSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.towers = label_towers(spec, inputs, [self.width, *spec.hidden, 1], first=0)

    def readers(self) -> Iterator[str]:
        return members("towers", self.towers)

    def own_scores(self, x: Tensor) -> Sequence[Tensor]:
        return [tower(x).squeeze(1) for tower in self.towers]
