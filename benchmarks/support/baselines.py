"""Peers in plain torch, with the model interface that the training loop uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.gathered import gather_table
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import table_configs
from trainer.distributed.sharded_model import ShardedModel
from trainer.models.base import ModelInputs
from trainer.models.registry import MODELS
from trainer.spec import JobSpec


class _Pooled(nn.Module):
    """torch.nn.EmbeddingBag for each feature, tables shared as in the job; output like TorchRec's collection."""

    def __init__(self, weights: Mapping[str, Tensor], features: Mapping[str, tuple[str, str]], *, trainable: bool):
        """Build the tables; ``features`` is (table, pooling) by feature.

        Row 0 is padding: it contributes zero and has no gradient.
        """
        super().__init__()
        self.rows = nn.ParameterDict(
            {name: nn.Parameter(w.clone(), requires_grad=trainable) for name, w in weights.items()}
        )
        self._features = dict(features)

    def forward(self, features: Any) -> _Blocks:
        blocks = {}
        for name, (table, pooling) in self._features.items():
            bag = features[name]
            blocks[name] = nn.functional.embedding_bag(
                bag.values(), self.rows[table], bag.offsets()[:-1], mode=pooling, padding_idx=0
            )
        return _Blocks(blocks)


class _Blocks:
    def __init__(self, blocks: dict[str, Tensor]):
        self._blocks = blocks

    def keys(self) -> list[str]:
        return list(self._blocks)

    def values(self) -> Tensor:
        return torch.cat(list(self._blocks.values()), dim=1)

    def to_dict(self) -> dict[str, Tensor]:
        return self._blocks


class TorchModel:
    """A model in one process whose embeddings are trained by torch.optim.Adam on dense gradients, or are frozen.

    The class has the methods of trainer.distributed.sharded_model.ShardedModel that a training loop on one rank uses.
    """

    def __init__(self, module: nn.Module, embeddings: _Pooled, job: JobSpec):
        self.module = module
        self._embeddings = embeddings
        trainable = [row for row in embeddings.rows.values() if row.requires_grad]
        spec = job.optimizer
        self._optimizer = (
            torch.optim.Adam(trainable, spec.learning_rate, (spec.beta1, spec.beta2), spec.eps, fused=True)
            if trainable
            else None
        )

    @classmethod
    def like(cls, job: JobSpec, data: PreparedData, model: ShardedModel, *, frozen_std: float | None) -> TorchModel:
        """Return the model with the initial values of ``model``, or with rows frozen at normal(0, frozen_std)."""
        configs = table_configs(job, data)
        weights = {}
        generator = torch.Generator().manual_seed(job.seed)
        for config in configs:
            gathered = gather_table(model, config.name)
            assert gathered is not None
            weights[config.name] = gathered.rows
            if frozen_std is not None:
                weights[config.name] = frozen_std * torch.randn(gathered.rows.shape, generator=generator)
        pooling = {
            feature: (config.name, pooling)
            for config in configs
            for feature, pooling in zip(config.features, tuple(config.pooling), strict=True)
        }
        embeddings = _Pooled(weights, pooling, trainable=frozen_std is None)
        module = MODELS[job.model.kind](embeddings, job.model, ModelInputs(tuple(data.keys), seed=job.seed))
        return cls(module, embeddings, job)

    @property
    def tables(self) -> Mapping[str, Any]:
        return dict(self._embeddings.rows.items())

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if not name.startswith("embeddings.")]

    def train(self, mode: bool = True) -> TorchModel:
        self.module.train(mode)
        return self

    def eval(self) -> TorchModel:
        return self.train(False)

    def set_context(self, step: int, sample_offset: int, global_size: int, part_offset: int = 0) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def all_reduce_gradients(self) -> None:
        """Do nothing: with one process there is nothing to sum."""

    def non_finite_tables(self) -> list[str]:
        return []

    def gradient_squared_norm(self) -> float:
        found = [rows.grad for rows in self.tables.values() if rows.grad is not None]
        return sum(float((grad.coalesce().values() if grad.is_sparse else grad).square().sum()) for grad in found)

    def step_tables(self, k: int, scale: float = 1.0) -> None:
        assert scale == 1.0, "the peers do not clip"
        if self._optimizer is not None:
            self._optimizer.step()

    def discard(self) -> None:
        """Do nothing: gradients are reset before the next step."""
