"""CTR models over unsharded tables in float64, on a small batch: single ids, a history, a list of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.support import models
from tests.support.model_specs import table_columns
from trainer.data.batches.keys import Key
from trainer.models.registry import MODELS

DIM, NUM_ROWS = 4, 8
KEYS = (
    Key("user", "user", False, "mean"),
    Key("item", "item", False, "mean"),
    Key("history", "item", True, "mean"),
    Key("tags", "tags", True, "sum"),
)
NAMES = tuple(key.name for key in KEYS)
LISTS = {
    "user": [[2], [3], [4], [3], [6]],
    "item": [[5], [2], [6], [5], [7]],
    "history": [[2, 3], [], [6], [4, 5, 2], [7, 7]],
    "tags": [[3], [2, 4], [], [7, 5], [6]],
}
LABELS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
NUM_DENSE = 3
DENSE = torch.linspace(-1.0, 1.5, len(LABELS) * NUM_DENSE, dtype=torch.float64).view(-1, NUM_DENSE)
SETTINGS: dict[str, dict[str, Any]] = {
    "xdeepfm": {"cin_layers": (5, 3)},
    "autoint": {"attention_layers": 2, "attention_heads": 2, "attention_units": 3},
    "finalmlp": {"gate_hidden": (4,)},
    "wukong": {"interaction_layers": 2, "fm_vectors": 3, "linear_vectors": 2, "fm_rank": 3, "fm_hidden": (5,)},
}
HIDDEN = (6, 3)


class Tables(nn.Module):
    """Rows of every table in float64 (TorchRec's own collections give float32 alone). Row 0 is padding."""

    def __init__(self, columns: int, *, pooled: bool, zero: bool):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.pooled = pooled
        self.no_samples = False
        self.weights = nn.ParameterDict(
            {
                name: torch.randn(NUM_ROWS, columns, generator=generator, dtype=torch.float64) * (0.0 if zero else 1.0)
                for name in ("user", "item", "tags")
            }
        )

    def rows(self, name: str) -> list[torch.Tensor]:
        """By sample, the rows of a feature [number of ids, columns]."""
        table = next(key.table for key in KEYS if key.name == name)
        return [self.weights[table][torch.tensor(ids, dtype=torch.int64)] for ids in LISTS[name]]

    def vector(self, name: str, sample: int) -> torch.Tensor:
        """The pooled row of a feature."""
        rows, key = self.rows(name)[sample], KEYS[NAMES.index(name)]
        total = rows.sum(0)
        return total / max(len(rows), 1) if key.is_list and key.pooling == "mean" else total

    def forward(self, features: KeyedJaggedTensor) -> Any:
        if self.no_samples:
            return self._nothing(features)
        size = features.stride()
        if not self.pooled:
            return {name: JaggedTensor(torch.cat(self.rows(name)), lengths=features[name].lengths()) for name in NAMES}
        blocks = [torch.stack([self.vector(name, sample) for sample in range(size)]) for name in NAMES]
        return KeyedTensor(list(NAMES), [block.shape[1] for block in blocks], torch.cat(blocks, dim=1))

    def _nothing(self, features: KeyedJaggedTensor) -> Any:
        empty = [self.weights[key.table][:0] for key in KEYS]
        if not self.pooled:
            lengths = torch.empty(0, dtype=torch.int64)
            return {name: JaggedTensor(part, lengths=lengths) for name, part in zip(NAMES, empty, strict=True)}
        return KeyedTensor(list(NAMES), [part.shape[1] for part in empty], torch.cat(empty, dim=1))


def make_batch(num_dense: int = 0) -> SimpleNamespace:
    features = KeyedJaggedTensor(
        keys=list(NAMES),
        values=torch.tensor([i for name in NAMES for ids in LISTS[name] for i in ids], dtype=torch.int64),
        lengths=torch.tensor([len(ids) for name in NAMES for ids in LISTS[name]], dtype=torch.int64),
    )
    return SimpleNamespace(features=features, labels=LABELS, dense=DENSE if num_dense else None, shares=None)


def make_model(
    kind: str,
    *,
    num_dense: int = 0,
    zero: bool = False,
    stir: bool = True,
    hidden: tuple[int, ...] = HIDDEN,
    **settings: Any,
) -> Any:
    """The model in float64, in evaluation mode. ``stir``: weights that start from 0 or 1 are moved."""
    tables = Tables(table_columns(kind, "item", DIM), pooled=not MODELS[kind].is_sequence, zero=zero)
    fields = {"embedding_dim": DIM, "hidden": hidden, **SETTINGS.get(kind, {}), **settings}
    model = models.make_model(kind, tables, KEYS, num_dense=num_dense, seed=3, **fields)
    if stir:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for _, parameter in model.dense_parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The functions above, for tests that take them as a fixture."""
    return SimpleNamespace(
        model=make_model, batch=make_batch, names=NAMES, keys=KEYS, lists=LISTS, labels=LABELS, dense=DENSE,
        num_dense=NUM_DENSE, dim=DIM, hidden=HIDDEN, settings=SETTINGS, tables=Tables,
    )  # fmt: skip
