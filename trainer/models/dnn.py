"""DNN: the plain deep CTR model. All pooled embeddings and numeric features side by side -> MLP -> logit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from trainer.models.base import ModelInputs, pooled_rows, with_dense
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.mlp import tower_of
from trainer.spec.models.dnn import DNNSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class DNN(ClickModel):
    """logit = MLP(concat of e_f over the features f, and x, the numeric ones), with hidden sizes ``hidden``.

    The loss is ``bce``, ``mse`` or ``focal``. The first layer absorbs any linear map of an item table, so the model's
    vectors are not published.
    """

    def __init__(self, embeddings: nn.Module, spec: DNNSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        self.tower = tower_of(spec, inputs, [self.width, *spec.hidden, 1])

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        rows = pooled_rows(self.lookup(features, dense), self.features)
        return self.tower(with_dense(rows, self.numbers(dense))).squeeze(1)
