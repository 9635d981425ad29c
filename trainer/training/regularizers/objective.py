"""Objective of a job's training step: the model's loss with the penalties of the job's ``regularizers``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from embeddings.kernels.swap import swap
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import TableConfig
from trainer.publishing.anchor import anchor_penalty
from trainer.publishing.frozen_context import FrozenRows, is_frozen
from trainer.spec import JobSpec
from trainer.spec.checks.regularizers import dropout_layers
from trainer.spec.regularizers import Laplacian
from trainer.training.regularizers.draws import CounterDraws
from trainer.training.regularizers.dropout import DropoutObjective, Objective
from trainer.training.regularizers.layers import hidden_layers
from trainer.training.regularizers.outputs import OUTPUT_LOSSES
from trainer.training.regularizers.rows import RowsOnce, rows_once

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData
    from trainer.models.base import RankingModel

JobObjective = Callable[["Batch", int], Objective]
"""Function ``objective(batch, step)`` for this rank's part of a batch; ``step`` counts the tables' steps from 1."""


def job_objective(job: JobSpec, model: RankingModel, data: PreparedData) -> JobObjective:
    """Return the objective of the job's ``model``, whose tables may be sharded.

    ``data`` is the job's prepared data. Random draws are functions of the job's seed, the step and the position of a
    sample in the global batch.
    """
    regularizers, dim = job.regularizers, job.model.embedding_dim
    settings = regularizers.laplacian
    laplacian = None if settings is None else LaplacianPenalty(settings, data, job.seed, dim)
    anchor = anchor_penalty(job, data)
    own_dropout = regularizers.dropout > 0 and not job.model.reads_sequences
    on_rows = own_dropout and dropout_layers(job) != "hidden"

    def smoothed(batch: Batch) -> Batch:
        s = regularizers.label_smoothing
        if not s:
            return batch
        labels = batch.labels * (1.0 - s) + s / 2.0
        if data.tasks:
            classes = torch.tensor([task.of_classes for task in data.tasks], device=labels.device)
            labels = labels.where(classes, batch.labels)
        return dataclasses.replace(batch, labels=labels)

    def plain(batch: Batch, step: int) -> Objective:
        loss = model.loss(smoothed(batch))
        return Objective(loss, loss)

    def regularized(batch: Batch, step: int) -> Objective:
        batch = smoothed(batch)
        with rows_once(model, dim, hooked=on_rows) as rows:
            if own_dropout:
                draws = CounterDraws(job.seed, step, batch.sample_offset)
                penalized = _dropout(job, model, rows)(lambda: model.loss(batch), draws)
            else:
                penalized = plain(batch, step)
            if regularizers.l2:
                penalized = penalized._replace(value=penalized.value + regularizers.l2 * rows.squares())
            if laplacian is not None:
                penalized = penalized._replace(value=penalized.value + laplacian(batch, rows, step))
            if anchor is not None:
                penalized = penalized._replace(value=penalized.value + anchor(batch, rows))
        return penalized

    objective = regularized if own_dropout or regularizers.l2 or (laplacian, anchor) != (None, None) else plain
    if not is_frozen(job, data):
        return objective
    frozen_rows = FrozenRows(job, data)

    def with_frozen_context(batch: Batch, step: int) -> Objective:
        with frozen_rows.frozen_in(model):
            return objective(batch, step)

    return with_frozen_context


def _dropout(job: JobSpec, model: nn.Module, rows: RowsOnce) -> DropoutObjective:
    where = dropout_layers(job)
    layers: list[nn.Module] = [rows.vectors] if where != "hidden" else []
    layers += hidden_layers(model) if where != "embeddings" else []
    method = job.regularizers.dropout_method
    output = OUTPUT_LOSSES[job.model.loss]() if method is not None and method.explicit == "output_hessian" else None
    return DropoutObjective(model, layers, job.regularizers.dropout, method, output)


class LaplacianPenalty:
    """Graph Laplacian regularization of rows, by sampled neighbours: strength |e_j - e_k|^2 on a job's samples.

    ``data`` has the graph; ``dim``: columns of the vector.

    The penalty tr(E^T L E) = 1/2 sum over edges |e_j - e_k|^2 pulls the rows of neighbours together (Cai et al. 2011;
    Rao et al. 2015, who solve it by alternating least squares). Wu et al., Stochastic Shared Embeddings, table 1,
    compare SSE-Graph with it. Here j is the row that a sample looks up, and k a neighbour of j drawn uniformly, like a
    random walk of one step (embeddings.sse), as a function of seed, step and sample. For n_j samples of j the expected
    sum is sum_j n_j / deg(j) sum_{k ~ j} |e_j - e_k|^2, so rows are pulled as often as they are trained. Gradients move
    both rows. Rows without neighbours, and columns after the vector (such as biases), are not penalized.
    """

    def __init__(self, settings: Laplacian, data: PreparedData, seed: int, dim: int):
        self._settings, self._seed, self._dim = settings, seed, dim
        table = next(key.table for key in data.keys if key.name == settings.feature)
        graph = data.graph(settings.graph)
        self._degrees = torch.from_numpy(graph.degrees.copy())
        # A separate name, so that the draws differ from SSE's draws.
        self._name = f"{settings.feature}~neighbour"
        self._table = TableConfig(table, data.tables[table].num_rows, dim, (self._name,))
        self._config = SSEConfig(1.0, graph, restart=1.0)

    def __call__(self, batch: Batch, rows: RowsOnce, step: int) -> Tensor:
        """Return the penalty of each sample [b]. Collective, because it looks neighbours up in sharded tables."""
        feature, features = self._settings.feature, batch.features
        ids = features[feature].values().cpu()
        drawn = swap(
            ids, torch.arange(len(ids) + 1), table=self._table, feature=self._name, config=self._config,
            seed=self._seed, step=step, sample_offset=batch.sample_offset,
        )  # fmt: skip
        has_one = self._degrees[ids] > 0
        keys = features.keys()
        lengths = torch.zeros(len(keys), len(ids), dtype=torch.int64)
        lengths[keys.index(feature)] = has_one
        neighbours = KeyedJaggedTensor(keys, drawn[has_one], lengths=lengths.flatten(), stride=len(ids))
        device = features.values().device
        own = rows.looked_up(features)[feature][:, : self._dim]
        other = rows.looked_up(neighbours.to(device))[feature][:, : self._dim]
        return self._settings.strength * (own - other).square().sum(1) * has_one.to(device)
