"""Rows of a sample as parameters: what the kernel of training gives, differentiable twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD
from embeddings.tables.config import InitConfig, TableConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.keys import Key
from trainer.generalization.subject import SampledRows, merged

KEYS = (
    Key("item", "item", False, "mean"),
    Key("history", "item", True, "mean"),
    Key("tags", "tags", True, "sum"),
)
POOLING: Any = {"item": "sum", "history": "mean", "tags": "sum"}


def features(weighted: bool) -> KeyedJaggedTensor:
    """Three samples; empty bags, repeated ids, ids of both features in one table."""
    return KeyedJaggedTensor.from_lengths_sync(
        keys=[key.name for key in KEYS],
        values=torch.tensor([2, 5, 7, 5, 5, 6, 3, 2, 4, 4]),
        lengths=torch.tensor([1, 1, 1, 3, 0, 0, 2, 0, 2]),
        weights=torch.tensor([1, 1, 1, 0.5, 2, 3, 1, 4, 1, 1]) if weighted else None,
    )


def tables() -> EmbeddingTables:
    configs = [
        TableConfig("item", 9, 4, ("item", "history"), {"item": "sum", "history": "mean"}, InitConfig("normal", 1.0)),
        TableConfig("tags", 6, 4, ("tags",), {"tags": "sum"}, InitConfig("normal", 1.0)),
    ]
    return EmbeddingTables(configs, SGD(learning_rate=0.0)).eval()


@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_rows_are_those_of_the_kernel(weighted: bool) -> None:
    whole, asked = tables(), features(weighted)
    rows = SampledRows(KEYS, POOLING, [asked], SimpleNamespace(tables=whole), torch.float64)  # type: ignore[arg-type]
    found = rows(asked)
    theirs = whole(asked.values(), asked.offsets(), asked.weights_or_none())
    assert found.keys() == list(whole.features)
    assert torch.allclose(found.values().float(), theirs, atol=1e-6)
    assert {table: ids.tolist() for table, ids in rows.ids.items()} == {"item": [2, 5, 6, 7], "tags": [2, 3, 4]}


def test_rows_can_be_differentiated_twice() -> None:
    asked = features(True)
    rows = SampledRows(KEYS, POOLING, [asked], SimpleNamespace(tables=tables()), torch.float64)  # type: ignore[arg-type]

    def loss(item: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(rows, {"rows.item": item, "rows.tags": tags}, (asked,)).values().pow(3).sum()

    inputs = tuple(rows.rows[table].detach().clone().requires_grad_() for table in ("item", "tags"))
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


@pytest.mark.parametrize("weighted", [False, True])
def test_merged_batches_give_what_they_gave_one_after_the_other(weighted: bool) -> None:
    whole, asked = tables(), features(weighted)
    rows = SampledRows(KEYS, POOLING, [asked], SimpleNamespace(tables=whole), torch.float64)  # type: ignore[arg-type]
    batches = [
        Batch(asked, torch.tensor([0.0, 1.0, 0.0]), 0, 3, step, dense=torch.full((3, 2), float(step)))
        for step in (0, 1)
    ]
    one = merged(batches)
    assert len(one) == one.global_size == 6
    assert one.dense.tolist() == [[0.0, 0.0]] * 3 + [[1.0, 1.0]] * 3
    assert torch.equal(rows(one.features).values(), torch.cat([rows(asked).values()] * 2))
