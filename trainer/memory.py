"""What a rank of a run holds in memory, and whether it fits: the arithmetic, before anything is built. Torch-free.

A row costs its weights, the state of the row optimizer and the step of its last touch, as
:class:`embeddings.kernels.layout.Layout` lays them out; the sharding plan says how much of a table a rank holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from embeddings.optim import SGD, Adagrad, AdagradAR, Adam, AdamAR, AdamW, RowOptimizer, RowwiseAdagrad
from trainer.available import SEQUENCE_MODELS
from trainer.spec import JobSpec

OPTIMIZERS: dict[str, type[RowOptimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "adagradw": Adagrad,
    "adagrad_ar": AdagradAR,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": Adam,
    "adamw": AdamW,
    "adam_ar": AdamAR,
}
"""The row optimizer's class, which names its state, by ``optimizer.kind``."""

FLOAT_BYTES = 4
STEP_BYTES = 4
ID_BYTES = 8
# Upper bounds. Ranks of a small job took 540 to 630 MiB with kernel fbgemm; Numba's compiler comes on top. The second:
# measured, the processes of Ray's head.
PROCESS_BYTES = 900 * 2**20
RAY_BYTES = 700 * 2**20
# On one host; on several a table that is split within a host takes more of its ranks.
_BY_ROWS = ("row_wise", "table_row_wise", "grid")
_BY_COLUMNS = ("column_wise", "table_column_wise")
# Evaluation looks up batches of this size on each rank (trainer.loop), training the global batch.
EVALUATION_BATCH_SIZE = 8192
# Output, exchanged partial sums, gradient, and the copies of it that are sent: of float32 blocks [batch, dim].
BLOCKS_PER_FEATURE = 4
# Ids as they come, swapped, with weights, and as rows, places and order of the update.
WORDS_PER_ID = 6


@dataclass(frozen=True)
class TableBytes:
    """One table. ``per_rank``: on the rank that holds most of it; ``sharding``: ``planner`` where it is left open."""

    rows: int
    row_bytes: int
    sharding: str
    per_rank: int

    @property
    def total(self) -> int:
        """The whole table, once."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the fullest rank. ``copies``: of the tables, staged for a checkpoint that is written while training goes
    on; or of the largest alone, as a resume reads one after the other."""

    by_table: dict[str, TableBytes]
    tables: int
    copies: int
    batches: int
    dense: int
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        return self.tables + self.copies + self.batches + self.dense + self.process


def row_bytes(kind: str, dim: int) -> int:
    """Bytes of one row: weight, state of optimizer ``kind``, and the step of the last touch."""
    vectors, numbers = state_counts(kind)
    return FLOAT_BYTES * (dim * (1 + vectors) + numbers) + STEP_BYTES


def state_counts(kind: str) -> tuple[int, int]:
    """(state vectors as wide as the row, single numbers) that optimizer ``kind`` keeps for a row."""
    optimizer = OPTIMIZERS[kind]
    numbers = len(optimizer.row_state_names)
    return len(optimizer.state_names) - 1 - numbers, numbers


def table_dim(job: JobSpec, table: str) -> int:
    """Columns of a table, as trainer.models has them: bpr's items have a bias beside their vector, item2vec's an output
    vector."""
    if job.model.kind == "item2vec":
        return 2 * job.model.embedding_dim
    return job.model.embedding_dim + (1 if job.model.kind == "bpr" and table == "item" else 0)


def sequence_ids(job: JobSpec) -> dict[str, float]:
    """At most so many ids of each key an example of a model of sequences has; {} for other models."""
    model = job.model
    if model.kind not in SEQUENCE_MODELS:
        return {}
    read, targets = (1, 2 * model.window) if model.kind == "item2vec" else (model.length, model.length)
    return {"item": float(read), "item__target": float(targets), "item__negative": float(targets * model.num_negatives)}


def rank_memory(job: JobSpec, rows: Mapping[str, int], ids_per_example: Mapping[str, float]) -> RankMemory:
    """What the fullest rank of ``job`` holds at its peak.

    Args:
        rows: rows of each table, padding and the unknown id among them.
        ids_per_example: how many ids of each feature an example has, on average or at most.
    """
    workers, kind = job.resources.num_workers, job.optimizer.kind
    # Whole tables go to the rank that holds least, largest first: what the planner's balance comes to.
    loads = [0] * workers
    by_table: dict[str, TableBytes] = {}
    whole: list[tuple[int, str]] = []
    for name, count in rows.items():
        dim = table_dim(job, name)
        sharding = job.sharding.get(name, "table_wise" if workers == 1 else "planner")
        share = _share(count, dim, sharding, workers, kind)
        by_table[name] = TableBytes(count, row_bytes(kind, dim), sharding, share)
        if sharding == "table_wise":
            whole.append((share, name))
        else:
            loads = [load + share for load in loads]
    for share, _ in sorted(whole, reverse=True):
        loads[loads.index(min(loads))] += share
    tables = max(loads)
    lookups, dim = sum(ids_per_example.values()), job.model.embedding_dim
    batch = max(job.batch_size, EVALUATION_BATCH_SIZE)
    blocks = BLOCKS_PER_FEATURE * batch * len(ids_per_example) * dim * FLOAT_BYTES
    widths = _widths(job, len(ids_per_example))
    activations = 3 * max(-(-job.batch_size // workers), EVALUATION_BATCH_SIZE) * sum(widths) * FLOAT_BYTES
    weights = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    return RankMemory(
        by_table=by_table,
        tables=tables,
        copies=tables if job.checkpoint.asynchronous else max((t.per_rank for t in by_table.values()), default=0),
        batches=int(batch * lookups * WORDS_PER_ID * ID_BYTES) + blocks + activations,
        # Weight, gradient, and two moments.
        dense=4 * weights * FLOAT_BYTES,
    )


def _share(rows: int, dim: int, sharding: str, workers: int, kind: str) -> int:
    """Bytes of a table on the rank that holds most of it. What is left to the planner is counted as split by rows: it
    can be, and where it needs to be, the planner must."""
    if sharding in ("table_wise", "data_parallel"):
        return rows * row_bytes(kind, dim)
    if sharding in _BY_COLUMNS:
        return rows * row_bytes(kind, _columns(dim, workers))
    return -(-rows // workers) * row_bytes(kind, dim)


def _columns(dim: int, workers: int) -> int:
    """Columns of a shard: equal multiples of four, at most as many as workers, or all of them (trainer.planning)."""
    return next((width for width in range(-(-dim // workers), dim) if dim % width == 0 and width % 4 == 0), dim)


def _widths(job: JobSpec, num_features: int) -> list[int]:
    if job.model.kind in ("bpr", "item2vec"):
        return []
    return [num_features * job.model.embedding_dim, *job.model.hidden, 1]


# --- does it fit? ----------------------------------------------------------------------------------------------------


def machine_memory_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def memory_problem(job: JobSpec, memory: RankMemory, machine_bytes: int | None) -> tuple[str, str] | None:
    """(what does not fit, with the arithmetic; the remedy), or None.

    ``resources.memory_bytes_per_worker`` is what each rank may take; ``machine_bytes`` what all ranks and Ray may take
    together, None where they run on machines that are not known here.
    """
    workers, limit = job.resources.num_workers, job.resources.memory_bytes_per_worker
    if limit is not None and memory.total > limit:
        return (
            f"a rank needs {memory.total:,} bytes, resources.memory_bytes_per_worker is {limit:,}: "
            f"{'; '.join(arithmetic(job, memory))}",
            _remedy(job, memory, limit),
        )
    together = memory.total * workers + RAY_BYTES
    if machine_bytes is not None and together > machine_bytes:
        return (
            f"the run needs {together:,} bytes, this machine has {machine_bytes:,}: "
            f"{'; '.join(arithmetic(job, memory))}; {workers} ranks and {RAY_BYTES:,} for Ray",
            "lower model.embedding_dim, take an optimizer with less state (sgd, kernel fbgemm with rowwise_adagrad), "
            "or train on a larger machine",
        )
    return None


def table_budget(job: JobSpec, rows: Mapping[str, int], ids_per_example: Mapping[str, float]) -> int | None:
    """What a rank may use for tables where the job states a limit, for the planner; None where it does not."""
    limit = job.resources.memory_bytes_per_worker
    if limit is None:
        return None
    memory = rank_memory(job, rows, ids_per_example)
    room = limit - (memory.total - memory.tables - memory.copies)
    # Their copies for checkpoints take as much again.
    return max(0, room // 2)


def refuse_what_cannot_fit(
    job: JobSpec, rows: Mapping[str, int], ids_per_example: Mapping[str, float], machine_bytes: int | None
) -> None:
    """Raises MemoryError, with the arithmetic and the remedy, for tables of these rows that would not fit."""
    problem = memory_problem(job, rank_memory(job, rows, ids_per_example), machine_bytes)
    if problem is not None:
        raise MemoryError(". Remedy: ".join(problem))


def _remedy(job: JobSpec, memory: RankMemory, limit: int) -> str:
    """How many ranks would do with every table split by rows, which shrinks with them, and so does its copy."""
    room = limit - (memory.total - memory.tables - memory.copies)
    if room <= 0:
        return "allow more: the process and its batches alone do not fit; a smaller batch_size needs less"
    # A row more for each table, since ranks hold whole rows.
    total = sum(table.total + job.resources.num_workers * table.row_bytes for table in memory.by_table.values())
    ranks = max(-(-2 * total // room), job.resources.num_workers)
    whole = [name for name, table in memory.by_table.items() if table.sharding not in (*_BY_ROWS, "planner")]
    split = f"sharding: {{{', '.join(f'{name}: row_wise' for name in whole)}}} with " if whole else ""
    return f"{split}resources.num_workers: {ranks} would fit, or a smaller model.embedding_dim"


def arithmetic(job: JobSpec, memory: RankMemory) -> list[str]:
    """The sum in words, a line for each table and one for the rank."""
    workers, kind = job.resources.num_workers, job.optimizer.kind
    vectors, numbers = state_counts(kind)
    lines = []
    for name, table in memory.by_table.items():
        dim = table_dim(job, name)
        held = {
            "table_wise": "whole on one rank",
            "data_parallel": "whole on every rank",
            **dict.fromkeys(_BY_COLUMNS, f"{_columns(dim, workers)} of {dim} columns on a rank"),
            "planner": f"left to the planner, counted as split by rows over {workers}",
        }.get(table.sharding, f"split by rows over {workers}")
        lines.append(
            f"table {name}: {table.rows:,} rows x (dim {dim} x {FLOAT_BYTES} x (weight + {vectors} state vectors of "
            f"{kind}){f' + {numbers * FLOAT_BYTES} for its sum' if numbers else ''} + {STEP_BYTES} for the step of its "
            f"last touch) = "
            f"{table.total:,} bytes, {held}: {table.per_rank:,}"
        )
    lines.append(
        f"peak per rank = tables {memory.tables:,} + their copies for checkpoints {memory.copies:,} + batches and "
        f"activations {memory.batches:,} + dense parameters {memory.dense:,} + process {memory.process:,} = "
        f"{memory.total:,}"
    )
    return lines
