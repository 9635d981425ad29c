"""AutoInt: self-attention over fields.

Song et al., AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks, CIKM 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.ctr_base import ClickModel, NumericFields
from trainer.models.layers.mlp import PLAIN, TowerOptions, tower
from trainer.models.layers.seeded_init import drawn, uniform


class AutoInt(ClickModel):
    """logit = <w, concat of e_m^L> + MLP(concat of e_m), e^0 = e, and e^1 .. e^L by an :class:`InteractingLayer` each.

    The fields e_m are pooled rows, and x_j v_j for numeric features (equation 4). With ``hidden`` empty there is no
    MLP, and <w, ..> + b of equation 9 alone; with an MLP the model is AutoInt+ (section 5.5), whose b is that of the
    tower's last layer. Rows of zeros learn through the MLP, or beside a numeric feature: ReLU passes no gradient at 0.

    Parameters, M = F + n fields, k = heads times units: dim for each id; n dim; layers 4 dim k, and 4 k^2 after the
    first; M k for w; the tower sum of (a + 1) b over neighbouring sizes of [M dim, *hidden, 1], or 1 for b.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        features: Sequence[str],
        *,
        dim: int,
        hidden: Sequence[int],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        num_dense: int = 0,
        options: TowerOptions = PLAIN,
        attention_layers: int = 3,
        attention_heads: int = 2,
        attention_units: int = 32,
    ):
        super().__init__(embeddings, features, dim=dim, num_dense=num_dense)
        num_fields, width = len(self.features) + num_dense, attention_heads * attention_units
        self.numeric = NumericFields(num_dense, dim, seed=seed, dtype=dtype) if num_dense else None
        with drawn(seed, "attention"):
            self.attention = nn.ModuleList(
                InteractingLayer(width if number else dim, attention_heads, attention_units, dtype)
                for number in range(attention_layers)
            )
        sizes = [num_fields * dim, *hidden, 1]
        self.tower = tower(sizes, seed=seed, dtype=dtype, options=options) if hidden else None
        with drawn(seed, "output"):
            output = nn.Linear(num_fields * width, 1, bias=self.tower is None, dtype=torch.float32)
        self.output = output.to(dtype)

    @staticmethod
    def settings(job: Any) -> dict[str, Any]:
        model = job.model
        names = ("attention_layers", "attention_heads", "attention_units")
        return {**ClickModel.settings(job), **{name: getattr(model, name) for name in names}}

    def forward(self, features: Any, dense: Tensor | None = None) -> Tensor:
        fields = self.vectors(features)
        if self.numeric is not None and dense is not None:
            fields = torch.cat([fields, self.numeric(dense)], dim=1)
        x = fields
        for layer in self.attention:
            x = layer(x)
        logit = self.output(x.flatten(1))
        return (logit if self.tower is None else logit + self.tower(fields.flatten(1))).squeeze(1)


class InteractingLayer(nn.Module):
    """Multi-head self-attention over fields: e [b, M, d] -> [b, M, heads units], equations 5 to 8.

    The output is relu(concat over heads of sum_k a_mk W_V e_k, + W_R e_m), with a_m = softmax over k of
    <W_Q e_m, W_K e_k>, not divided by the root of the units.
    """

    def __init__(self, width: int, heads: int, units: int, dtype: torch.dtype):
        super().__init__()
        self.sizes = (4, heads, units)
        # Rows of W_Q, W_K, W_V, W_R, of each those of the first head first.
        self.maps = uniform(4 * heads * units, width, inputs=width, dtype=dtype)

    def forward(self, fields: Tensor) -> Tensor:
        parts = (fields @ self.maps.T).unflatten(2, self.sizes).permute(2, 0, 3, 1, 4)
        query, key, value, residual = parts.unbind(0)  # each [b, heads, M, units]
        # Written out: it is differentiated twice where regularizers of dropout ask for it.
        weights = (query @ key.transpose(2, 3)).softmax(3)
        return (weights @ value + residual).relu().transpose(1, 2).flatten(2)
