"""Specs of models as tests make them: from words, as a job does."""

from __future__ import annotations

from typing import Any

from trainer.spec.models.base import ModelSpec
from trainer.spec.models.registry import parse_model


def model_spec(kind: str, **fields: Any) -> ModelSpec:
    return parse_model({"kind": kind, **fields})


def table_columns(kind: str, table: str, dim: int) -> int:
    """Columns of a table where a job says ``embedding_dim: dim``."""
    return model_spec(kind, embedding_dim=dim).table_columns(table)
