"""Checks for regularizers that have no meaning for a job; each problem has a remedy. Torch-free.

A part of trainer.spec.checks.supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.spec.losses import LOSSES, loss_of
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec


def regularizer_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield ``regularizers`` that the job's model, optimizer or kernel cannot use."""
    yield from _dropout_problems(spec)
    yield from _method_problems(spec)
    regularizers, kind, sequence = spec.regularizers, spec.model.kind, spec.model.reads_sequences
    if regularizers.label_smoothing and (sequence or not LOSSES[loss_of(spec)].of_classes):
        yield FieldProblem("regularizers.label_smoothing", f"{kind} has no class labels to smooth here", "leave it 0")
    if spec.dense_optimizer.weight_decay and not spec.model.has_dense_parameters:
        yield FieldProblem(
            "dense_optimizer.weight_decay", f"{kind} has no dense parameters", "use regularizers.l2, or leave it 0"
        )
    if regularizers.meda:
        if spec.init_from is not None:
            yield FieldProblem(
                "regularizers.meda", "a warm start's rows would be dropped at its second epoch", "leave one of them out"
            )
        if spec.optimizer.decay == "by_epoch":
            yield FieldProblem(
                "regularizers.meda",
                "optimizer.decay by_epoch begins with the second epoch, which rows that are reset never reach",
                "leave one of them out",
            )
        if spec.optimizer.schedule.kind != "constant":
            yield FieldProblem(
                "regularizers.meda",
                "the row optimizer restarts at each epoch, and its schedule would restart too",
                "use a constant one",
            )
    if regularizers.sam is not None:
        yield from _sam_problems(spec)
    if regularizers.early_stopping is not None and not has_validation(spec):
        yield FieldProblem(
            "regularizers.early_stopping", "there is no validation split to watch", "set evaluation.split.validation"
        )
    laplacian = regularizers.laplacian
    if laplacian is not None:
        if not spec.model.has_distances:
            yield FieldProblem("regularizers.laplacian", f"distances between rows of {kind} have no meaning")
        if laplacian.feature in spec.sse and spec.sse[laplacian.feature].probability:
            yield FieldProblem(
                "regularizers.laplacian.feature",
                f"sse would swap the neighbours of '{laplacian.feature}' too",
                "use one of them",
            )


def regularizer_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    laplacian = job.regularizers.laplacian
    if laplacian is None:
        return
    if laplacian.feature not in dataset.features:
        there = ", ".join(sorted(dataset.features))
        yield FieldProblem(
            "regularizers.laplacian.feature", f"no such feature '{laplacian.feature}' (there are {there})"
        )
    elif dataset.features[laplacian.feature].type != "id":
        yield FieldProblem(
            "regularizers.laplacian.feature", f"'{laplacian.feature}' has no single ids", "use one of type id"
        )
    elif laplacian.feature not in (looked_up := job.model.looked_up(dataset)):
        yield FieldProblem(
            "regularizers.laplacian.feature",
            f"{job.model.kind} looks up no rows of '{laplacian.feature}'",
            f"use {' or '.join(looked_up)}",
        )
    elif laplacian.graph not in dataset.graphs:
        there = ", ".join(sorted(dataset.graphs)) or "none"
        yield FieldProblem(
            "regularizers.laplacian.graph", f"dataset '{dataset.name}' has no '{laplacian.graph}' (there are {there})"
        )
    else:
        table, of = (dataset.features[n].shares or n for n in (laplacian.feature, dataset.graphs[laplacian.graph].of))
        if table != of:
            yield FieldProblem(
                "regularizers.laplacian.graph",
                f"graph '{laplacian.graph}' belongs to table '{of}', the feature reads table '{table}'",
                f"name a graph whose of is '{table}'",
            )


def has_validation(spec: JobSpec) -> bool:
    """Return True if the job has a validation split."""
    return spec.evaluation.split.validation > 0


def has_hidden_layers(spec: JobSpec) -> bool:
    """Return True if the job's model has a tower with at least one hidden layer."""
    return spec.model.num_hidden > 0


def dropout_layers(spec: JobSpec) -> str:
    """Return the layers with dropout: ``hidden``, ``embeddings`` or ``both``."""
    return spec.regularizers.dropout_layers or ("hidden" if has_hidden_layers(spec) else "embeddings")


def _dropout_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    regularizers, kind = spec.regularizers, spec.model.kind
    if regularizers.dropout and spec.model.reads_sequences and not spec.model.has_dense_parameters:
        yield FieldProblem("regularizers.dropout", f"it is not available yet for {kind}", "leave it 0")
    if regularizers.dropout and spec.model.keeps_rows_of_lists and dropout_layers(spec) != "hidden":
        yield FieldProblem(
            "regularizers.dropout_layers", f"{kind} pools its rows by itself", "use hidden layers, or leave dropout 0"
        )
    if regularizers.dropout_layers is None:
        return
    if not regularizers.dropout:
        yield FieldProblem("regularizers.dropout_layers", "there is no dropout", "set dropout, or leave it out")
    elif spec.model.reads_sequences:
        yield FieldProblem("regularizers.dropout_layers", f"{kind} has its own positions for dropout", "leave it out")
    elif regularizers.dropout_layers != "embeddings" and not has_hidden_layers(spec):
        yield FieldProblem(
            "regularizers.dropout_layers", f"{kind} has no hidden layers here", "use embeddings, or leave it out"
        )


def _method_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    method, kind = spec.regularizers.dropout_method, spec.model.kind
    if method == type(method)():
        return
    where = "regularizers.dropout_method"
    if not spec.regularizers.dropout:
        yield FieldProblem(
            where, "there is no dropout", "set dropout to the probability that it stands for, or leave it out"
        )
    if spec.model.reads_sequences:
        yield FieldProblem(where, f"it is not available yet for {kind}", "leave it out")
    if spec.model.mixes_batch:
        yield FieldProblem(where, "it needs separate samples, which batch_norm mixes", "leave one of them out")
    if spec.model.loss == "sampled_softmax":
        yield FieldProblem(
            where, "it needs separate samples, but sampled_softmax takes others as negatives", "use loss bce"
        )
    if method.masks and method.explicit != "none":
        yield FieldProblem(f"{where}.explicit", "masks have this effect already", "set masks to 0, or leave it out")
    if method.masks == 1 and method.noise != "none":
        yield FieldProblem(
            f"{where}.noise", "one mask already has all of the noise", "set masks to 0 or more than 1, or leave it out"
        )
    if not method.masks and method.explicit == "none" and method.noise == "none":
        yield FieldProblem(
            f"{where}.masks",
            "without masks, explicit and noise no dropout is left",
            "set explicit or noise, or masks to 1",
        )
    if method.explicit == "none" and (method.explicit_strength is not None or method.coefficient != "published"):
        yield FieldProblem(
            f"{where}.explicit_strength", "there is no explicit regularizer", "set explicit, or leave it out"
        )
    if method.noise == "none" and method.noise_strength is not None:
        yield FieldProblem(f"{where}.noise_strength", "there is no noise", "set noise, or leave it out")
    if method.label_samples is not None and method.explicit != "output_hessian":
        yield FieldProblem(f"{where}.label_samples", "only output_hessian draws labels", "leave it out")
    if method.sign_samples is not None and method.explicit != "identity":
        yield FieldProblem(f"{where}.sign_samples", "only identity draws signs", "leave it out")
    if method.explicit in ("output_hessian", "identity") and (spec.model.draws_partner or spec.model.reads_labels):
        outputs = "several" if spec.model.reads_labels else "two"
        yield FieldProblem(f"{where}.explicit", f"the loss of {kind} depends on {outputs} outputs", "use loss_jacobian")
    if method.explicit == "output_hessian" and not (
        spec.model.draws_partner or LOSSES[loss_of(spec)].has_output_hessian
    ):
        yield FieldProblem(
            f"{where}.explicit",
            f"the second derivative of {loss_of(spec)} depends on the label",
            "use loss_jacobian or identity",
        )
    if method.label_samples is not None and LOSSES[spec.model.loss].of_values:
        yield FieldProblem(f"{where}.label_samples", f"{spec.model.loss} has no labels to draw", "leave it out")


def _sam_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    sam = spec.regularizers.sam
    assert sam is not None
    for name, stored in spec.tables.items():
        if stored.dtype != "float32" and sam.of != "dense":
            yield FieldProblem(
                f"tables.{name}.dtype", f"{stored.dtype} is too coarse for the steps of regularizers.sam", "use float32"
            )
    if sam.of == "dense" and not spec.model.has_dense_parameters:
        yield FieldProblem("regularizers.sam.of", f"{spec.model.kind} has no dense parameters", "use all or tables")
