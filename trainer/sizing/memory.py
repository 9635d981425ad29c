"""Memory that a rank of a run needs, and whether it fits: the arithmetic, before anything is built. Torch-free.

A row costs its weights, the state of the row optimizer and the step of its last touch, as
:class:`embeddings.kernels.layout.Layout` lays them out; the sharding plan says how much of a table a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from embeddings.kernels.fbgemm.placement import FOR_TABLES, Placement, place
from embeddings.optim.registry import KINDS
from embeddings.tables.shardings import ROW_WISE, SHARDINGS
from trainer.spec import JobSpec, Table
from trainer.spec.checks.evaluation import ranks_catalogue
from trainer.spec.models.sequences import SequenceSpec
from trainer.spec.models.size import ModelSize

FLOAT_BYTES = 4
VALUE_BYTES = {"float32": FLOAT_BYTES, "float16": 2, "bfloat16": 2}
STEP_BYTES = 4
ID_BYTES = 8
NEIGHBOUR_BYTES = 4
# Of each row that a growing table can have: its id with its last step and its place among free ones, two to four places
# of the hash map with as many before while it is made larger, and the sketch's counters (embeddings.dynamic).
MAP_ROW_BYTES = 16 + 64 + 32
COUNTERS_PER_ROW_BYTES = 64
# Upper bounds. Ranks of a small job took 540 to 630 MiB with kernel fbgemm. The second:
# a run beside its ranks. Measured, of this host: 330 MB of what it was forked from, 180 of its own process with what it
# prepares; on a cluster the processes of Ray's head.
PROCESS_BYTES = 900 * 2**20
RUN_BYTES = 700 * 2**20
# Evaluation looks up batches of this size on each rank (trainer.evaluation.evaluator), training the global batch.
EVALUATION_BATCH_SIZE = 8192
# Rankings of all items score so many at once, of so many users (trainer.evaluation.full_ranking).
RANKED_SCORES = 1 << 24
RANKED_USERS = 1024
# Output, exchanged partial sums, gradient, and the copies of it that are sent: of float32 blocks [batch, dim].
BLOCKS_PER_FEATURE = 4
# Ids as they come, swapped, with weights, and as rows, places and order of the update.
WORDS_PER_ID = 6
# What a rank shares with others of its host: two segments, which grow by a quarter more than they must
# (embeddings.sharding.exchange.shm_transport).
SEGMENTS = 2.5
# Of what a step frees, at most so much is kept for the next (trainer.launch.worker.steady_memory).
KEPT_BYTES = 512 * 2**20


@dataclass(frozen=True)
class TableBytes:
    """Bytes of one table.

    ``per_rank``: on the rank that holds most of it; ``sharding``: ``planner`` where it is left open.
    """

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
    """Bytes of the fullest rank.

    ``copies``: of the tables, staged for a checkpoint that is written while training goes on; or of the largest alone,
    as a resume reads one after the other. ``graphs``: of SSE. ``ids``: the map from ids to rows of dynamic tables.
    ``exchange``: what is shared with the ranks of its host. ``kept``: what steps leave free for each other. ``on_gpu``:
    whether tables, batches and dense parameters are not in the host's memory. ``gpu_bytes``: what the rank's GPU has,
    None where that is not known. ``placed``: where kernel fbgemm puts tables then, which may be larger than the GPU.
    """

    by_table: dict[str, TableBytes]
    tables: int
    copies: int
    batches: int
    dense: int
    graphs: int = 0
    ids: int = 0
    exchange: int = 0
    kept: int = 0
    process: int = PROCESS_BYTES
    on_gpu: bool = False
    gpu_bytes: int | None = None
    placed: Placement | None = None

    @property
    def gpu(self) -> int:
        """Bytes on the rank's GPU."""
        tables = self.tables if self.placed is None else self.placed.gpu_bytes
        return tables + self.batches + self.dense if self.on_gpu else 0

    @property
    def host_tables(self) -> int:
        """Bytes of tables in the host's memory, but for their copies."""
        if not self.on_gpu:
            return self.tables
        return 0 if self.placed is None else self.placed.host_bytes

    @property
    def total(self) -> int:
        """Bytes in the host's memory."""
        worked_with = 0 if self.on_gpu else self.batches + self.dense
        kept = self.copies + self.graphs + self.ids + self.exchange + self.kept
        return self.host_tables + worked_with + kept + self.process


def row_bytes(kind: str, dim: int, stored: Table | None = None) -> int:
    """Return the bytes of one row: weight, state of optimizer ``kind``, and the step of the last touch.

    ``stored``: in which types, left out float32.
    """
    vectors, numbers = state_counts(kind)
    weight, state = value_bytes(stored)
    return dim * weight + (dim * vectors + numbers) * state + STEP_BYTES


def table_rows(job: JobSpec, counted: Mapping[str, int]) -> dict[str, int]:
    """Return the rows of each table, where so many were ``counted``: a dynamic table has as many as it can hold."""
    growths = {name: table.growth for name, table in job.tables.items()}
    return {name: rows if (growth := growths.get(name)) is None else growth.num_rows for name, rows in counted.items()}


def growing_bytes(job: JobSpec, counted: Mapping[str, int]) -> int:
    """Return the bytes of the maps from ids to rows of the dynamic tables, on every rank.

    They are places in a hash map, ids with their last steps, counters where they are asked for; and of each id of the
    data its hash.
    """
    found = 0
    for name, table in job.tables.items():
        if (growth := table.growth) is not None and name in counted:
            counters = COUNTERS_PER_ROW_BYTES if growth.admit_after > 1 else 0
            found += growth.capacity * (MAP_ROW_BYTES + counters) + counted[name] * ID_BYTES
    return found


def value_bytes(stored: Table | None) -> tuple[int, int]:
    """Return the bytes of an element of a row, and of its state."""
    if stored is None:
        return FLOAT_BYTES, FLOAT_BYTES
    return VALUE_BYTES[stored.dtype], VALUE_BYTES[stored.state_dtype]


def graph_bytes(num_rows: int, num_edges: int) -> int:
    """Return the bytes of a graph over so many rows.

    Edges count in both directions, and there is a threshold for each degree.
    """
    return ID_BYTES * (num_rows + 1) + 2 * num_edges * NEIGHBOUR_BYTES + ID_BYTES * min(num_rows, 2 * num_edges)


def state_counts(kind: str) -> tuple[int, int]:
    """Return (state vectors as wide as the row, single numbers) that optimizer ``kind`` keeps for a row."""
    optimizer = KINDS[kind].optimizer
    numbers = len(optimizer.row_state_names)
    return len(optimizer.state_names) - 1 - numbers, numbers


def sequence_ids(job: JobSpec) -> dict[str, float]:
    """Return how many ids of each key an example of a sequence model has at most; {} for other models."""
    model = job.model
    if not isinstance(model, SequenceSpec):
        return {}
    read, targets = model.ids_in_example
    return {"item": float(read), "item__target": float(targets), "item__negative": float(targets * model.num_negatives)}


def rank_memory(
    job: JobSpec,
    rows: Mapping[str, int],
    ids_per_example: Mapping[str, float],
    graphs: Mapping[str, tuple[str, int]] | None = None,
    gpu_bytes: int | None = None,
) -> RankMemory:
    """Return what the fullest rank of ``job`` holds at its peak.

    Args:
        job: the job, which says how tables are split, stored and trained.
        rows: rows of each table, padding and the unknown id among them, if every id had one.
        ids_per_example: how many ids of each feature an example has, on average or at most.
        graphs: for each graph of SSE, its table and number of edges.
        gpu_bytes: what the GPU of each rank has, where that is known (:func:`trainer.sizing.gpus.known_gpu_bytes`).
    """
    workers, kind = job.resources.num_workers, job.optimizer.kind
    ids, rows = growing_bytes(job, rows), table_rows(job, rows)
    # Whole tables go to the rank that holds least, largest first: what the planner's balance comes to.
    loads = [0] * workers
    shapes: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    by_table: dict[str, TableBytes] = {}
    whole: list[tuple[int, tuple[int, int]]] = []
    for name, count in rows.items():
        dim = job.model.table_columns(name)
        sharding = job.sharding.get(name, "table_wise" if workers == 1 else "planner")
        stored = job.tables.get(name)
        shape = _share(count, dim, sharding, workers)
        share = shape[0] * row_bytes(kind, shape[1], stored)
        by_table[name] = TableBytes(count, row_bytes(kind, dim, stored), sharding, share)
        if sharding == "table_wise":
            whole.append((share, shape))
            continue
        loads = [load + share for load in loads]
        for held in shapes:
            held.append(shape)
    for share, shape in sorted(whole, reverse=True):
        emptiest = loads.index(min(loads))
        loads[emptiest] += share
        shapes[emptiest].append(shape)
    tables = max(loads)
    fullest = shapes[loads.index(tables)]
    lookups, dim = sum(ids_per_example.values()), max((job.model.table_columns(name) for name in rows), default=0)
    # A part of a batch is looked up and differentiated at a time; its ids and the gradient of what they gave stay.
    part = -(-job.batch_size // job.micro_batches)
    at_once, whole_batch = max(part, EVALUATION_BATCH_SIZE), max(job.batch_size, EVALUATION_BATCH_SIZE)
    outputs = lookups if job.model.kind == "din" else len(ids_per_example)
    blocks = int(((BLOCKS_PER_FEATURE - 1) * at_once + whole_batch) * outputs * dim * FLOAT_BYTES)
    size = size_of(job, ids_per_example)
    # Passes of a regularizer of dropout are kept side by side, until they are differentiated together.
    kept_at_once = -(-part // workers) * job.regularizers.dropout_method.passes
    batches = int(whole_batch * lookups * WORDS_PER_ID * ID_BYTES) + blocks + _activations(size, kept_at_once)
    weights, sam = size.parameters, job.regularizers.sam
    if sam is not None and sam.of != "dense":
        # Of touched rows a copy with their state, their gradient, and what they become.
        touched = min(int(job.batch_size * lookups), sum(rows.values()))
        widest = max((table.row_bytes for table in by_table.values()), default=0)
        batches += touched * (widest + 2 * dim * FLOAT_BYTES)
    batches += _in_batch_scores(job) + _rankings(job, rows)
    on_gpu = job.resources.gpus_per_worker > 0
    # Outputs of all features, or all rows of sequences, or dense gradients; GPUs exchange without the host.
    largest = max(int(at_once * max(lookups, len(ids_per_example)) * dim), weights) * FLOAT_BYTES
    shares = workers > 1 and not on_gpu
    return RankMemory(
        by_table=by_table,
        tables=tables,
        copies=tables if job.checkpoint.asynchronous else max((t.per_rank for t in by_table.values()), default=0),
        batches=batches,
        # Weight, gradient, and two moments; with SAM the weight once more.
        dense=(4 if sam is None else 5) * weights * FLOAT_BYTES,
        graphs=_graphs(rows, graphs or {}),
        ids=ids,
        exchange=int(SEGMENTS * largest) if shares else 0,
        kept=0 if on_gpu else min(KEPT_BYTES, batches),
        on_gpu=on_gpu,
        gpu_bytes=gpu_bytes if on_gpu else None,
        placed=place(fullest, *state_counts(kind), int(FOR_TABLES * gpu_bytes))
        if on_gpu and gpu_bytes is not None and job.kernel == "fbgemm" and fullest
        else None,
    )


def _in_batch_scores(job: JobSpec) -> int:
    """Return the bytes of a softmax over the batch.

    They are the scores of a rank's samples against all, their logarithms, and the gradient.
    """
    if job.model.kind != "two_tower" or job.model.loss != "sampled_softmax":
        return 0
    return 3 * -(-job.batch_size // job.resources.num_workers) * job.batch_size * FLOAT_BYTES


def _rankings(job: JobSpec, rows: Mapping[str, int]) -> int:
    """Return the bytes to rank all items for each user (trainer.evaluation.full_ranking).

    They are the items on every rank, in two copies while they are put together, and a block of scores with a copy and
    comparisons.
    """
    if not ranks_catalogue(job):
        return 0
    items, users = rows.get("item", 0), rows.get("user", 0)
    block = min(RANKED_SCORES, min(RANKED_USERS, users) * items)
    return (2 * items * (job.model.embedding_dim + 1) + 3 * block) * FLOAT_BYTES


def _graphs(rows: Mapping[str, int], graphs: Mapping[str, tuple[str, int]]) -> int:
    """Return the bytes of the graphs; several are joined, in a copy."""
    return min(2, len(graphs)) * sum(graph_bytes(rows.get(table, 0), edges) for table, edges in graphs.values())


def _share(rows: int, dim: int, sharding: str, workers: int) -> tuple[int, int]:
    """Return (rows, columns) of a table on the rank that holds most of it.

    What is left to the planner is counted as split by rows: it can be, and where it needs to be, the planner must.
    """
    # On one host; on several a table that is split within a host takes more of its ranks.
    return SHARDINGS.get(sharding, ROW_WISE).largest_share(rows, dim, workers)


def size_of(job: JobSpec, ids_per_example: Mapping[str, float]) -> ModelSize:
    """Return the dense part of the job's model over features of so many ids each; other than one make a list."""
    lists = [ids for ids in ids_per_example.values() if ids != 1.0]
    return job.model.size(len(ids_per_example), num_lists=len(lists), list_ids=sum(lists))


def _activations(size: ModelSize, samples: int) -> int:
    """Return the bytes that a part of so many samples on this rank keeps for backward, with its gradients.

    A batch of evaluation keeps nothing; for it they are what it needs at once. Towers are counted as if it did keep
    them.
    """
    kept = 3 * samples * size.interaction
    at_once = 2 * EVALUATION_BATCH_SIZE * size.widest if size.interaction else 0
    return (3 * max(samples, EVALUATION_BATCH_SIZE) * size.tower + max(kept, at_once)) * FLOAT_BYTES


# --- does it fit? ----------------------------------------------------------------------------------------------------


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or of the container that this process is in."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))


def memory_problem(job: JobSpec, memory: RankMemory, machine_bytes: int | None) -> tuple[str, str] | None:
    """Return (what does not fit, with the arithmetic; the remedy), or None.

    ``resources.memory_bytes_per_worker`` is what each rank may take; ``machine_bytes`` what the whole run may take
    together, None where they run on machines that are not known here.
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
            _gpu_remedy(job, memory),
        )
    together = memory.total * workers + RUN_BYTES
    if machine_bytes is not None and together > machine_bytes:
        return (
            f"the run needs {together:,} bytes, this machine has {machine_bytes:,}: "
            f"{'; '.join(arithmetic(job, memory))}; {workers} ranks and {RUN_BYTES:,} beside them",
            "lower model.embedding_dim, take an optimizer with less state (sgd, rowwise_adagrad, rowwise_adam), "
            "or train on a larger machine",
        )
    return None


def table_budget(
    job: JobSpec,
    rows: Mapping[str, int],
    ids_per_example: Mapping[str, float],
    graphs: Mapping[str, tuple[str, int]] | None = None,
) -> int | None:
    """Return the bytes that a rank may use for tables where the job states a limit, for the planner.

    None where the job states none, or where tables are on GPUs, which have limits of their own.
    """
    limit = job.resources.memory_bytes_per_worker
    if limit is None or job.resources.gpus_per_worker:
        return None
    memory = rank_memory(job, rows, ids_per_example, graphs)
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
) -> None:
    """Refuse a job whose tables of these rows would not fit.

    Raises:
        MemoryError: with the arithmetic and the remedy.
    """
    problem = memory_problem(job, rank_memory(job, rows, ids_per_example, graphs, gpu_bytes), machine_bytes)
    if problem is not None:
        raise MemoryError(". Remedy: ".join(problem))


def _gpu_remedy(job: JobSpec, memory: RankMemory) -> str:
    """Return the remedy for a GPU that is too small.

    Kernel fbgemm needs no more of a GPU than a cache of its tables; batches are in its memory in any case.
    """
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
    """Return the remedy: how many ranks would suffice with every table split by rows.

    A rank's share of such a table shrinks with their number, and so does its copy.
    """
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
    """Return in words what a rank holds of a table."""
    if sharding not in SHARDINGS:
        return f"left to the planner, counted as split by rows over {workers}"
    way = SHARDINGS[sharding]
    if way.rows_over:
        return f"split by rows over {workers}"
    if way.columns_over:
        return f"{way.largest_share(1, dim, workers)[1]} of {dim} columns on a rank"
    return "whole on every rank" if way.replicated else "whole on one rank"


def arithmetic(job: JobSpec, memory: RankMemory) -> list[str]:
    """Return the sum in words, a line for each table and one for the rank."""
    workers, kind = job.resources.num_workers, job.optimizer.kind
    vectors, numbers = state_counts(kind)
    lines = []
    for name, table in memory.by_table.items():
        dim = job.model.table_columns(name)
        weight, state = value_bytes(job.tables.get(name))
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
        ("who has which row", memory.ids),
        ("memory shared with other ranks", memory.exchange),
        ("kept from step to step", memory.kept),
        ("process", memory.process),
    ):
        if number:
            parts.append(f"{words} {number:,}")
    lines.append(f"peak per rank = {' + '.join(parts)} = {memory.total:,}")
    return lines
