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
from embeddings.tables.element_types import ELEMENT_TYPES
from embeddings.tables.shardings import ROW_WISE, SHARDINGS, TABLE_WISE
from trainer.data.one_pass.windows import WINDOW_ROWS
from trainer.sizing.row_shape import RowShape
from trainer.spec import JobSpec, Table
from trainer.spec.checks.evaluation import ranks_catalogue
from trainer.spec.losses import LEAST_TARGETS_AT_ONCE, SCORES_AT_ONCE
from trainer.spec.models.sequences import SequenceSpec
from trainer.spec.models.several_labels import SeveralLabelsSpec
from trainer.spec.models.size import ModelSize
from trainer.spec.models.two_tower import TwoTowerSpec

FLOAT_BYTES = 4
STEP_BYTES = 4
ID_BYTES = 8
NEIGHBOUR_BYTES = 4
# Bytes of each row that a dynamic table can have: its id, last step and position among free rows; two to four slots of
# the hash map, and the old slots while it grows. COUNTERS_PER_ROW_BYTES: counters of the sketch (embeddings.dynamic).
MAP_ROW_BYTES = 16 + 64 + 32
COUNTERS_PER_ROW_BYTES = 64
# Bytes of each row of the table that a one-pass job publishes: the count of its id, and a string of about 50 bytes.
PUBLISHED_ID_BYTES = 8 + 8 + 104
# Windows of rows that a one-pass job holds: the one being trained on, with its copy in training order and the window
# after it; a finished one; and one in work with the columns that it is made from.
WINDOWS_HELD = 10
# Upper bounds. PROCESS_BYTES: a rank without its tables and batches; with kernel fbgemm, ranks of a small job took 540
# to 630 MiB. RUN_BYTES: the other processes of a run on this host. Measured: 330 MB for the process that runs are
# forked from, and 180 MB for the run's main process while it prepares data. On a cluster, Ray's head needs this memory.
PROCESS_BYTES = 900 * 2**20
RUN_BYTES = 700 * 2**20
# Evaluation looks up batches of this size on each rank (trainer.evaluation.evaluator), training the global batch.
EVALUATION_BATCH_SIZE = 8192
# Rankings of all items compute this many scores at once, of this many users (trainer.evaluation.full_ranking).
RANKED_SCORES = 1 << 24
RANKED_USERS = 1024
# Float32 blocks [batch, dim] for each feature: output, exchanged partial sums, gradient, and the copy that is sent.
BLOCKS_PER_FEATURE = 4
# Words for each id of a batch: the id as read, swapped, its weight, its row, its position and its order in the update.
WORDS_PER_ID = 6
# Copies of a batch's numbers: as gathered from the files, as arranged, and those read ahead.
COPIES_OF_NUMBERS = 4
# Memory shared with the host's other ranks, in units of the largest exchange: two segments, a quarter too large
# (embeddings.sharding.exchange.shm_transport).
SEGMENTS = 2.5
# Most memory freed by a step that the allocator keeps for the next step (trainer.launch.worker.steady_memory).
KEPT_BYTES = 512 * 2**20


@dataclass(frozen=True)
class TableBytes:
    """Memory of one table.

    ``per_rank``: bytes on the rank that holds the largest part of the table. ``sharding``: name of the sharding, or
    ``planner`` if the job leaves the choice to the planner.
    """

    rows: int
    row_bytes: int
    sharding: str
    per_rank: int

    @property
    def total(self) -> int:
        """Bytes of one copy of the whole table."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class RankMemory:
    """Predicted memory of the rank that needs most, in bytes.

    ``copies``: copies of all tables if checkpoints are written while training continues; otherwise a copy of the
    largest table, because a resume reads one after the other. ``graphs``: graphs of SSE. ``ids``: maps from ids to rows
    of dynamic tables, and ids of rows that a one-pass job has read. ``exchange``: memory shared with the ranks of its
    host. ``kept``: memory that a step frees and the allocator keeps for the next. ``on_gpu``: True if tables, batches
    and dense parameters are on the GPU. ``gpu_bytes``: memory of the rank's GPU; None: not known. ``placed``: division
    of the tables between GPU and host by kernel fbgemm, with which they may be larger than the GPU.
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
        """Bytes of tables in the host's memory, without their copies."""
        if not self.on_gpu:
            return self.tables
        return 0 if self.placed is None else self.placed.host_bytes

    @property
    def total(self) -> int:
        """Bytes in the host's memory."""
        worked_with = 0 if self.on_gpu else self.batches + self.dense
        held = self.copies + self.graphs + self.ids + self.exchange + self.kept
        return self.host_tables + worked_with + held + self.process


def row_bytes(kind: str, dim: int, stored: Table) -> int:
    """Return the bytes of one row: weight, state of optimizer ``kind``, and the step of the last touch."""
    vectors, numbers = state_counts(kind)
    weight, state = value_bytes(stored)
    return dim * weight + (dim * vectors + numbers) * state + STEP_BYTES


def state_counts(kind: str) -> tuple[int, int]:
    """Return (state vectors as wide as the row, single numbers) that optimizer ``kind`` keeps for a row."""
    optimizer = KINDS[kind].optimizer
    numbers = len(optimizer.row_state_names)
    return len(optimizer.state_names) - 1 - numbers, numbers


def value_bytes(stored: Table) -> tuple[int, int]:
    """Return the bytes of an element in (a row, its optimizer state)."""
    return ELEMENT_TYPES[stored.dtype].num_bytes, ELEMENT_TYPES[stored.state_dtype].num_bytes


def table_rows(job: JobSpec, counted: Mapping[str, int]) -> dict[str, int]:
    """Return the number of rows by table: ``counted`` rows, or, for a dynamic table, as many as it can hold."""
    growths = {name: table.id_map for name, table in job.tables.items()}
    return {name: rows if (growth := growths.get(name)) is None else growth.num_rows for name, rows in counted.items()}


def sequence_ids(job: JobSpec) -> dict[str, float]:
    """Return {key: largest number of ids in an example} of a sequence model; {} for other models."""
    model = job.model
    if not isinstance(model, SequenceSpec):
        return {}
    read, targets = model.ids_in_example
    # Shared negatives are counted for a batch, not for an example (_shared_items).
    negatives = targets * model.num_negatives if model.compared_with == "own" else 0
    return {"item": float(read), "item__target": float(targets), "item__negative": float(negatives)}


def rank_memory(
    job: JobSpec,
    rows: Mapping[str, int],
    ids_per_example: Mapping[str, float],
    graphs: Mapping[str, tuple[str, int]] | None = None,
    gpu_bytes: int | None = None,
    *,
    shape: RowShape | None = None,
) -> RankMemory:
    """Predict the peak memory of the fullest rank of ``job``.

    Args:
        job: the job, which says how tables are split, stored and trained.
        rows: table -> its number of rows if every id has a row, including the rows of padding and of the unknown id.
        ids_per_example: feature -> the number of ids in an example, on average or at most.
        graphs: by graph of SSE, (its table, its number of edges).
        gpu_bytes: memory of each rank's GPU (:func:`trainer.sizing.gpus.known_gpu_bytes`); None: not known.
        shape: the inputs of a row other than ids; None: a single label, and nothing else.
    """
    shape = shape or RowShape()
    id_bytes = _map_bytes(job, rows, shape.published_table) + window_bytes(job, ids_per_example)
    rows = table_rows(job, rows)
    by_table, tables, shapes = _fullest_rank(job, rows)
    size = size_of(job, ids_per_example, shape)
    workers, sam, on_gpu = job.resources.num_workers, job.regularizers.sam, job.resources.gpus_per_worker > 0
    num_ids, num_features = sum(ids_per_example.values()), len(ids_per_example)
    columns = max((job.model.table_columns(name) for name in rows), default=0)
    # A micro-batch is looked up and differentiated at a time; evaluation has a batch size of its own.
    part = -(-job.batch_size // job.micro_batches)
    at_once, whole = max(part, EVALUATION_BATCH_SIZE), max(job.batch_size, EVALUATION_BATCH_SIZE)

    batches = int(whole * num_ids * WORDS_PER_ID * ID_BYTES)
    outputs = num_ids if job.model.keeps_rows_of_lists else num_features
    # Only the gradients cover the whole batch.
    batches += int(((BLOCKS_PER_FEATURE - 1) * at_once + whole) * outputs * columns * FLOAT_BYTES)
    batches += COPIES_OF_NUMBERS * whole * shape.columns * FLOAT_BYTES
    # The passes of a dropout regularizer are kept until they are differentiated together.
    batches += _activations(size, -(-part // workers) * job.regularizers.dropout_method.passes)
    if sam is not None and sam.of != "dense":
        # For touched rows: a copy with their state, their gradients, and their new values.
        touched = min(int(job.batch_size * num_ids), sum(rows.values()))
        widest = max((table.row_bytes for table in by_table.values()), default=0)
        batches += touched * (widest + 2 * columns * FLOAT_BYTES)
    if job.model.is_softmax_of_batch:
        # A block of scores of the rank's samples against all items of the batch, and two copies.
        block = max(LEAST_TARGETS_AT_ONCE, SCORES_AT_ONCE // job.batch_size)
        batches += 3 * min(block, -(-job.batch_size // workers)) * job.batch_size * FLOAT_BYTES
    if ranks_catalogue(job):
        # The items on every rank, in two copies while they are put together; a block of scores with a copy and
        # comparisons (trainer.evaluation.full_ranking).
        items, users = rows.get("item", 0), rows.get("user", 0)
        block = min(RANKED_SCORES, min(RANKED_USERS, users) * items)
        batches += (2 * items * (job.model.embedding_dim + 1) + 3 * block) * FLOAT_BYTES
    batches += _shared_items(job, rows)

    exchange = 0
    if workers > 1 and not on_gpu:
        # The largest exchange sends the outputs of all features, or all rows of sequences, or dense gradients.
        outputs = at_once * max(num_ids, num_features) * columns
        exchange = int(SEGMENTS * (max(int(outputs), size.parameters) * FLOAT_BYTES))
    graphs, placed = graphs or {}, None
    if on_gpu and gpu_bytes is not None and job.kernel == "fbgemm" and shapes:
        placed = place(shapes, *state_counts(job.optimizer.kind), int(FOR_TABLES * gpu_bytes))
    return RankMemory(
        by_table=by_table,
        tables=tables,
        copies=tables if job.checkpoint.asynchronous else max((t.per_rank for t in by_table.values()), default=0),
        batches=batches,
        # Weight, gradient, and two moments; with SAM the weight once more.
        dense=(4 if sam is None else 5) * size.parameters * FLOAT_BYTES,
        # Several graphs are joined, in a copy.
        graphs=min(2, len(graphs)) * sum(_graph_bytes(rows.get(table, 0), edges) for table, edges in graphs.values()),
        ids=id_bytes,
        exchange=exchange,
        kept=0 if on_gpu else min(KEPT_BYTES, batches),
        on_gpu=on_gpu,
        gpu_bytes=gpu_bytes if on_gpu else None,
        placed=placed,
    )


def _fullest_rank(job: JobSpec, rows: Mapping[str, int]) -> tuple[dict[str, TableBytes], int, list[tuple[int, int]]]:
    """Return (bytes by table, bytes of tables on the rank that holds most, shapes of the table parts on that rank)."""
    workers, kind = job.resources.num_workers, job.optimizer.kind
    loads = [0] * workers
    shapes: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    by_table: dict[str, TableBytes] = {}
    whole: list[tuple[int, tuple[int, int]]] = []
    for name, count in rows.items():
        dim = job.model.table_columns(name)
        sharding = job.sharding.get(name, TABLE_WISE.name if workers == 1 else "planner")
        stored = job.table(name)
        # A table left to the planner counts as split by rows, which the planner does where needed. Shares are those on
        # one host; with several hosts, a table that is split within one host takes more of its ranks' memory.
        shape = SHARDINGS.get(sharding, ROW_WISE).largest_share(count, dim, workers)
        share = shape[0] * row_bytes(kind, shape[1], stored)
        by_table[name] = TableBytes(count, row_bytes(kind, dim, stored), sharding, share)
        if sharding == TABLE_WISE.name:
            whole.append((share, shape))
            continue
        loads = [load + share for load in loads]
        for held in shapes:
            held.append(shape)
    # Whole tables go to the rank that holds least, largest first. The planner's balance has about the same result.
    for share, shape in sorted(whole, reverse=True):
        emptiest = loads.index(min(loads))
        loads[emptiest] += share
        shapes[emptiest].append(shape)
    return by_table, max(loads), shapes[loads.index(max(loads))]


def _map_bytes(job: JobSpec, counted: Mapping[str, int], published: str | None) -> int:
    """Return the bytes, on every rank, of the maps from ids to rows of the dynamic tables."""
    # If rows are prepared, a hash for each id of the data.
    size, known = 0, 0 if job.dataset.one_pass else ID_BYTES
    for name, table in job.tables.items():
        if (growth := table.id_map) is not None and name in counted:
            counters = COUNTERS_PER_ROW_BYTES if growth.admission_threshold > 1 else 0
            of_published = PUBLISHED_ID_BYTES if job.dataset.one_pass and published == name else 0
            size += growth.capacity * (MAP_ROW_BYTES + counters + of_published) + counted[name] * known
    return size


def window_bytes(job: JobSpec, ids_per_example: Mapping[str, float]) -> int:
    """Return the bytes, on every rank, of rows that a one-pass job has read but not yet trained on; 0 for others."""
    if not job.dataset.one_pass:
        return 0
    return int(WINDOWS_HELD * WINDOW_ROWS * sum(ids_per_example.values()) * ID_BYTES)


def _graph_bytes(num_rows: int, num_edges: int) -> int:
    # Edges count in both directions, and there is one sampling threshold for each distinct degree.
    return ID_BYTES * (num_rows + 1) + 2 * num_edges * NEIGHBOUR_BYTES + ID_BYTES * min(num_rows, 2 * num_edges)


def _shared_items(job: JobSpec, rows: Mapping[str, int]) -> int:
    """Return the bytes of items that all targets of a batch share: rows, copies, gradients, and a block of scores."""
    if not isinstance(job.model, SequenceSpec) or job.model.compared_with == "own":
        return 0
    items = rows.get("item", 0) if job.model.compared_with == "all" else job.model.num_negatives
    block = max(SCORES_AT_ONCE, LEAST_TARGETS_AT_ONCE * items)
    return ((BLOCKS_PER_FEATURE + 2) * items * job.model.embedding_dim + 2 * block) * FLOAT_BYTES


def size_of(job: JobSpec, ids_per_example: Mapping[str, float], shape: RowShape | None = None) -> ModelSize:
    """Return the size of the dense part of the job's model.

    ``ids_per_example``: number of ids by feature; a feature with another number than 1 is a list.
    """
    model, shape = job.model, shape or RowShape()
    lists = [ids for ids in ids_per_example.values() if ids != 1.0]
    fields = len(ids_per_example) + len(shape.vectors)
    if isinstance(model, SeveralLabelsSpec):
        size = model.size(fields, num_dense=shape.num_dense, num_labels=shape.num_labels)
    elif isinstance(model, TwoTowerSpec):
        size = model.size(
            fields, num_dense=shape.num_dense, item_fields=shape.item_fields, item_numbers=shape.item_numbers
        )
    else:
        size = model.size(fields, num_dense=shape.num_dense, num_lists=len(lists), list_ids=sum(lists))
    for one in shape.vectors:
        columns = model.table_columns(one.name)
        weights = one.dim * columns
        size += ModelSize(weights + columns, 0, one.dim + columns, one.dim, weights)
    return size


def _activations(size: ModelSize, samples: int) -> int:
    """Return the bytes of activations and their gradients for a micro-batch of ``samples`` samples on a rank."""
    # Evaluation keeps no activations, and needs those of one layer at a time; towers are counted as if it kept them.
    held = 3 * samples * size.interaction
    at_once = 2 * EVALUATION_BATCH_SIZE * size.widest if size.interaction else 0
    return (3 * max(samples, EVALUATION_BATCH_SIZE) * size.tower + max(held, at_once)) * FLOAT_BYTES


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or of the container that this process is in."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return total if limit == "max" else min(total, int(limit))
