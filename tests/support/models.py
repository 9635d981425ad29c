"""Modules of models as tests make them: from words, as a job does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.support.model_specs import model_spec
from trainer.data.batches.keys import Key
from trainer.models.base import ModelInputs
from trainer.models.registry import MODELS


def make_model(
    kind: str,
    embeddings: nn.Module,
    keys: Sequence[Key | str],
    *,
    num_dense: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    **fields: Any,
) -> Any:
    """The module of a kind with these fields of its spec. A key that is a name is a single id with its own table."""
    described = tuple(Key(key, key, False, "mean") if isinstance(key, str) else key for key in keys)
    return MODELS[kind](embeddings, model_spec(kind, **fields), ModelInputs(described, num_dense, seed, dtype, dropout))
