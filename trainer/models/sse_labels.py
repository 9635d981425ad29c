"""The label side of SSE, p_y: ``sse.label`` of a job, by model.

Equation 1 of Wu et al., Stochastic Shared Embeddings, NeurIPS 2019, section 3.2, counts the output y_i among the
embeddings of a sample. What the output is, the model says:

* a class (dnn, two_tower: ``targets`` is empty): its embedding is a fixed one-hot vector, and SSE-SE over two classes
  flips the label with probability p_y, in expectation label smoothing;
* ids of a table (bpr: the item that the user had, and the one that was drawn): they are swapped as input ids are, by
  the draws of their own features.

Only training has swapped labels, so its loss is that of the SSE objective (equation 2); metrics use true labels.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from embeddings.kernels.swap import swap_classes
from embeddings.sse.config import SSEConfig
from trainer.models.registry import MODELS
from trainer.spec import JobSpec

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch


def target_configs(job: JobSpec) -> dict[str, SSEConfig]:
    """Return p_y by feature, for a model whose outputs are ids of a table; {} for others."""
    probability = _probability(job)
    return {feature: SSEConfig(probability) for feature in MODELS[job.model.kind].targets} if probability else {}


def with_swapped_classes(job: JobSpec, batch: Batch, step: int) -> Batch:
    """Return the batch with its class labels after SSE-SE, by the counters of ``(seed, "label"; step, global sample)``.

    Args:
        job: its ``seed`` and ``sse.label`` are read; without the latter, and for a model whose outputs are ids of a
            table, the batch is returned as it is.
        batch: a rank's slice; its ``labels`` [b] in {0, 1} and ``sample_offset``
            are read.
        step: the step being computed, 1, 2, ...: that of the tables.
    """
    probability = _probability(job)
    if not probability or MODELS[job.model.kind].targets:
        return batch
    labels = swap_classes(batch.labels, probability, seed=job.seed, step=step, sample_offset=batch.sample_offset)
    return dataclasses.replace(batch, labels=labels)


def _probability(job: JobSpec) -> float:
    return job.sse["label"].probability if "label" in job.sse else 0.0
