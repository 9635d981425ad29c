"""A checkpoint's model in one process. The model's tables are read with pending decay and idle momentum applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD
from embeddings.tables.config import InitConfig, TableConfig
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.record import TablesRecord, TrainingRecord
from trainer.checkpoint.warm_start import trained_optimizer
from trainer.data.batches.keys import Key
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import BACKENDS, model_of, pooling_of
from trainer.distributed.dynamic_tables import taken_rows
from trainer.distributed.sharded_state import MODEL, differing, tensors_of
from trainer.models.base import RankingModel
from trainer.spec import JobSpec

CHUNK_ROWS = 1 << 18


def stored_rows(job: JobSpec, checkpoint: Checkpoint, table: str, start: int, count: int) -> EmbeddingTables:
    """Return rows [start, start + count) of a table as EmbeddingTables, whose ``read`` applies deferred updates."""
    weight, state = checkpoint.read_rows(table, start, count, column_count=job.model.table_columns(table))
    training = TrainingRecord.of(checkpoint)
    tables = EmbeddingTables(
        [TableConfig(table, count, weight.shape[1], (table,), first_live_row=0)],
        trained_optimizer(training),
        backend=BACKENDS[job.kernel],
        dtype=weight.dtype,
    )
    tables.load(table, weight, state)
    record = TablesRecord.of(checkpoint)
    tables.birth_step, tables.completed_steps = record.birth_step, record.completed_steps
    return tables


def read_rows(job: JobSpec, checkpoint: Checkpoint, table: str) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows [n, dim] of the compute type) piece by piece, with values as lookups in evaluation read.

    For a dynamic table only rows in use (:func:`taken_rows`) are yielded, and numbered without gaps.
    """
    num_rows, taken = checkpoint.tables[table], taken_rows(checkpoint, table)
    done = 0
    for start in range(0, num_rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, num_rows - start)
        rows = None if taken is None else taken[np.searchsorted(taken, start) : np.searchsorted(taken, start + count)]
        if rows is None or len(rows):
            chosen = None if rows is None else torch.from_numpy(rows - start)
            values = stored_rows(job, checkpoint, table, start, count).read(table, chosen)
            yield done, values
            done += len(values)


class ReadTables(nn.Module):
    """Stand-in for a model's embeddings: looks rows up and pools them with the kernel of training.

    A call takes a KeyedJaggedTensor with the features of ``keys``. The call returns a KeyedTensor of pooled rows, or
    {feature: JaggedTensor} if the model does not pool. Memory: all rows as float32, and 4 bytes more for each row.
    """

    def __init__(self, job: JobSpec, checkpoint: Checkpoint, keys: Sequence[Key]):
        super().__init__()
        configs = []
        for name, stored in checkpoint.tables.items():
            taken = taken_rows(checkpoint, name)
            num_rows = stored if taken is None else len(taken)
            of_table = [key for key in keys if key.table == name]
            dim = checkpoint.read_rows(name, 0, 0)[0].shape[1]
            configs.append(
                TableConfig(
                    name,
                    num_rows,
                    dim,
                    tuple(key.name for key in of_table),
                    {key.name: pooling_of(job, key) for key in of_table},
                    InitConfig("zero"),
                )
            )
        self.tables = EmbeddingTables(configs, SGD(learning_rate=0.0))
        self.tables.eval()
        for name in checkpoint.tables:
            weight = self.tables.weight(name)
            for start, rows in read_rows(job, checkpoint, name):
                weight[start : start + len(rows)] = rows
        self._dims = {feature: config.dim for config in configs for feature in config.features}

    def forward(self, features: KeyedJaggedTensor) -> Any:
        names = list(self.tables.features)
        if features.keys() != names:
            positions = {name: number for number, name in enumerate(features.keys())}
            features = features.permute([positions[name] for name in names])
        values = self.tables(features.values(), features.offsets(), features.weights_or_none())
        if not self.tables.layout.pooled:
            ends = features.offset_per_key()
            by_name: Mapping[str, JaggedTensor] = features.to_dict()
            return {
                name: JaggedTensor(values[ends[number] : ends[number + 1]], lengths=by_name[name].lengths())
                for number, name in enumerate(names)
            }
        return KeyedTensor(keys=names, length_per_key=[self._dims[name] for name in names], values=values)


def model_of_checkpoint(job: JobSpec, data: PreparedData, checkpoint: Checkpoint) -> RankingModel:
    """Return the job's model with a checkpoint's parameters, in evaluation mode. Memory: float32 rows of all tables.

    Raises:
        CheckpointError: the checkpoint is damaged, or another model's.
    """
    read = ReadTables(job, checkpoint, data.keys)
    model = model_of(
        job, data.keys, read, num_dense=data.num_dense, num_item_numbers=data.num_item_numbers, vectors=data.vectors,
        tasks=data.tasks,
    )  # fmt: skip
    load_dense(model, checkpoint)
    return model.eval()


def load_dense(model: RankingModel, checkpoint: Checkpoint) -> None:
    """Load a model's parameters and buffers outside its tables from a checkpoint.

    Raises:
        CheckpointError: names or shapes differ between model and checkpoint.
    """
    parameters = {f"{MODEL}{name}": value for name, value in tensors_of(model)}
    saved = checkpoint.read_dense()
    if differ := differing(parameters, saved):
        names = ", ".join(name.removeprefix(MODEL) for name in differ)
        raise CheckpointError(
            f"{checkpoint.path}: the dense parts differ from the model's in {names}: another version of evenkeel wrote "
            "it; use that one"
        )
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(saved[name])
