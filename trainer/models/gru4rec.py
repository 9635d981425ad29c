"""GRU4Rec: a recurrent network over a user's items.

Hidasi et al., Session-based Recommendations with Recurrent Neural Networks, ICLR 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.causal_sequence import Drop, EveryPositionModel
from trainer.models.layers.seeded_init import drawn


class GRU4Rec(EveryPositionModel):
    """score(i | s_1 .. s_t) = <M_i, h_t>, h the states of the last of ``gru_layers`` stacked GRUs over M_s.

    A GRU (section 3.1), x the row M_s or the state below, h_0 = 0, s the sigmoid:
        z_t = s(W_z x_t + U_z h_{t-1}), r_t = s(W_r x_t + U_r h_{t-1}),
        g_t = tanh(W x_t + r_t o (U h_{t-1})), h_t = (1 - z_t) h_{t-1} + z_t g_t,
    with biases after each W and U, and r_t after the product with U, as in torch.nn.GRU (whose z is 1 - z_t); the paper
    has U (r_t o h_{t-1}). Dropout is applied to the rows that are read and to the states that leave a layer, not to
    those that a layer passes to its own next step.

    loss: ``top1`` and ``bpr`` are the paper's (section 3.2.2), ``bce`` and ``sampled_softmax`` those of sasrec.
    Parameters: |I| d + layers (6 d^2 + 6 d), the paper's 6 d^2 for each layer with biases.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        features: Sequence[str],
        *,
        dim: int,
        hidden: Sequence[int] = (),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        length: int = 50,
        gru_layers: int = 1,
        dropout: float = 0.0,
        loss: str = "bce",
    ):
        super().__init__(embeddings, dim=dim, seed=seed, length=length, dropout=dropout, loss=loss)
        self._check("gru4rec", features)
        with drawn(seed, "gru"):
            self.layers = nn.ModuleList(nn.GRU(dim, dim, batch_first=True) for _ in range(gru_layers)).to(dtype)

    @staticmethod
    def settings(job: Any) -> dict[str, Any]:
        model = job.model
        return {
            "length": model.length, "gru_layers": model.gru_layers, "loss": model.loss,
            "dropout": job.regularizers.dropout,
        }  # fmt: skip

    def hidden(self, items: Tensor, positions: Tensor, drop: Drop) -> Tensor:
        x = drop(items, 0)
        for number, layer in enumerate(self.layers):
            x = drop(layer(x)[0], number + 1)
        return x
