"""Objective of a job's training step: the model's loss with the penalties of the job's ``regularizers``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.publishing.anchor import anchor_penalty
from trainer.publishing.frozen_context import FrozenRows, is_frozen
from trainer.spec import JobSpec
from trainer.spec.checks.regularizers import dropout_layers
from trainer.training.regularizers.draws import CounterDraws
from trainer.training.regularizers.dropout import DropoutObjective, Objective
from trainer.training.regularizers.laplacian import LaplacianPenalty
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
