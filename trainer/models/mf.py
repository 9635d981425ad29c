"""MF: matrix factorization, with biases or only with products.

With biases: Koren, Bell and Volinsky, Matrix Factorization Techniques for Recommender Systems, Computer 2009. Only
products: Mnih and Salakhutdinov, Probabilistic Matrix Factorization, NIPS 2007, to which Wu et al., Stochastic Shared
Embeddings, NeurIPS 2019, section 4.1, refer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.models.base import ModelInputs, RankingModel
from trainer.models.bpr import ITEM, USER
from trainer.spec.models.pairs import MFSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData


class MF(RankingModel):
    """r = mu + b_u + b_i + <p_u, q_i>, or without ``biases`` r = <p_u, q_i>.

    The loss is ``mse``: (r - y)^2, or ``bce``: binary cross-entropy with r the logit.

    Rows are [p_u | b_u] and [q_i | b_i]: both tables have ``dim + 1`` columns, the vector followed by the bias. ``mu``
    is the mean label of the training split (its log odds for ``bce``), a constant that checkpoints contain: a resumed
    job and a warm start keep it. There are no dense parameters. Without ``biases`` rows have ``dim + 1`` columns too,
    but the last column is not read, and ``mu`` is 0.

    Number of parameters: (dim + 1) (users + items); without ``biases`` only dim (users + items) of them are read.
    """

    mu: Tensor

    def __init__(self, embeddings: nn.Module, spec: MFSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        missing = {USER, ITEM} - set(self.features)
        if missing:
            raise ValueError(f"mf needs the features user and item: {sorted(missing)} missing")
        self.biases = spec.biases
        self.register_buffer("mu", torch.zeros((), dtype=inputs.dtype))

    def begin(self, data: PreparedData) -> None:
        if not self.biases:
            return
        labels = torch.from_numpy(data.labels("train").astype("float64"))
        if not len(labels):
            return
        mean = labels.mean()
        if data.is_weighted:
            weights = torch.from_numpy(data.row_weights("train").astype("float64"))
            mean = (labels * weights).sum() / weights.sum()
        # With labels of one class only, the log odds are infinite: count half an example of the other class.
        margin = 0.5 / len(labels)
        self.mu.copy_(torch.logit(mean.clamp(margin, 1.0 - margin)) if self.loss_kind == "bce" else mean)

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        blocks = self.embeddings(features).to_dict()
        user, item = blocks[USER], blocks[ITEM]
        products = (user[:, : self.dim] * item[:, : self.dim]).sum(1)
        return self.mu + user[:, self.dim] + item[:, self.dim] + products if self.biases else products

    def user_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        user = self.embeddings(features).to_dict()[USER]
        of_item = torch.ones_like(user[:, :1]) if self.biases else torch.zeros_like(user[:, :1])
        return torch.cat([user[:, : self.dim], of_item], dim=1)

    def user_offsets(self, features: KeyedJaggedTensor) -> Tensor | None:
        if not self.biases:
            return None
        row: Tensor = self.embeddings(features).to_dict()[USER]
        return self.mu + row[:, self.dim]

    def item_side(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        row: Tensor = self.embeddings(features).to_dict()[ITEM]
        return row

    def loss(self, batch: Batch) -> Tensor:
        return self.label_losses(self(batch.features), batch)
