"""What the loop asks of a model, and the parts that models share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from trainer.metrics import auc, logloss


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
    is_sequence: ClassVar[bool] = False
    """Whether ``embeddings`` gives a row for each id (trainer.models.next_item), not one for each bag."""
    targets: ClassVar[tuple[str, ...]] = ()
    """Features whose ids are what the loss is about, the label side of SSE; empty where that is a class, ``labels``."""

    def forward(self, features: Any) -> Tensor:
        """Scores (logits) [b]."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Per-sample losses [b]. The loop divides by the global count and sums."""
        raise NotImplementedError

    def evaluate(self, batch: Batch, catalogue: Tensor | None = None) -> tuple[Tensor, ...]:
        """What :meth:`metrics` takes of a batch, each [n]: logits and labels. ``catalogue`` is that of the model."""
        return self(batch.features), batch.labels

    def catalogue(self, data: Any) -> Tensor | None:
        """What the evaluation of every batch needs, once before it; None for nothing. Collective."""
        return None

    @staticmethod
    def metrics(*arrays: Any) -> dict[str, float]:
        """Metrics by name of what :meth:`evaluate` gave for a whole split, float64 arrays [n]; NaN without a value."""
        logits, labels = arrays
        return {"auc": auc(logits, labels), "logloss": logloss(logits, labels)}

    @staticmethod
    def settings(job: Any) -> dict[str, Any]:
        """Keywords that this model takes beyond the common ones, from the job (trainer.spec.JobSpec)."""
        return {}

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
    if list(features) == pooled.keys():
        # They are side by side already: taking them apart would copy them, and their gradient.
        values: Tensor = pooled.values()
        return values
    blocks = pooled.to_dict()
    return torch.cat([blocks[name] for name in features], dim=1)
