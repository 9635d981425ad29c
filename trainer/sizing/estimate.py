"""Estimate of a run before it starts: table rows, bytes, steps, memory, time. Torch-free.

Figures are upper bounds or rough predictions, and each comes with its arithmetic in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.vocabulary import DistinctIds
from trainer.data.prepare.graphs import edge_files
from trainer.data.prepare.plan import DataPlan, make_plan
from trainer.data.sources.source import no_rows_of_days
from trainer.sizing.memory import FLOAT_BYTES, RUN_BYTES, RankMemory, rank_memory, sequence_ids, size_of
from trainer.sizing.memory_limit import arithmetic, memory_problem
from trainer.sizing.row_shape import RowShape
from trainer.spec import DatasetSpec, Feature, JobSpec
from trainer.spec.models.sequences import PieceSpec

EXACT_ROWS = 20_000_000
"""Distinct ids are counted up to this number of rows; with more rows, the files' statistics give an upper bound."""

# Rough speeds: a CPU core with small matrices; memory traffic of rows; overhead of Python and collectives per step.
_FLOPS_PER_SECOND = 15e9
_ROW_BYTES_PER_SECOND = 3e9
_STEP_SECONDS = 0.004


def ids_per_example(job: JobSpec, dataset: DatasetSpec) -> dict[str, float]:
    """Return {feature: number of ids that an example looks up}; for histories, the largest possible number.

    Other lists count as 5 ids, and texts as typical titles.
    """
    if job.model.reads_sequences:
        return sequence_ids(job)
    counts = {name: _ids_of(feature) for name, feature in dataset.joined_features.items() if feature.has_ids}
    return counts | ({"item__negative": 1.0} if job.model.draws_partner else {})


def _ids_of(feature: Feature) -> float:
    if feature.derive is not None:
        return float(feature.derive.length)
    if feature.effective_ngrams is not None:
        return feature.effective_ngrams.usual_number
    return 5.0 if feature.is_list else 1.0


def _graph_sizes(job: JobSpec, dataset: DatasetSpec) -> dict[str, tuple[str, int]]:
    """Return {graph: (its table, upper bound on its number of edges)} of the graphs that the job names for SSE."""
    sizes = {}
    for name, edges in edge_files(dataset, job).items():
        source = edges.source
        count = source.reader.num_rows()
        if count is None:
            count = sum(len(chunk) for chunk in source.stream(edges.columns))
        sizes[name] = edges.table, count
    return sizes


class Estimate(dict[str, Any]):
    """The estimate as a JSON object, which the REST interface returns.

    ``memory``: prediction from which its bytes come. ``fewer``: the same with fewer workers, by number of workers,
    largest number first. ``exact``: True if table rows were counted, False if they are upper bounds.
    """

    memory: RankMemory
    fewer: dict[int, RankMemory]
    exact: bool


class Counts(NamedTuple):
    """Numbers of rows, and of distinct ids by table, for an estimate without data."""

    rows: int
    ids: Mapping[str, int]


def estimate(
    job: JobSpec, dataset: DatasetSpec, gpu_bytes: int | None = None, counts: Counts | None = None
) -> Estimate:
    """Predict rows and bytes per table, steps per epoch, memory and time of ``job`` on ``dataset``.

    If there are at most EXACT_ROWS rows, it reads the id columns once to count distinct ids.

    ``gpu_bytes``: memory of each rank's GPU; None: not known. ``counts``: numbers to take instead of the data's; None:
    the data are read.

    Raises:
        DataError: the data have an error for which the run itself would fail.
        ValueError: ``counts`` lacks a table of the job, or has a table that the job lacks.
    """
    days = None
    if counts is None:
        plan = make_plan(dataset, job)
        num_rows, distinct, exact = _distinct(plan)
        if not (num_rows or job.dataset.one_pass or plan.source.window is None or plan.source.filter is not None):
            raise no_rows_of_days(plan.source)
        days = None if job.dataset.one_pass else plan.source.days_without_rows()
    else:
        num_rows, distinct, exact = _given(job, dataset, counts)
    workers = job.resources.num_workers
    ids = ids_per_example(job, dataset)
    rows_of = {name: count + NUM_SPECIAL_ROWS for name, count in distinct.items()}
    graphs = _graph_sizes(job, dataset)
    shape = RowShape.of(job, dataset)
    memory = rank_memory(job, rows_of, ids, graphs, gpu_bytes, shape=shape)
    split = job.evaluation.split
    negatives = dataset.negatives
    examples = num_rows * (1 + (negatives.per_positive if negatives is not None and not job.model.draws_partner else 0))
    # per_user_last holds out rows of each user. The number of users is unknown here: assume that no row is held out.
    held = 0.0 if split.kind == "per_user_last" else split.validation + split.test
    train_examples = max(1, int(examples * (1.0 - held)))
    if isinstance(job.model, PieceSpec):
        # Examples are pieces of sequences; each user may have one more, shorter piece.
        train_examples = -(-train_examples // job.model.length)
    steps = -(-train_examples // job.batch_size)
    total_bytes = memory.total * workers + RUN_BYTES
    step_seconds = _seconds_per_step(job, ids, shape)
    bound = "distinct ids of all splits" if exact else "a bound from file statistics"
    bound = bound if counts is None else "numbers given"
    rows, inputs = sum(table.rows for table in memory.by_table.values()), job.model.inputs_in_words(dataset)
    estimated = Estimate(
        rows=num_rows,
        tables={
            name: {
                "rows": table.rows,
                "bytes": table.total,
                "sharding": table.sharding,
                "bytes_per_rank": table.per_rank,
            }
            for name, table in memory.by_table.items()
        },
        table_bytes_per_rank=memory.tables,
        steps_per_epoch=steps,
        steps=steps * job.epochs,
        peak_memory_bytes_per_rank=memory.total,
        peak_memory_bytes=total_bytes,
        memory_limit_bytes_per_rank=job.resources.memory_bytes_per_worker,
        seconds_per_epoch=round(steps * step_seconds, 1),
        arithmetic=[
            f"table rows = {bound} + padding + unknown: at most {rows:,} in all",
            *arithmetic(job, memory),
            f"all ranks and the run's other processes = {workers} x {memory.total:,} + {RUN_BYTES:,} = {total_bytes:,}",
            f"steps per epoch = {train_examples:,} training examples / batch size {job.batch_size:,} = {steps:,}",
            f"seconds per epoch = {steps:,} steps x {step_seconds * 1000:.1f} ms (rough: within a factor of 3)",
            *(note for note in (inputs, days) if note is not None),
        ],
    )
    estimated.memory, estimated.exact = memory, exact
    estimated.fewer = {
        count: rank_memory(job.with_workers(count), rows_of, ids, graphs, gpu_bytes, shape=shape)
        for count in job.resources.worker_counts[1:]
    }
    return estimated


def too_large(job: JobSpec, estimated: Estimate, machine_bytes: int | None) -> tuple[str, str] | None:
    """Return (problem with the arithmetic, remedy) if the estimated job does not fit into memory, else None.

    If the estimate has only upper bounds of the tables' rows, return None: the run counts the rows, and fails if they
    do not fit.
    ``machine_bytes``: as in :func:`trainer.sizing.memory_limit.memory_problem`.
    """
    if not estimated.exact:
        return None
    least = job.resources.least_workers
    if least not in estimated.fewer:
        return memory_problem(job, estimated.memory, machine_bytes)
    problem = memory_problem(job, estimated.memory, None)
    if problem is not None:
        return problem
    problem = memory_problem(job.with_workers(least), estimated.fewer[least], machine_bytes)
    return problem and (f"with resources.min_workers {least}: {problem[0]}", f"raise it, or: {problem[1]}")


def _seconds_per_step(job: JobSpec, ids: Mapping[str, float], shape: RowShape) -> float:
    """Estimate the time of a step from a worker's multiply-adds in the dense part and its memory traffic of rows."""
    samples = job.batch_size / job.resources.num_workers
    size = size_of(job, ids, shape)
    # Two operations each, for forward and twice for backward; repeated for passes of dropout regularizers, and for SAM.
    arithmetic = 6.0 * size.multiply_adds * samples / (_FLOPS_PER_SECOND * job.resources.cpus_per_worker)
    traffic = samples * sum(ids.values()) * job.model.embedding_dim * FLOAT_BYTES * 10 / _ROW_BYTES_PER_SECOND
    passes = job.regularizers.dropout_method.passes
    return (_STEP_SECONDS + passes * arithmetic + traffic) * (1 if job.regularizers.sam is None else 2)


def _distinct(plan: DataPlan) -> tuple[int, dict[str, int], bool]:
    """Return (number of rows, distinct ids by table, True if they were counted, not bounded)."""
    num_rows = plan.source.reader.num_rows()
    if num_rows is not None and num_rows > EXACT_ROWS and plan.source.has_all_rows:
        return num_rows, _bounds(plan, num_rows), False
    distinct = {table: DistinctIds(plan.kinds[table]) for table in plan.trained_tables}
    for feature in plan.trained:
        if feature.join is not None:
            plan.joins[feature.name].add_to(distinct[feature.table])
    uses = [use for use in plan.uses if use.domain in distinct]
    counted = 0
    for chunk in plan.source.stream([use.column for use in uses] or plan.columns()):
        counted += len(chunk)
        for use in uses:
            distinct[use.domain].add(use.read(chunk, plan.kinds[use.domain])[0])
    return counted, {table: len(ids.sorted()) for table, ids in distinct.items()}, True


def _given(job: JobSpec, dataset: DatasetSpec, counts: Counts) -> tuple[int, dict[str, int], bool]:
    """Return ``counts`` in the form of :func:`_distinct`."""
    features = dataset.joined_features
    tables = dict.fromkeys(features[name].shares or name for name in job.model.looked_up(dataset))
    lacking, strange = [name for name in tables if name not in counts.ids], sorted(set(counts.ids) - set(tables))
    if lacking or strange:
        what = f"no number of ids for {', '.join(lacking)}" if lacking else f"no table {', '.join(strange)}"
        raise ValueError(f"{what}: give one for each table of the job ({', '.join(tables)})")
    return counts.rows, {name: counts.ids[name] for name in tables}, False


def _bounds(plan: DataPlan, num_rows: int) -> dict[str, int]:
    """Return upper bounds on distinct ids by table: numbers of ids, or max - min + 1 of integers by file statistics."""
    bounds = dict.fromkeys(plan.trained_tables, 0)
    for feature in plan.trained:
        if feature.join is not None:
            joined = DistinctIds(plan.kinds[feature.table])
            plan.joins[feature.name].add_to(joined)
            bounds[feature.table] += len(joined.sorted())
    for use in plan.uses:
        if use.domain in bounds:
            bounds[use.domain] += use.most_ids(plan.source, num_rows)
    return bounds
