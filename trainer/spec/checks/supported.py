"""Checks of settings that this version does not support or that contradict each other, with remedies. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from embeddings.optim.registry import KINDS, kinds_that_take
from embeddings.tables.element_types import COMPUTE_TYPE, ELEMENT_TYPES, JOB_TYPES
from embeddings.tables.shardings import SHARDINGS, shardings_for
from trainer.spec.checks.dynamic_tables import dynamic_table_fit_problems, dynamic_table_problems
from trainer.spec.checks.evaluation import (
    evaluation_fit_problems,
    evaluation_problems,
    output_calibration_fit_problems,
    output_calibration_problems,
)
from trainer.spec.checks.feature_names import name_fit_problems
from trainer.spec.checks.one_pass import one_pass_fit_problems, one_pass_problems
from trainer.spec.checks.publish import publish_fit_problems, publish_problems
from trainer.spec.checks.regularizers import regularizer_fit_problems, regularizer_problems
from trainer.spec.optimizer import row_optimizer
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec
    from trainer.spec.optimizer import Optimizer


def job_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    yield from model_problems(spec)
    optimizer = spec.optimizer
    yield from [*optimizer_problems(optimizer)] or _together_problems(optimizer)
    if spec.micro_batches > spec.batch_size:
        yield FieldProblem(
            "micro_batches", f"a batch of {spec.batch_size} cannot be cut into {spec.micro_batches} parts", "use fewer"
        )
    elif spec.model.mixes_batch and spec.batch_size < 2 * spec.micro_batches:
        where, remedy = ("micro_batches", "use fewer") if spec.batch_size > 1 else ("batch_size", "use a larger one")
        yield FieldProblem(where, "batch_norm turns a part of one row into 0, whatever it has", remedy)
    yield from sse_problems(spec)
    yield from regularizer_problems(spec)
    yield from kernel_problems(spec)
    yield from sharding_problems(spec)
    yield from dynamic_table_problems(spec)
    yield from one_pass_problems(spec)
    if spec.resources.gpus_per_worker not in (0, 1):
        yield FieldProblem(
            "resources.gpus_per_worker",
            f"a rank works on one GPU of its own, not on {spec.resources.gpus_per_worker:g}",
            "use 1, and as many workers as there are GPUs, or 0",
        )
    yield from evaluation_problems(spec)
    yield from output_calibration_problems(spec)
    yield from publish_problems(spec)


def model_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield the settings of the model, and the shardings, that its kind of model does not read or cannot learn with."""
    yield from spec.model.problems(spec)
    if not spec.model.pools:
        available = shardings_for(sequences=True)
        for table, sharding in spec.sharding.items():
            if sharding not in available:
                yield FieldProblem(
                    f"sharding.{table}",
                    f"{sharding} needs pooled rows, but {spec.model.kind} reads each row on its own",
                    f"use {', '.join(available)}",
                )


def optimizer_problems(optimizer: Optimizer) -> Iterator[FieldProblem]:
    """Yield settings that the kind of row optimizer does not read, and missing settings that it requires."""
    name, kind = optimizer.kind, KINDS[optimizer.kind]
    decaying = ", ".join(one for one in kinds_that_take("weight_decay"))
    answered = ("kind", "clip_norm", "weight_decay", "first_touch", "eps_inside_root", "decay")
    if optimizer.weight_decay and not kind.takes("weight_decay"):
        yield FieldProblem("optimizer.weight_decay", f"{name} has none", f"use one of {decaying}, or leave it 0")
    if not optimizer.weight_decay and kind.takes("weight_decay"):
        yield FieldProblem(
            "optimizer.weight_decay", f"without it, {name} is {name.removesuffix('w')}", "set it, such as to 0.01"
        )
    if optimizer.first_touch != "keep" and not kind.takes("first_touch"):
        yield FieldProblem("optimizer.first_touch", f"rows of {name} do not decay, touched or not", "leave it out")
    if optimizer.eps_inside_root and not kind.takes("eps_inside_root"):
        why = f"{name} adds eps to the root" if kind.takes("eps") else f"{name} has no root"
        yield FieldProblem("optimizer.eps_inside_root", why, "leave it out")
    if optimizer.decay == "by_epoch" and not kind.takes("decay"):
        kinds = ", ".join(kinds_that_take("decay"))
        yield FieldProblem("optimizer.decay", f"{name} has none", f"use one of {kinds}, or leave it out")
    for setting, field in type(optimizer).model_fields.items():
        if setting not in answered and not kind.takes(setting) and getattr(optimizer, setting) != field.default:
            kinds = ", ".join(kinds_that_take(setting))
            yield FieldProblem(f"optimizer.{setting}", f"{name} has none", f"use one of {kinds}, or leave it out")


def _together_problems(optimizer: Optimizer) -> Iterator[FieldProblem]:
    """Yield combinations of the row optimizer's settings that are not supported."""
    try:
        # Another alpha, and the length of an epoch, are only known with the rows: any valid numbers will do here.
        row_optimizer(optimizer, alpha=optimizer.alpha if isinstance(optimizer.alpha, float) else 1.0, epoch_steps=1)
    except ValueError as error:
        yield FieldProblem("optimizer", str(error))


def sharding_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield conflicts of ``sharding`` with the number of workers, and of split columns with the row optimizer."""
    resources = spec.resources
    for table, sharding in spec.sharding.items():
        if SHARDINGS[sharding].needs_equal_hosts and resources.least_workers < resources.num_workers:
            yield FieldProblem(
                f"sharding.{table}",
                f"{sharding} needs hosts with equally many ranks, and with resources.min_workers "
                f"{resources.min_workers} an attempt may have any number up to {resources.num_workers}",
                "use row_wise, column_wise or table_wise, or leave it to the planner; or leave min_workers out",
            )
    if spec.optimizer.clip_row_norm is None or spec.resources.num_workers == 1:
        return
    for table, sharding in spec.sharding.items():
        if SHARDINGS[sharding].columns_over:
            yield FieldProblem(
                f"sharding.{table}",
                f"optimizer.clip_row_norm needs the gradient of a whole row, which {sharding} may split",
                "use table_wise, row_wise or data_parallel, or clip_norm",
            )


def sse_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield settings of ``sse`` that have no meaning for any dataset."""
    for feature, sse in spec.sse.items():
        if feature == "label" and (sse.graph is not None or sse.rho != 1.0 or sse.walk is not None):
            yield FieldProblem(
                "sse.label.graph",
                "labels have no graph",
                "leave graph, rho and walk out (bpr: set them under sse.item)",
            )
        elif sse.walk is not None and (sse.graph is None or sse.rho != 1.0):
            yield FieldProblem(f"sse.{feature}.walk", "a walk needs a graph and no rho: it only visits neighbours")
        elif sse.graph is None and sse.rho != 1.0:
            yield FieldProblem(
                f"sse.{feature}.rho", "it is the weight of neighbours in a graph", "name the graph, or leave rho out"
            )
    of_items = spec.model.draws_partner or spec.model.reads_sequences
    if "label" in spec.sse and spec.sse["label"].include_unknown and not of_items:
        yield FieldProblem("sse.label.include_unknown", "class labels have no unknown id", "leave it out")
    on = {feature for feature, sse in spec.sse.items() if sse.probability > 0}
    if spec.model.draws_partner and {"item", "label"} <= on:
        yield FieldProblem(
            "sse.label.probability",
            f"the items of {spec.model.kind} are its labels",
            "give sse.item or sse.label, not both",
        )


def kernel_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield settings that the job's kernel does not support."""
    kind = spec.optimizer.kind
    if spec.kernel == "fbgemm":
        where = "" if spec.resources.gpus_per_worker else " on CPU"
        if not KINDS[kind].on_fbgemm:
            fused = ", ".join(name for name, one in KINDS.items() if one.on_fbgemm)
            yield FieldProblem(
                "kernel", f"fbgemm has no fused {kind}{where}", f"use kernel evenkeel, or optimizer.kind {fused}"
            )
        for option in ("eps_inside_root", "weight_decay", "clip_row_norm"):
            if getattr(spec.optimizer, option):
                yield FieldProblem(
                    f"optimizer.{option}", "FBGEMM's fused optimizers have none", "use kernel evenkeel, or leave it out"
                )
    yield from element_type_problems(spec, spec.tables)
    if KINDS[kind].is_rowwise:
        for table, sharding in spec.sharding.items():
            if SHARDINGS[sharding].columns_over:
                yield FieldProblem(
                    f"sharding.{table}",
                    f"{kind} takes the mean over a whole row, which {sharding} may split",
                    f"use table_wise or row_wise, or optimizer.kind {kind.removeprefix('rowwise_')}",
                )


def element_type_problems(job: JobSpec, tables: Iterable[str]) -> Iterator[FieldProblem]:
    """Yield a problem for each of ``tables`` whose rows or state have a type that the kernel or optimizer refuses."""
    kind, stored = job.optimizer.kind, {name: job.table(name) for name in tables}
    if job.kernel == "fbgemm":
        where = "" if job.resources.gpus_per_worker else " on CPU"
        for name, table in stored.items():
            if (table.dtype, table.state_dtype) != (COMPUTE_TYPE, COMPUTE_TYPE):
                yield FieldProblem(
                    f"tables.{name}", f"FBGEMM trains float32 rows and state{where}", "use kernel evenkeel, or float32"
                )
    if KINDS[kind].optimizer.keeps_mean_square:
        for name, table in stored.items():
            if not ELEMENT_TYPES[table.state_dtype].holds_mean_squares:
                yield FieldProblem(
                    f"tables.{name}.state_dtype",
                    f"{table.state_dtype} cannot hold the squares that {kind} keeps",
                    f"use {' or '.join(one for one in JOB_TYPES if ELEMENT_TYPES[one].holds_mean_squares)}",
                )


def column_problems(job: JobSpec, tables: Iterable[str]) -> Iterator[FieldProblem]:
    """Yield a problem for each table that FBGEMM's GPU module does not accept (embeddings.kernels.fbgemm.module)."""
    if job.kernel != "fbgemm" or not job.resources.gpus_per_worker:
        return
    columns = {table: job.model.table_columns(table) for table in sorted(tables)}
    # If the model adds a column to only some tables, no embedding_dim suits all of them.
    remedy = "an embedding_dim that makes it one, or " if len(set(columns.values())) == 1 else ""
    for table, count in columns.items():
        if count % 4:
            yield FieldProblem(
                "model.embedding_dim",
                f"table '{table}' has {count} columns, on a GPU FBGEMM takes multiples of 4",
                f"use {remedy}kernel evenkeel, or resources.gpus_per_worker 0",
            )


def fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield conflicts of the job with the dataset that it names."""
    names = ", ".join(sorted(dataset.features))
    if job.dataset.name != dataset.name:
        yield FieldProblem("dataset.name", f"the job names '{job.dataset.name}', the dataset is '{dataset.name}'")
    if job.dataset.window is not None and dataset.partition_column is None:
        why = f"dataset '{dataset.name}' has neither partition nor timestamp"
        yield FieldProblem("dataset.window", why, "name the column of days, or of times, in one of them")
    inputs, looked_up = dataset.features | dataset.joined_features, job.model.looked_up(dataset)
    for feature, sse in job.sse.items():
        if feature != "label" and feature not in inputs:
            yield FieldProblem(f"sse.{feature}", f"no such feature (there are {', '.join(sorted(inputs))})")
        elif feature != "label" and feature not in looked_up and sse.probability:
            yield FieldProblem(
                f"sse.{feature}",
                f"{job.model.kind} looks up no rows of '{feature}' that could be swapped",
                "leave it out",
            )
        elif sse.graph is not None and sse.graph not in dataset.graphs:
            there = ", ".join(sorted(dataset.graphs)) or "none"
            yield FieldProblem(
                f"sse.{feature}.graph", f"dataset '{dataset.name}' has no graph '{sse.graph}' (there are {there})"
            )
        elif sse.graph is not None and feature != "label":
            table, of = (inputs[name].shares or name for name in (feature, dataset.graphs[sse.graph].of))
            if table != of:
                yield FieldProblem(
                    f"sse.{feature}.graph",
                    f"graph '{sse.graph}' belongs to table '{of}', the feature reads table '{table}'",
                    f"name a graph whose of is '{table}'",
                )
    yield from name_fit_problems(job, dataset)
    yield from dynamic_table_fit_problems(job, dataset)
    yield from one_pass_fit_problems(job, dataset)
    yield from regularizer_fit_problems(job, dataset)
    yield from evaluation_fit_problems(job, dataset)
    yield from output_calibration_fit_problems(job, dataset)
    inputs = dataset.joined_features
    # A pair model also has tables of features that it does not read; a sequence model has only the item table.
    with_ids = looked_up if job.model.reads_sequences else [name for name, one in inputs.items() if one.has_ids]
    tables = {inputs[name].shares or name for name in with_ids}
    yield from column_problems(job, tables)
    yield from element_type_problems(job, sorted(tables - job.tables.keys()))
    for field, named in (("sharding", job.sharding), ("tables", job.tables)):
        for table in named:
            if table not in tables:
                yield FieldProblem(f"{field}.{table}", f"no such table (there are {', '.join(sorted(tables))})")
    if job.publish is not None and job.publish.feature not in dataset.features:
        yield FieldProblem("publish.feature", f"no such feature '{job.publish.feature}' (there are {names})")
    items_alone = job.model.reads_sequences or job.model.ranks_all_items
    if items_alone and job.publish is not None and job.publish.feature != "item":
        yield FieldProblem("publish.feature", f"{job.model.kind} publishes 'item'")
    yield from publish_fit_problems(job, dataset)
    yield from job.model.fit_problems(job, dataset)
    split = job.evaluation.split.kind
    if split in ("time", "per_user_last") and dataset.ordering is None:
        yield FieldProblem("evaluation.split.kind", f"{split} needs order or timestamp in dataset '{dataset.name}'")
    if split == "per_user_last" and "user" not in dataset.features:
        yield FieldProblem("evaluation.split.kind", f"per_user_last needs a feature named 'user' (there are {names})")
