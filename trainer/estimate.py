"""What a run will take, before it starts: table rows, bytes, steps, memory, time. Torch-free.

Figures are upper bounds or rough predictions, and each comes with its arithmetic in words.
"""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data import values
from trainer.data.encode import ids_of
from trainer.data.plan import DataPlan, make_plan
from trainer.data.vocabulary import DistinctIds
from trainer.data.writing import NUM_SPECIAL_ROWS
from trainer.spec import DatasetSpec, JobSpec

EXACT_ROWS = 20_000_000
"""Above so many rows distinct ids are bounded from file statistics instead of counted."""

_FLOAT_BYTES = 4
_STEP_COUNTER_BYTES = 8
_STATE_VECTORS = {"sgd": 0, "adagrad": 1, "adam": 2, "adam_ar": 2}
# Measured on this library's CPU set-up: imports of torch, TorchRec, FBGEMM and Numba; Ray's head processes.
_PROCESS_BYTES = 900 * 2**20
_RAY_BYTES = 700 * 2**20
# Rough: one CPU core at small matrices; memory-bound row traffic; Python, autograd and collectives per step.
_FLOPS_PER_SECOND = 15e9
_ROW_BYTES_PER_SECOND = 3e9
_STEP_SECONDS = 0.004


def estimate(job: JobSpec, dataset: DatasetSpec) -> dict[str, Any]:
    """Predicts rows and bytes per table, steps per epoch, memory and time of ``job`` on ``dataset``.

    Reads the id columns once where there are at most 20 million rows. Raises DataError like the run itself would.
    """
    plan = make_plan(dataset, job)
    num_rows, distinct, exact = _distinct(plan)
    dim, workers = job.model.embedding_dim, job.resources.num_workers
    vectors = _STATE_VECTORS[job.optimizer.kind]
    row_bytes = dim * _FLOAT_BYTES * (1 + vectors) + _STEP_COUNTER_BYTES
    tables = {
        name: {"rows": count + NUM_SPECIAL_ROWS, "bytes": (count + NUM_SPECIAL_ROWS) * row_bytes}
        for name, count in distinct.items()
    }
    table_bytes = sum(table["bytes"] for table in tables.values())
    split = job.evaluation.split
    negatives = dataset.label.negatives
    examples = num_rows * (1 + (negatives.per_positive if negatives is not None and not plan.is_bpr else 0))
    # per_user_last holds out rows by user, whose number is not looked up here: its share is bounded by 0.
    held = 0.0 if split.kind == "per_user_last" else split.validation + split.test
    train_examples = max(1, int(examples * (1.0 - held)))
    steps = -(-train_examples // job.batch_size)
    lookups = sum(_ids_per_example(plan).values())
    batch_bytes = int(job.batch_size / workers * lookups * (8 + 3 * dim * _FLOAT_BYTES)) * 4
    rank_bytes = table_bytes // workers + batch_bytes + _PROCESS_BYTES
    total_bytes = rank_bytes * workers + _RAY_BYTES
    step_seconds = _seconds_per_step(job, len(plan.features), lookups)
    bound = "distinct ids of all splits" if exact else "a bound from file statistics"
    return {
        "rows": num_rows,
        "tables": tables,
        "table_bytes_per_rank": table_bytes // workers,
        "steps_per_epoch": steps,
        "steps": steps * job.epochs,
        "peak_memory_bytes_per_rank": rank_bytes,
        "peak_memory_bytes": total_bytes,
        "seconds_per_epoch": round(steps * step_seconds, 1),
        "arithmetic": [
            f"table rows = {bound} + padding + unknown: at most {sum(t['rows'] for t in tables.values()):,} in all",
            f"row bytes = dim {dim} x 4 x (weight + {vectors} state vectors of {job.optimizer.kind}) + 8 for the step "
            f"of the last touch = {row_bytes}",
            f"tables per rank = {table_bytes:,} bytes / {workers} workers = {table_bytes // workers:,}",
            f"steps per epoch = {train_examples:,} training examples / batch size {job.batch_size:,} = {steps:,}",
            f"peak per rank = tables {table_bytes // workers:,} + batches and activations {batch_bytes:,} "
            f"+ process {_PROCESS_BYTES:,} = {rank_bytes:,}; all ranks and Ray {total_bytes:,}",
            f"seconds per epoch = {steps:,} steps x {step_seconds * 1000:.1f} ms (rough: within a factor of 3)",
        ],
    }


def _seconds_per_step(job: JobSpec, num_features: int, lookups: float) -> float:
    """Multiply-adds of the tower (forward and twice that backward) and traffic of the rows, per worker."""
    widths = [num_features * job.model.embedding_dim, *job.model.hidden, 1]
    weights = sum(a * b for a, b in itertools.pairwise(widths)) if job.model.kind != "bpr" else 0
    samples = job.batch_size / job.resources.num_workers
    arithmetic = 6.0 * weights * samples / (_FLOPS_PER_SECOND * job.resources.cpus_per_worker)
    traffic = samples * lookups * job.model.embedding_dim * _FLOAT_BYTES * 10 / _ROW_BYTES_PER_SECOND
    return _STEP_SECONDS + arithmetic + traffic


def _ids_per_example(plan: DataPlan) -> dict[str, float]:
    """Ids looked up per example, at most for histories; other lists count as 5."""
    found = {}
    for feature in plan.features:
        found[feature.name] = (
            float(feature.derive.length) if feature.derive is not None else 5.0 if feature.is_list else 1.0
        )
    return found


def _distinct(plan: DataPlan) -> tuple[int, dict[str, int], bool]:
    """Rows, distinct ids per table, and whether they were counted."""
    num_rows = _rows_from_footers(plan)
    if num_rows is not None and num_rows > EXACT_ROWS and plan.source.window is None:
        return num_rows, _bounds(plan, num_rows), False
    distinct = {table: DistinctIds(plan.kinds[table]) for table in plan.tables}
    for feature in plan.features:
        if feature.join is not None:
            plan.joins[feature.name].add_to(distinct[feature.table])
    uses = [use for use in plan.uses if use.domain in distinct]
    counted = 0
    for chunk in plan.source.stream([use.column for use in uses] or plan.columns()):
        counted += len(chunk)
        for use in uses:
            distinct[use.domain].add(ids_of(chunk, use, plan.kinds[use.domain])[0])
    return counted, {table: len(found.sorted()) for table, found in distinct.items()}, True


def _rows_from_footers(plan: DataPlan) -> int | None:
    if plan.source.format != "parquet":
        return None
    return sum(pq.read_metadata(file.path).num_rows for file in plan.source.files)


def _bounds(plan: DataPlan, num_rows: int) -> dict[str, int]:
    """At most the rows, and for integers at most max - min + 1 of the files' statistics."""
    bounds = dict.fromkeys(plan.tables, 0)
    for feature in plan.features:
        if feature.join is not None:
            joined = DistinctIds(plan.kinds[feature.table])
            plan.joins[feature.name].add_to(joined)
            bounds[feature.table] += len(joined.sorted())
    for use in plan.uses:
        if use.domain in bounds:
            type_: pa.DataType = plan.source.column_type(use.column)
            span = (
                _span(plan, use.column) if pa.types.is_integer(values.element_type(type_)) and not use.is_list else None
            )
            bounds[use.domain] += min(num_rows, span) if span is not None else num_rows
    return bounds


def _span(plan: DataPlan, column: str) -> int | None:
    low: list[int] = []
    high: list[int] = []
    for file in plan.source.files:
        metadata = pq.read_metadata(file.path)
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(number)
                if chunk.path_in_schema != column:
                    continue
                if chunk.statistics is None or not chunk.statistics.has_min_max:
                    return None
                low.append(chunk.statistics.min)
                high.append(chunk.statistics.max)
    return max(high) - min(low) + 1 if low else None
