"""What this version can run. Every field of the schema that it cannot honour is refused here, with the remedy.

One place to read, and one place to shrink as features arrive. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.spec import DatasetSpec, JobSpec, Optimizer

MODELS = ("dnn", "two_tower", "bpr", "item2vec", "sasrec")
SEQUENCE_MODELS = ("item2vec", "sasrec")
"""Models of users' items in order: they read the features user and item alone, and rank what comes next."""
OPTIMIZERS = ("sgd", "adagrad", "adagradw", "adagrad_ar", "rowwise_adagrad", "adam", "adamw", "adam_ar")
ADAM_FAMILY = ("adam", "adamw", "adam_ar")
WEIGHT_DECAY = ("adamw", "adagradw")
ADAPTIVE_DECAY = ("adam_ar", "adagrad_ar")
COLUMN_SHARDINGS = ("column_wise", "grid")
FBGEMM_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
_READ_BY = {
    ("alpha",): ADAPTIVE_DECAY,
    ("moments", "beta1", "beta2"): ADAM_FAMILY,
    ("eps",): tuple(kind for kind in OPTIMIZERS if kind != "sgd"),
}
"""Fields of ``optimizer``, and the kinds that read them. They may be left at what they are without being set."""
PUBLISHING_MODELS = ("two_tower", "bpr", "item2vec", "sasrec")
_MODEL_READ_BY = {
    "window": ("item2vec",),
    "negatives": ("item2vec", "sasrec"),
    **dict.fromkeys(("length", "blocks", "heads", "loss"), ("sasrec",)),
}
"""Fields of ``model``, and the kinds that read them."""
RANKING_METRICS = ("hit_rate_10", "ndcg_10", "hit_rate_10_full", "ndcg_10_full")


def refuse(problems: Iterator[str]) -> None:
    """Raises one ValueError that names every problem."""
    found = list(problems)
    if found:
        raise ValueError("; ".join(found))


def dataset_problems(spec: DatasetSpec) -> Iterator[str]:
    joins = {f"features.{name}.join.uri": feature.join.uri for name, feature in spec.features.items() if feature.join}
    graphs = {f"graphs.{name}.uri": graph.uri for name, graph in spec.graphs.items()}
    for field, uri in {"uri": spec.uri, **joins, **graphs}.items():
        scheme = uri.partition("://")[0] if "://" in uri else "file"
        if scheme != "file":
            yield f"{field}: {scheme}:// is not available yet: use a local path or file://"
    for name, feature in spec.features.items():
        if feature.type == "dense":
            yield f"features.{name}.type: dense is not available yet: use id or id_list"
    negatives = spec.label.negatives
    if negatives is not None and negatives.distribution != "uniform":
        yield f"label.negatives.distribution: {negatives.distribution} is not available yet: use uniform"


def job_problems(spec: JobSpec) -> Iterator[str]:
    if spec.model.kind not in MODELS:
        yield f"model.kind: {spec.model.kind} is not available yet: use one of {', '.join(MODELS)}"
    yield from model_problems(spec)
    optimizer = spec.optimizer
    if optimizer.kind not in OPTIMIZERS:
        yield f"optimizer.kind: {optimizer.kind} is not available yet: use one of {', '.join(OPTIMIZERS)}"
    if optimizer.alpha == "auto":
        yield "optimizer.alpha: auto is not available yet: use default or a number"
    if optimizer.decay != "at_read":
        yield "optimizer.decay: at_update is not available yet: use at_read"
    yield from optimizer_problems(optimizer)
    if spec.micro_batches > spec.batch_size:
        yield f"micro_batches: a batch of {spec.batch_size} has no {spec.micro_batches} parts: use fewer"
    yield from sse_problems(spec)
    if spec.regularizers.dropout and spec.model.kind != "sasrec":
        yield f"regularizers.dropout is not available yet for {spec.model.kind}: leave it 0"
    yield from kernel_problems(spec)
    yield from sharding_problems(spec)
    if spec.resources.gpus_per_worker:
        yield "resources.gpus_per_worker: the GPU kernel is not available yet: leave it 0"
    if "gauc" in spec.evaluation.metrics:
        yield "evaluation.metrics: gauc is not available yet: use auc and logloss"
    if spec.publish is not None and spec.model.kind not in PUBLISHING_MODELS:
        yield (
            f"publish: vectors of {spec.model.kind} are not determined by its loss and are not published yet: "
            f"use one of {', '.join(PUBLISHING_MODELS)}"
        )


def model_problems(spec: JobSpec) -> Iterator[str]:
    """What is set of the model that its kind has no use for."""
    model = spec.model
    fields = type(model).model_fields
    if model.kind in ("bpr", *SEQUENCE_MODELS) and model.hidden not in ((), fields["hidden"].default):
        yield f"model.hidden: {model.kind} has no hidden layers: leave it out"
    for name, kinds in _MODEL_READ_BY.items():
        if model.kind not in kinds and getattr(model, name) != fields[name].default:
            yield f"model.{name}: {model.kind} has none: use {' or '.join(kinds)}, or leave it out"
    if model.kind == "sasrec" and model.embedding_dim % model.heads:
        yield f"model.heads: {model.heads} heads do not divide embedding_dim {model.embedding_dim}: use a divisor"
    if model.kind in SEQUENCE_MODELS and "logloss" in spec.evaluation.metrics and "auc" not in spec.evaluation.metrics:
        yield f"evaluation.metrics: {model.kind} ranks and has no logloss: use {', '.join(RANKING_METRICS)} or auc"
    if model.kind not in SEQUENCE_MODELS:
        for name in spec.evaluation.metrics:
            if name in RANKING_METRICS:
                yield f"evaluation.metrics: {model.kind} has no {name}: use auc and logloss"


def optimizer_problems(optimizer: Optimizer) -> Iterator[str]:
    """What is set of the row optimizer that its kind has no use for, and what it needs."""
    kind = optimizer.kind
    if optimizer.weight_decay and kind not in WEIGHT_DECAY:
        yield f"optimizer.weight_decay: {kind} has none: use one of {', '.join(WEIGHT_DECAY)}, or leave it 0"
    if not optimizer.weight_decay and kind in WEIGHT_DECAY:
        yield f"optimizer.weight_decay: {kind} is {kind.removesuffix('w')} with it: set it, such as to 0.01"
    if optimizer.first_touch != "keep" and kind not in (*WEIGHT_DECAY, *ADAPTIVE_DECAY):
        yield f"optimizer.first_touch: rows of {kind} do not decay, touched or not: leave it out"
    if optimizer.eps_inside_root and kind == "sgd":
        yield "optimizer.eps_inside_root: sgd has no root: leave it out"
    for names, kinds in _READ_BY.items():
        for name in names:
            if kind not in kinds and getattr(optimizer, name) != type(optimizer).model_fields[name].default:
                yield f"optimizer.{name}: {kind} has none: use one of {', '.join(kinds)}, or leave it out"


def sharding_problems(spec: JobSpec) -> Iterator[str]:
    """What of ``sharding`` the row optimizer cannot work with, where there are ranks to split columns over."""
    if spec.optimizer.clip_row_norm is None or spec.resources.num_workers == 1:
        return
    for table, sharding in spec.sharding.items():
        if sharding in COLUMN_SHARDINGS:
            yield (
                f"sharding.{table}: optimizer.clip_row_norm needs the gradient of a whole row, which {sharding} may "
                "split: use table_wise, row_wise or data_parallel, or clip_norm"
            )


def sse_problems(spec: JobSpec) -> Iterator[str]:
    """What of ``sse`` has no meaning, whatever the dataset."""
    for feature, sse in spec.sse.items():
        if feature == "label" and (sse.graph is not None or sse.rho != 1.0 or sse.walk is not None):
            yield "sse.label.graph: labels have no graph: leave graph, rho and walk out (bpr: set them under sse.item)"
        elif sse.walk is not None and (sse.graph is None or sse.rho != 1.0):
            yield f"sse.{feature}.walk: a walk needs a graph and no rho, for it knows neighbours alone"
        elif sse.graph is None and sse.rho != 1.0:
            yield f"sse.{feature}.rho: it is the weight of neighbours in a graph: name the graph, or leave rho out"
    on = {feature for feature, sse in spec.sse.items() if sse.probability > 0}
    if spec.model.kind == "bpr" and {"item", "label"} <= on:
        yield "sse.label.probability: the items of bpr are its labels: give sse.item or sse.label, not both"


def kernel_problems(spec: JobSpec) -> Iterator[str]:
    """What the job's kernel has no form of."""
    kind = spec.optimizer.kind
    if spec.kernel == "fbgemm":
        if kind not in FBGEMM_OPTIMIZERS:
            yield (
                f"kernel: fbgemm has no fused {kind} on CPU: use kernel evenkeel, or optimizer.kind "
                f"{', '.join(FBGEMM_OPTIMIZERS)}"
            )
        if spec.resources.gpus_per_worker:
            yield "resources.gpus_per_worker: FBGEMM on a GPU has never been run: use kernel evenkeel, or leave it 0"
        for option in ("eps_inside_root", "weight_decay", "clip_row_norm"):
            if getattr(spec.optimizer, option):
                yield f"optimizer.{option}: FBGEMM's fused optimizers have none: use kernel evenkeel, or leave it out"
    elif kind == "rowwise_adagrad":
        yield "optimizer.kind: rowwise_adagrad is fused in FBGEMM alone: set kernel: fbgemm, or use adagrad"
    if kind == "rowwise_adagrad":
        for table, sharding in spec.sharding.items():
            if sharding not in ("table_wise", "row_wise", "data_parallel"):
                yield (
                    f"sharding.{table}: rowwise_adagrad takes the mean over a whole row, which {sharding} may split: "
                    "use table_wise or row_wise, or optimizer.kind adagrad"
                )


def fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[str]:
    """What of the job does not fit the dataset it names."""
    names = ", ".join(sorted(dataset.features))
    if job.dataset.name != dataset.name:
        yield f"dataset.name: the job names '{job.dataset.name}', the dataset is '{dataset.name}'"
    if job.dataset.window is not None and dataset.partition is None:
        yield f"dataset.window: dataset '{dataset.name}' has no partition column"
    for feature, sse in job.sse.items():
        if feature != "label" and feature not in dataset.features:
            yield f"sse.{feature}: no such feature (there are {names})"
        elif sse.graph is not None and sse.graph not in dataset.graphs:
            there = ", ".join(sorted(dataset.graphs)) or "none"
            yield f"sse.{feature}.graph: dataset '{dataset.name}' has no graph '{sse.graph}' (there are {there})"
        elif sse.graph is not None and feature in dataset.features:
            table, of = (dataset.features[name].shares or name for name in (feature, dataset.graphs[sse.graph].of))
            if table != of:
                yield (
                    f"sse.{feature}.graph: graph '{sse.graph}' is of table '{of}', the feature reads table '{table}': "
                    f"name a graph whose of is '{table}'"
                )
    tables = {feature.shares or name for name, feature in dataset.features.items()}
    for table in job.sharding:
        if table not in tables:
            yield f"sharding.{table}: no such table (there are {', '.join(sorted(tables))})"
    if job.publish is not None and job.publish.feature not in dataset.features:
        yield f"publish.feature: no such feature '{job.publish.feature}' (there are {names})"
    if job.model.kind in PUBLISHING_MODELS:
        for feature in ("user", "item"):
            if feature not in dataset.features:
                yield f"model.kind: {job.model.kind} needs a feature named '{feature}' (there are {names})"
        if job.publish is not None and job.publish.feature != "item":
            yield f"publish.feature: {job.model.kind} publishes 'item'"
        joined = [
            name for name, feature in dataset.features.items() if feature.join is not None and feature.join.on == "item"
        ]
        if job.model.kind == "two_tower" and joined:
            yield f"model.kind: item-side features ({', '.join(joined)}) in two_tower are not available yet"
    if job.model.kind in SEQUENCE_MODELS and dataset.ordering is None:
        yield f"model.kind: {job.model.kind} needs order or timestamp in dataset '{dataset.name}'"
    split = job.evaluation.split
    if split.kind == "time" and dataset.ordering is None:
        yield f"evaluation.split.kind: time needs order or timestamp in dataset '{dataset.name}'"
    if split.kind == "per_user_last":
        if dataset.ordering is None:
            yield f"evaluation.split.kind: per_user_last needs order or timestamp in dataset '{dataset.name}'"
        if "user" not in dataset.features:
            yield f"evaluation.split.kind: per_user_last needs a feature named 'user' (there are {names})"
