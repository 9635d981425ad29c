"""DIN: the deep interest network (Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.models.base import Axes, ModelInputs, Position, RowColumn, mlp, with_dense
from trainer.models.ctr_base import ClickModel
from trainer.models.layers.batch_norm import BatchNorm
from trainer.models.layers.mlp import tower_of
from trainer.models.layers.seeded_init import seeded
from trainer.models.next_item import owners, sums_by_owner
from trainer.spec.models.din import DINSpec

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor


class DIN(ClickModel):
    """logit = MLP(concat over the features of their vectors, and x): the target determines how a history is pooled.

    v_U(A) = sum_j a(e_j, v_A) e_j over the rows e_j of the history, equation 3, with v_A the row of its target A. The
    weights a are not normalised, so that their sum tells the strength of the interest. a is an MLP of
    [e_j | v_A | e_j - v_A | e_j o v_A] with the activation of ``attention_activation``, ``dice`` by default
    (:class:`Dice`). A list that shares its table with no single id is pooled by its feature's ``pooling``.

    ``embeddings`` returns a row for each id (``is_sequence``), which attention needs; for a single id that row is its
    vector. The tower has ReLU like the towers of other models. Mini-batch aware regularization (section 5.1) is not
    implemented; use AdamAR for rows of rare ids.

    Number of parameters for F id features and n numeric features. L(sizes) is the sum of (p + 1) q over neighbouring
    sizes p, q.

    - rows: dim for each id
    - attention of each history: L([4 dim, *attention_hidden, 1]), and q more for each hidden layer with dice or prelu
    - tower: L([F dim + n, *hidden, 1])

    ``histories``: by list feature, the first feature of single ids with the same table, which is the list's target.
    ``poolings``: by list feature, ``sum`` or ``mean``.
    """

    is_sequence = True

    def __init__(self, embeddings: nn.Module, spec: DINSpec, inputs: ModelInputs):
        super().__init__(embeddings, spec, inputs)
        targets: dict[str, str] = {}
        for key in inputs.keys:
            if not key.is_list:
                targets.setdefault(key.table, key.name)
        lists = [key for key in inputs.keys if key.is_list]
        self.poolings = {key.name: key.pooling for key in lists}
        self.histories = {key.name: targets[key.table] for key in lists if key.table in targets}
        if not self.histories:
            raise ValueError("din needs a list of ids that shares the table of a single id, such as a history of items")
        # A prefix, because a feature may have the name of a method of ModuleDict, such as items or values.
        self.attention = nn.ModuleDict({f"of_{name}": _attention(spec, inputs, name) for name in self.histories})
        self.tower = tower_of(spec, inputs, [self.width, *spec.hidden, 1])

    def axes(self, numbers: Sequence[Position]) -> Axes:
        parts = [((), RowColumn((part, column))) for part in range(4) for column in range(self.dim)]
        return super().axes(numbers) | self.reading(parts, *(f"attention.{name}" for name in self.attention))

    def forward(self, features: KeyedJaggedTensor, dense: Tensor | None = None) -> Tensor:
        rows = self.embeddings(features)
        projected = {} if self.vector_fields is None or dense is None else self.vector_fields(dense)
        blocks = [projected[name] if name in projected else self._block(name, rows) for name in self.features]
        return self.tower(with_dense(torch.cat(blocks, dim=1), self.numbers(dense))).squeeze(1)

    def _block(self, name: str, rows: Any) -> Tensor:
        """Return the vector of a feature [b, dim]."""
        values: Tensor = rows[name].values()
        if name not in self.poolings:
            return values
        lengths = rows[name].lengths()
        owner = owners(lengths, values.shape[0])
        if name in self.histories:
            target = rows[self.histories[name]].values()[owner]
            seen = torch.cat([values, target, values - target, values * target], dim=1)
            values = self.attention[f"of_{name}"](seen) * values
        pooled = sums_by_owner(values, owner, lengths.shape[0])
        if name in self.histories or self.poolings[name] == "sum":
            return pooled
        return pooled / lengths.clamp(min=1)[:, None]


class Dice(nn.Module):
    """PReLU whose turning point follows the data: f(s) = p s + (1 - p) alpha s for s [n, width].

    p = sigmoid((s - E[s]) / sqrt(Var[s] + eps)), equation 4. The moments are taken over all rows of the global batch in
    training, and are running moments in evaluation (trainer.models.layers.batch_norm). alpha, one for each column,
    starts from 0 and is learned; eps is 1e-8.
    """

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.norm = BatchNorm(width, affine=False, eps=1e-8, dtype=dtype)
        self.alpha = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, s: Tensor) -> Tensor:
        p = torch.sigmoid(self.norm(s))
        return (p + (1.0 - p) * self.alpha) * s


def _attention(spec: DINSpec, inputs: ModelInputs, name: str) -> nn.Sequential:
    """Return the network a(e_j, v_A): [n, 4 dim] -> [n, 1]."""
    hidden, activation, dtype = spec.attention_hidden, spec.attention_activation, inputs.dtype
    with seeded(inputs.seed, f"attention {name}"):
        network = mlp([4 * spec.embedding_dim, *hidden, 1], seed=int(torch.randint(2**32, ())), dtype=dtype)
    layers: list[nn.Module] = []
    for layer in network:
        if not isinstance(layer, nn.ReLU) or activation == "relu":
            layers.append(layer)
        elif activation == "dice":
            layers.append(Dice(hidden[len(layers) // 2], dtype))
        else:
            layers.append(nn.PReLU(hidden[len(layers) // 2], dtype=dtype))
    return nn.Sequential(*layers)
