"""Construction of a sharded model from a job spec and its prepared data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from embeddings.kernels.backends import Backend
from embeddings.optim.registry import KINDS
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, Pooling, TableConfig
from embeddings.tables.element_types import COMPUTE_TYPE
from trainer.data.batches.keys import Key
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.vectors import Vector, given_columns
from trainer.data.prepare.plan import NEGATIVE_SUFFIX
from trainer.distributed.sharded_model import (
    PlanRequest,
    ShardedModel,
    TableSettings,
    Workload,
    embedding_bag_collection,
    embedding_collection,
    shard_model,
)
from trainer.models.base import ModelInputs, RankingModel
from trainer.models.registry import MODELS
from trainer.models.sse_labels import target_configs
from trainer.sizing.memory import sequence_ids, table_rows
from trainer.sizing.memory_limit import table_budget
from trainer.sizing.row_shape import RowShape
from trainer.spec import JobSpec
from trainer.spec.label_tasks import LabelTask
from trainer.spec.losses import loss_of, loss_settings_of
from trainer.spec.optimizer import row_optimizer

BACKENDS: dict[str, Backend | None] = {"evenkeel": None, "fbgemm": "fbgemm"}
"""The backend of embedding tables by the job's ``kernel``; None: this project's kernel for the tables' device."""


def build(
    job: JobSpec,
    data: PreparedData,
    *,
    alpha: float | None,
    epoch_steps: int | None = None,
    backend: Backend | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> ShardedModel:
    """Return the job's model with initial values, its tables sharded over the ranks. Collective.

    ``alpha``: strength of AdamAR's adaptive decay, None for other optimizers. ``epoch_steps``: steps that ``decay:
    by_epoch`` counts as an epoch; None: the steps per epoch of the data. ``backend``: of the tables; None: by the job's
    ``kernel``. ``dtype``: the type of dense parameters and computations. ``device``: None means the CPU.
    """
    tables = table_configs(job, data)
    ids_per_example = {key.name: key.usual_ids or (5.0 if key.is_list else 1.0) for key in data.keys}
    ids_per_example |= sequence_ids(job)
    weighted = any(key.weighted for key in data.keys)
    embeddings = embedding_bag_collection(tables, weighted) if job.model.pools else embedding_collection(tables)
    model = model_of(
        job, data.keys, embeddings,
        num_dense=data.num_dense, num_item_numbers=data.num_item_numbers, vectors=data.vectors, dtype=dtype,
        tasks=data.tasks,
    )  # fmt: skip
    model.begin(data)
    settings = TableSettings.of(
        tables,
        row_optimizer(job.optimizer, alpha, epoch_steps or data.steps_per_epoch),
        sse_configs(job, data),
        seed=job.seed,
        backend=backend or BACKENDS[job.kernel],
        dtype=dtype,
        dtypes=_stored({table.name: job.table(table.name).dtype for table in tables}),
        state_dtypes=_stored({table.name: job.table(table.name).state_dtype for table in tables}),
    )
    rows = {table.name: table.num_rows for table in tables}
    numbers = data.num_dense - data.num_item_numbers, data.num_item_numbers
    item_ids = [key.name for key in data.keys if key.of_item]
    published = None if job.publish is None else next(k.table for k in data.keys if k.name == job.publish.feature)
    shape = RowShape.made(len(data.tasks), numbers, data.vectors, item_ids, published)
    graphs = {name: (graph["table"], graph["edges"]) for name, graph in data.graphs.items()}
    # On one rank tables are whole, and ids are swapped inside the lookup; on several ranks the planner decides.
    whole = {table.name: "table_wise" for table in tables} if dist.get_world_size() == 1 else {}
    plan = PlanRequest(
        {**whole, **job.sharding},
        Workload(max(1, job.batch_size // dist.get_world_size()), ids_per_example),
        table_budget(job, rows, ids_per_example, graphs, shape=shape),
    )
    return shard_model(model, settings, plan, device=device)


def model_of(
    job: JobSpec,
    keys: Sequence[Key],
    embeddings: nn.Module,
    *,
    num_dense: int = 0,
    num_item_numbers: int = 0,
    vectors: Sequence[Vector] = (),
    dtype: torch.dtype = torch.float32,
    tasks: tuple[LabelTask, ...] = (),
) -> RankingModel:
    """Return the job's model around the module ``embeddings``, its dense part at initial values, not sharded.

    ``keys`` describe the features of a batch that have ids.
    """
    inputs = ModelInputs(
        tuple(keys), num_dense + given_columns(vectors), job.seed, dtype, job.regularizers.dropout, tasks,
        num_item_numbers + given_columns(vectors, of_item=True), tuple(one for one in vectors if one.projected),
    )  # fmt: skip
    model = MODELS[job.model.kind](embeddings, job.model, inputs)
    model.loss_kind, model.loss_settings = loss_of(job), loss_settings_of(job)
    return model


def _stored(types: Mapping[str, str]) -> dict[str, torch.dtype]:
    """Return torch types by table for the names of types that are not the compute type."""
    return {name: getattr(torch, one) for name, one in types.items() if one != COMPUTE_TYPE}


def table_configs(job: JobSpec, data: PreparedData) -> list[TableConfig]:
    """Return the configurations of tables, a table for each vocabulary of the data, as wide as the model needs."""
    init = job.model.effective_init
    rows = table_rows(job, {name: table.num_rows for name, table in data.tables.items()})
    grows = {name for name, table in job.tables.items() if table.id_map is not None}
    return [
        TableConfig(
            name=name,
            num_rows=rows[name],
            dim=job.model.table_columns(name),
            features=table.features,
            pooling={key.name: pooling_of(job, key) for key in data.keys if key.table == name},
            init=InitConfig(init.kind, init.std),
            row_keys=data.row_keys(name) if init.kind == "hash" and name not in grows else None,
            grows=name in grows,
        )
        for name, table in data.tables.items()
    ]


def pooling_of(job: JobSpec, key: Key) -> Pooling:
    """Return the pooling of a key's rows: "none" if the model takes one row for each id."""
    if not job.model.pools:
        return "none"
    return "mean" if key.is_list and key.pooling == "mean" else "sum"


def sse_configs(job: JobSpec, data: PreparedData) -> dict[str, SSEConfig]:
    """Return the SSE configuration (random swaps of ids) by key of the batches, for keys that use SSE.

    Keys are features, drawn negatives, which follow their feature, and the model's targets. Dynamic tables are left
    out, because trainer.distributed.dynamic_tables swaps their ids.
    """
    names = {key.name for key in data.keys}
    # Ids of dynamic tables are swapped among the rows in use (trainer.distributed.dynamic_tables).
    grows = {key.name for key in data.keys if key.table in job.tables and job.tables[key.table].id_map is not None}
    names -= grows
    graphs = {name: data.graph(name) for name in data.graphs}
    configs = target_configs(job)
    for feature, sse in job.sse.items():
        if feature == "label" or not sse.probability:
            continue
        restart = None if sse.walk is None else sse.walk.restart
        graph = None if sse.graph is None else graphs[sse.graph]
        config = SSEConfig(sse.probability, graph, sse.rho, restart, sse.include_unknown)
        # Negatives are swapped like the feature that they are drawn for, unless only the negatives are targets.
        targets = MODELS[job.model.kind].targets
        sides = [feature] if feature not in targets and feature + NEGATIVE_SUFFIX in targets else []
        configs |= {name: config for name in sides or (feature, feature + NEGATIVE_SUFFIX) if name in names}
    return configs


DEFAULT_HALF_LIFE = 0.3
"""Epochs in which an idle row loses half its norm if the job says ``alpha: default``; found by the recipe ``alpha``."""


DEFAULT_HALF_LIFE_BY_EPOCH = 0.5
"""DEFAULT_HALF_LIFE for jobs with ``decay: by_epoch``, for gaps within an epoch (docs/reports/one_epoch.md)."""


def default_alpha(steps_per_epoch: int, decay: str = "at_read") -> float:
    """Return alpha for jobs that say ``default``: an idle row loses half its norm in DEFAULT_HALF_LIFE epochs.

    ``decay: by_epoch`` takes DEFAULT_HALF_LIFE_BY_EPOCH instead. exp(-alpha n^2 / 2) = 1/2 at n = 0.3 steps_per_epoch
    gives alpha = 1.386 / n^2. On data where rows overfit, the best half-life was 0.1 to 0.6 epochs, and 0.3 was within
    .007 AUC of the best. On other data longer half-lives gain .0007.
    """
    half_life = DEFAULT_HALF_LIFE_BY_EPOCH if decay == "by_epoch" else DEFAULT_HALF_LIFE
    return 1.4 / (half_life * steps_per_epoch) ** 2


def choose_alpha(job: JobSpec, steps_per_epoch: int) -> float | None:
    """Return the alpha of adaptive regularization for a job without a parent; None for optimizers without an alpha."""
    if not KINDS[job.optimizer.kind].takes("alpha"):
        return None
    if job.optimizer.alpha == "default":
        return default_alpha(steps_per_epoch, job.optimizer.decay)
    return float(job.optimizer.alpha)
