"""GRU4Rec: a recurrent network over a user's items.

Hidasi et al., Session-based Recommendations with Recurrent Neural Networks, ICLR 2016.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from trainer.models.base import Axes, Axis, ModelInputs, Position, RowColumn
from trainer.models.causal_sequence import CausalSequenceModel, Drop, at
from trainer.models.layers.seeded_init import seeded
from trainer.spec.models.sequences import GRU4RecSpec


class GRU4Rec(CausalSequenceModel):
    """score(i | s_1 .. s_t) = <M_i, h_t>, h the states of the last of ``gru_layers`` stacked GRUs over M_s.

    A GRU (section 3.1), x the row M_s or the state below, h_0 = 0, s the sigmoid:
        z_t = s(W_z x_t + U_z h_{t-1}), r_t = s(W_r x_t + U_r h_{t-1}),
        g_t = tanh(W x_t + r_t o (U h_{t-1})), h_t = (1 - z_t) h_{t-1} + z_t g_t,
    with biases after each W and U, and r_t after the product with U, as in torch.nn.GRU (whose z is 1 - z_t); the paper
    has U (r_t o h_{t-1}). Dropout is applied to the rows that are read and to the states that leave a layer, not to
    those that a layer passes to its own next step.

    loss: ``top1`` and ``bpr`` are the paper's (section 3.2.2), ``bce`` and ``sampled_softmax`` those of sasrec.
    Number of parameters: |I| d + layers (6 d^2 + 6 d). The paper has 6 d^2 for each layer, since it has no biases.
    """

    def __init__(self, embeddings: nn.Module, spec: GRU4RecSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        with seeded(inputs.seed, "gru"):
            layers = (nn.GRU(self.dim, self.dim, batch_first=True) for _ in range(spec.gru_layers))
            self.layers = nn.ModuleList(layers).to(inputs.dtype)

    def axes(self, numbers: Sequence[Position]) -> Axes:
        units = range(self.dim)
        gates = Axis(tuple(((), (gate, unit)) for gate in range(3) for unit in units), reads=False)
        found: Axes = {}
        for name, _ in self.layers.named_parameters():
            read = RowColumn if name.startswith("0.weight_ih") else int
            found[f"layers.{name}"] = {0: gates, 1: Axis(tuple(((), read(unit)) for unit in units))}
        return found

    def hidden(self, items: Tensor, positions: Tensor, drop: Drop, only: Tensor | None = None) -> Tensor:
        x = drop(items, 0)
        for number, layer in enumerate(self.layers):
            x = drop(layer(x)[0], number + 1)
        return x if only is None else at(x, only)
