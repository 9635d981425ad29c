"""Modules that users imported by another name, for one release."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("embeddings.align", "embeddings.refresh.procrustes", "procrustes"),
        ("embeddings.stability", "embeddings.refresh.gate_metrics", "compare"),
    ],
)
def test_an_old_name_warns_and_is_the_new_one(old: str, new: str, name: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=new):
        found = importlib.import_module(old)
    assert getattr(found, name) is getattr(importlib.import_module(new), name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("embeddings", "EmbeddingTables"),
        ("embeddings", "SSEConfig"),
        ("embeddings", "TableConfig"),
        ("embeddings.optim", "AdamAR"),
        ("embeddings.rff", "RandomFourierFeatures"),
        ("embeddings.sse", "StochasticSharedEmbedding"),
        ("embeddings.store", "open_store"),
        ("service.client", "Client"),
        ("trainer.spec", "parse_job"),
    ],
)
def test_names_that_users_rely_on_are_where_they_were(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(module).no_such_name
