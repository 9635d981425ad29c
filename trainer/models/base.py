"""What the loop asks of a model, and the parts that models share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn


class Batch(Protocol):
    """What a model reads of a batch (trainer.data): ``features`` (KeyedJaggedTensor) and ``labels`` [b] in {0, 1}."""

    @property
    def features(self) -> Any: ...

    @property
    def labels(self) -> Tensor: ...


class RankingModel(nn.Module):
    """Base of all models: pooled embeddings in, one number per sample out.

    ``embeddings`` maps a KeyedJaggedTensor to a KeyedTensor of pooled rows, one [b, dim] block per feature. It is built
    on the meta device and replaced by its sharded form, so a model touches it in :meth:`forward` alone.
    """

    embeddings: nn.Module
    targets: ClassVar[tuple[str, ...]] = ()
    """Features whose ids are what the loss is about, the label side of SSE; empty where that is a class, ``labels``."""

    def forward(self, features: Any) -> Tensor:
        """Scores (logits) [b]."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Per-sample losses [b]. The loop divides by the global count and sums."""
        raise NotImplementedError

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(logits [n], labels [n]) for AUC and logloss."""
        return self(batch.features), batch.labels

    @staticmethod
    def table_dim(table: str, dim: int) -> int:
        """Columns of an embedding table where the job says ``embedding_dim: dim``. The first ``dim`` are the vector."""
        return dim

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of everything outside the embedding tables, in a fixed order."""
        return [(name, p) for name, p in self.named_parameters() if not name.startswith("embeddings.")]


def mlp(sizes: Sequence[int], *, seed: int, dtype: torch.dtype) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between them, none after the last.

    Initial weights are torch's default, drawn from ``seed`` alone in float32 and then cast: the same on every rank and,
    up to rounding, in every dtype.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs, dtype=torch.float32), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def pooled_rows(pooled: Any, features: Sequence[str]) -> Tensor:
    """The named blocks of a KeyedTensor side by side, [b, sum of dims]; their order does not depend on the plan."""
    blocks = pooled.to_dict()
    return torch.cat([blocks[name] for name in features], dim=1)
