"""Check of a rank's memory against its limit, with the remedy and the arithmetic in words. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from embeddings.kernels.fbgemm.placement import FOR_TABLES
from embeddings.optim.registry import KINDS
from embeddings.tables.shardings import ROW_WISE, SHARDINGS
from trainer.sizing.memory import RUN_BYTES, STEP_BYTES, RankMemory, rank_memory, state_counts, value_bytes
from trainer.sizing.row_shape import RowShape
from trainer.spec import JobSpec


def memory_problem(job: JobSpec, memory: RankMemory, machine_bytes: int | None) -> tuple[str, str] | None:
    """Return (problem with the arithmetic, remedy) if a rank needs more memory than its limit, else None.

    ``resources.memory_bytes_per_worker`` is the limit of each rank. ``machine_bytes`` is the limit of all ranks
    together; None if the memory of the machines that they run on is not known.
    """
    workers, limit = job.resources.num_workers, job.resources.memory_bytes_per_worker
    if limit is not None and memory.total > limit:
        return (
            f"a rank needs {memory.total:,} bytes, resources.memory_bytes_per_worker is {limit:,}: "
            f"{'; '.join(arithmetic(job, memory))}",
            _remedy(job, memory, limit),
        )
    if memory.gpu_bytes is not None and memory.gpu > memory.gpu_bytes:
        return (
            f"a rank needs {memory.gpu:,} bytes of its GPU, which has {memory.gpu_bytes:,}: "
            f"{'; '.join(arithmetic(job, memory))}",
            _gpu_remedy(memory),
        )
    together = memory.total * workers + RUN_BYTES
    if machine_bytes is not None and together > machine_bytes:
        return (
            f"the run needs {together:,} bytes, this machine has {machine_bytes:,}: "
            f"{'; '.join(arithmetic(job, memory))}; {workers} ranks and {RUN_BYTES:,} for the run's other processes",
            "lower model.embedding_dim, take an optimizer with less state (sgd, rowwise_adagrad, rowwise_adam), "
            "or train on a larger machine",
        )
    return None


def table_budget(
    job: JobSpec,
    rows: Mapping[str, int],
    ids_per_example: Mapping[str, float],
    graphs: Mapping[str, tuple[str, int]] | None = None,
    *,
    shape: RowShape | None = None,
) -> int | None:
    """Return the bytes that a rank may use for tables under the job's memory limit, for the planner.

    None if the job states no limit, or tables are on GPUs, which have limits of their own.
    """
    limit = job.resources.memory_bytes_per_worker
    if limit is None or job.resources.gpus_per_worker:
        return None
    memory = rank_memory(job, rows, ids_per_example, graphs, shape=shape)
    room = limit - (memory.total - memory.tables - memory.copies)
    # Their copies for checkpoints take as much again.
    return max(0, room // 2)


def refuse_what_cannot_fit(
    job: JobSpec,
    rows: Mapping[str, int],
    ids_per_example: Mapping[str, float],
    machine_bytes: int | None,
    graphs: Mapping[str, tuple[str, int]] | None = None,
    gpu_bytes: int | None = None,
    *,
    shape: RowShape | None = None,
) -> None:
    """Raise an error if a job whose tables have ``rows`` rows (table -> number) would not fit into memory.

    Raises:
        MemoryError: with the arithmetic and the remedy.
    """
    memory = rank_memory(job, rows, ids_per_example, graphs, gpu_bytes, shape=shape)
    problem = memory_problem(job, memory, machine_bytes)
    if problem is not None:
        raise MemoryError(". Remedy: ".join(problem))


def _gpu_remedy(memory: RankMemory) -> str:
    """Return the remedy for a GPU that is too small."""
    if memory.placed is not None:
        return "a smaller batch_size, more micro_batches, or more ranks"
    if memory.batches + memory.dense > memory.gpu_bytes * (1 - FOR_TABLES):  # type: ignore[operator]
        return "a smaller batch_size, more micro_batches, a smaller model, or more ranks with tables split over them"
    kinds = ", ".join(name for name, kind in KINDS.items() if kind.on_fbgemm)
    return (
        "more ranks with tables split over them, a smaller model.embedding_dim, or kernel: fbgemm with one of its "
        f"optimizers ({kinds}), which keeps in the host's memory what a GPU cannot hold"
    )


def _remedy(job: JobSpec, memory: RankMemory, limit: int) -> str:
    """Return the remedy: the number of ranks that would suffice if every table were split by rows."""
    room = limit - (memory.total - memory.host_tables - memory.copies)
    if room <= 0:
        return "allow more: the process and its batches alone do not fit; a smaller batch_size needs less"
    # A row more for each table, since ranks hold whole rows.
    total = sum(table.total + job.resources.num_workers * table.row_bytes for table in memory.by_table.values())
    ranks = max(-(-2 * total // room), job.resources.num_workers)
    whole = [name for name, table in memory.by_table.items() if not SHARDINGS.get(table.sharding, ROW_WISE).rows_over]
    split = f"sharding: {{{', '.join(f'{name}: row_wise' for name in whole)}}} with " if whole else ""
    return f"{split}resources.num_workers: {ranks} would fit, or a smaller model.embedding_dim"


def _held(sharding: str, dim: int, workers: int) -> str:
    """Return in words the part of a table that a rank holds."""
    if sharding not in SHARDINGS:
        return f"left to the planner, counted as split by rows over {workers}"
    way = SHARDINGS[sharding]
    if way.rows_over:
        return f"split by rows over {workers}"
    if way.columns_over:
        return f"{way.largest_share(1, dim, workers)[1]} of {dim} columns on a rank"
    return "whole on every rank" if way.replicated else "whole on one rank"


def arithmetic(job: JobSpec, memory: RankMemory) -> list[str]:
    """Return the calculation of a rank's memory in words, a line for each table and a line for the rank."""
    workers, kind = job.resources.num_workers, job.optimizer.kind
    vectors, numbers = state_counts(kind)
    lines = []
    for name, table in memory.by_table.items():
        dim = job.model.table_columns(name)
        weight, state = value_bytes(job.table(name))
        lines.append(
            f"table {name}: {table.rows:,} rows x (dim {dim} x ({weight} for the weight + {vectors} x {state} for the "
            f"state vectors of {kind}){f' + {numbers * state} for its sum' if numbers else ''} + {STEP_BYTES} for the "
            f"step of its last touch) = {table.total:,} bytes, {_held(table.sharding, dim, workers)}: "
            f"{table.per_rank:,}"
        )
    placed = memory.placed
    if placed is not None and placed.cache_sets:
        lines.append(
            f"tables {memory.tables:,} do not fit {FOR_TABLES:.0%} of a GPU of {memory.gpu_bytes:,}: rows and state "
            f"{placed.host_bytes:,} in the host's memory, numbers of rows and a cache {placed.gpu_bytes:,} on the GPU"
        )
    here = memory.tables if placed is None else placed.gpu_bytes
    trained = f"tables {here:,} + batches and activations {memory.batches:,} + dense parameters {memory.dense:,}"
    if memory.on_gpu:
        lines.append(f"GPU memory per rank = {trained} = {memory.gpu:,}")
    parts = [] if memory.on_gpu else [trained]
    if memory.on_gpu and memory.host_tables:
        parts.append(f"tables {memory.host_tables:,}")
    parts.append(f"copies of tables for checkpoints {memory.copies:,}")
    for words, number in (
        ("graphs", memory.graphs),
        ("owner of each row", memory.ids),
        ("memory shared with other ranks", memory.exchange),
        ("kept from step to step", memory.kept),
        ("process", memory.process),
    ):
        if number:
            parts.append(f"{words} {number:,}")
    lines.append(f"peak per rank = {' + '.join(parts)} = {memory.total:,}")
    return lines
