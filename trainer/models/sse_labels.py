"""SSE on labels: swaps with probability p_y, as ``sse.label`` of a job says.

Equation 1 of Wu et al., Stochastic Shared Embeddings, NeurIPS 2019, section 3.2, counts the output y_i among the
embeddings of a sample. The output depends on the model:

* a class (dnn, two_tower: ``targets`` is empty): its embedding is a fixed one-hot vector, and SSE-SE over two classes
  flips the label with probability p_y, in expectation label smoothing;
* ids of a table (bpr: the item that the user had, and the item that was drawn): they are swapped as input ids are, by
  the draws of their own features.

Only training has swapped labels, so its loss is that of the SSE objective (equation 2); metrics use true labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embeddings.kernels.swap import swap_classes
from embeddings.sse.config import SSEConfig
from trainer.data.prepare.sequences import TARGET
from trainer.models.registry import MODELS
from trainer.spec import JobSpec
from trainer.spec.label_tasks import LabelTask
from trainer.spec.models.sequences import SequenceSpec

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch


def target_configs(job: JobSpec) -> dict[str, SSEConfig]:
    """Return SSE's settings with p_y by feature, for a model whose outputs are ids of a table; {} for other models."""
    if not _probability(job):
        return {}
    config = SSEConfig(job.sse["label"].probability, include_unknown=job.sse["label"].include_unknown)
    targets = MODELS[job.model.kind].targets
    if isinstance(job.model, SequenceSpec) and job.model.compared_with != "own":
        # Shared negatives stand for all items: to swap one for another would change nothing.
        targets = (TARGET,)
    return dict.fromkeys(targets, config)


def with_swapped_classes(job: JobSpec, batch: Batch, step: int, tasks: Sequence[LabelTask] = ()) -> Batch:
    """Return the batch with its class labels after SSE-SE, by the counters of ``(seed, "label"; step, global sample)``.

    Without ``sse.label`` of the job, or for a model whose outputs are ids of a table, the batch is returned unchanged.
    ``batch``: a rank's slice, with ``labels`` [b] in {0, 1}. ``step``: the tables' step that is being computed, from 1.
    ``tasks``: the labels, if there are several; labels that are classes are swapped, with separate draws for each name.
    """
    probability = _probability(job)
    if not probability or MODELS[job.model.kind].targets:
        return batch
    draws: dict[str, Any] = {"seed": job.seed, "step": step, "sample_offset": batch.sample_offset}
    if not tasks:
        return dataclasses.replace(batch, labels=swap_classes(batch.labels, probability, **draws))
    labels = batch.labels.clone()
    for number, task in enumerate(tasks):
        if task.of_classes:
            # An absent label stays absent, whatever is drawn for it.
            there = ~labels[:, number].isnan()
            swapped = swap_classes(labels[:, number].nan_to_num(), probability, name=f"label/{task.name}", **draws)
            labels[:, number] = labels[:, number].where(~there, swapped)
    return dataclasses.replace(batch, labels=labels)


def _probability(job: JobSpec) -> float:
    return job.sse["label"].probability if "label" in job.sse else 0.0
