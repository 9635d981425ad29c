"""A run's model on a sample of its training rows, with dense weights and looked-up rows as parameters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from embeddings.tables.config import Pooling
from embeddings.tables.initialization import chunks, initial_rows
from trainer.checkpoint.format import Checkpoint
from trainer.data.batches.batch import Batch
from trainer.data.batches.keys import Key
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import model_of, pooling_of, table_configs
from trainer.distributed.materialize import ReadTables, load_dense
from trainer.generalization.parameters import Point
from trainer.models.base import RankingModel
from trainer.runs.directory import Run
from trainer.spec import JobSpec
from trainer.spec.losses import loss_of

SAMPLE_ROWS = 4096
EVALUATED_AT_ONCE = 8192


class SampledRows(nn.Module):
    """Stand-in for a model's embeddings: rows of a sample as parameters that can be differentiated twice.

    The sample has only the rows of every table that ``features`` look up: ``rows[table]`` [u, dim] of table rows
    ``ids[table]`` [u], ascending. Other ids must not be looked up. Calls have the same inputs and outputs as
    :class:`trainer.distributed.materialize.ReadTables`.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        pooling: dict[str, Pooling],
        features: Sequence[KeyedJaggedTensor],
        read: ReadTables,
        dtype: torch.dtype,
    ):
        super().__init__()
        self._table_of = {key.name: key.table for key in keys}
        self.pooling = pooling
        asked: dict[str, list[Tensor]] = {}
        for one in features:
            for name, part in one.to_dict().items():
                asked.setdefault(self._table_of[name], []).append(part.values())
        self.ids = {table: torch.unique(torch.cat(parts)) for table, parts in asked.items()}
        self.rows = nn.ParameterDict(
            {table: nn.Parameter(read.tables.weight(table)[ids].to(dtype)) for table, ids in self.ids.items()}
        )

    def forward(self, features: KeyedJaggedTensor) -> Any:
        rows_by_feature = {name: self._rows_of(name, part) for name, part in features.to_dict().items()}
        if all(kind == "none" for kind in self.pooling.values()):
            lengths = {name: part.lengths() for name, part in features.to_dict().items()}
            return {name: JaggedTensor(rows, lengths=lengths[name]) for name, rows in rows_by_feature.items()}
        pooled = {name: self._pooled(name, rows, features[name]) for name, rows in rows_by_feature.items()}
        return KeyedTensor(
            keys=list(pooled),
            length_per_key=[block.shape[1] for block in pooled.values()],
            values=torch.cat(list(pooled.values()), dim=1),
        )

    def _rows_of(self, name: str, part: JaggedTensor) -> Tensor:
        table = self._table_of[name]
        return self.rows[table][torch.searchsorted(self.ids[table], part.values())]

    def _pooled(self, name: str, rows: Tensor, part: JaggedTensor) -> Tensor:
        lengths = part.lengths()
        weights = part.weights_or_none()
        weight = torch.ones(len(rows), dtype=rows.dtype) if weights is None else weights.to(rows.dtype)
        bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        pooled = torch.zeros(len(lengths), rows.shape[1], dtype=rows.dtype).index_add(0, bag, rows * weight[:, None])
        if self.pooling[name] != "mean":
            return pooled
        return pooled / lengths.clamp_min(1)[:, None]


class Subject:
    """The model of a run as of a checkpoint, in float64 and evaluation mode, on a sample of its training rows.

    The sample is the first batches of its first epoch: a random sample of the training split, the same rows for every
    job on the same rows with the same seed.

    Attributes:
        model: single-device; its tables are :class:`SampledRows`.
        point: the mean training loss of the sample as a function of ``tower.0.weight``, .., ``rows of item``, ..
        read: all rows of all tables, float32, as they are read at the checkpoint.
        squared_distance: |theta - theta_0|^2 over dense weights and all rows, from their initial values.
    """

    def __init__(self, run: Run, checkpoint: Checkpoint):
        self.job = run.job
        self.data = PreparedData.open(run.data)
        keys = self.data.keys
        self.read = ReadTables(run.job, checkpoint, keys)
        num_batches = -(-SAMPLE_ROWS // self.data.batch_size)
        self.batches = list(itertools.islice(iter(self.data.train_batches(0)), num_batches))
        if is_labelled(run.job, self.data):
            self.batches = [merged(self.batches)]
        pooling = {key.name: pooling_of(run.job, key) for key in keys}
        self.rows = SampledRows(keys, pooling, [batch.features for batch in self.batches], self.read, torch.float64)
        self.model = self.initial_model()
        named = {name: parameter for name, parameter in self.model.dense_parameters() if parameter.requires_grad}
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        load_dense(self.model, checkpoint)
        self.squared_distance = self._rows_moved() + sum(
            float((parameter.detach() - before[name]).square().sum()) for name, parameter in named.items()
        )
        named |= {f"rows of {table}": parameter for table, parameter in self.rows.rows.items()}
        self.point = Point(named, lambda: self.losses().sum() / self.num_rows)

    def initial_model(self) -> RankingModel:
        """Return a model over the sample's rows with initial dense weights, as the run began."""
        return model_of(
            self.job, self.data.keys, self.rows, num_dense=self.data.num_dense, vectors=self.data.vectors,
            dtype=torch.float64,
        ).eval()  # fmt: skip

    @property
    def num_parameters(self) -> int:
        """Number of all parameters: the dense part and all rows of all tables."""
        dense = sum(one.numel() for _, one in self.model.dense_parameters())
        return dense + sum(config.num_rows * config.dim for config in table_configs(self.job, self.data))

    @property
    def num_rows(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def _rows_moved(self) -> float:
        """Return the sum of squares, over all tables, of the rows less their initial values."""
        total = 0.0
        for table in table_configs(self.job, self.data):
            weight = self.read.tables.weight(table.name)
            for start, end in chunks(table):
                moved = weight[start:end].double().numpy() - initial_rows(table, self.job.seed, start, end)
                total += float(np.square(moved).sum())
        return total

    def losses(self, model: RankingModel | None = None) -> Tensor:
        """Return the loss of each example of the sample by a model (this one's), float64 [num_rows]."""
        return torch.cat([(model or self.model).loss(_in_float64(batch)) for batch in self.batches])

    def matrices(self) -> dict[str, Tensor]:
        """Return weight matrices of the dense part and whole tables, [n, d] each.

        Tables are float32, without the rows of padding and the unknown id.
        """
        dense = {name: one for name, one in self.model.dense_parameters() if one.ndim == 2 and min(one.shape) > 1}
        return dense | {f"table {name}": self.read.tables.weight(name)[2:] for name in self.data.tables}

    def mean_squared_input(self) -> float:
        """Return the mean over the sample of sum_i |x_i|^2, where x_i is the input that multiplies feature i's table.

        A bag of n ids has |x_i|^2 = n, or 1 / n if its rows are averaged.
        """
        total = 0.0
        for batch in self.batches:
            for name, part in batch.features.to_dict().items():
                lengths = part.lengths().double()
                is_mean = self.rows.pooling[name] == "mean"
                total += float((1.0 / lengths[lengths > 0]).sum() if is_mean else lengths.sum())
        return total / self.num_rows

    def split_losses(self, split: str) -> npt.NDArray[np.float64]:
        """Return the loss of each example of a split, in row order.

        Only for models of labelled rows (:func:`is_labelled`).
        """
        whole, self.model.embeddings = self.model.embeddings, self.read
        try:
            with torch.no_grad():
                model = self.model.float()
                parts = [
                    model.loss(batch).double().numpy() for batch in self.data.eval_batches(split, EVALUATED_AT_ONCE)
                ]
        finally:
            self.model.embeddings = whole
            self.model.double()
        return np.concatenate(parts)


def is_labelled(job: JobSpec, data: PreparedData) -> bool:
    """Return True if held-out rows have the same kind of loss as training rows.

    The result is False for losses of pairs, of sequences, or over other items in a batch.
    """
    return not data.is_bpr and data.sequence is None and job.model.loss != "sampled_softmax"


def is_classifier(job: JobSpec, data: PreparedData) -> bool:
    """Return True if the loss of a held-out row is the log loss of a class."""
    return is_labelled(job, data) and loss_of(job) == "bce"


def merged(batches: Sequence[Batch]) -> Batch:
    """Return one batch of all samples, in order. Only for models whose loss of a sample ignores other samples."""
    names = batches[0].features.keys()
    by_key = {name: [batch.features[name] for batch in batches] for name in names}
    weighted = batches[0].features.weights_or_none() is not None
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=list(by_key),
        values=torch.cat([part.values() for parts in by_key.values() for part in parts]),
        lengths=torch.cat([part.lengths() for parts in by_key.values() for part in parts]),
        weights=torch.cat([part.weights() for parts in by_key.values() for part in parts]) if weighted else None,
    )
    labels = torch.cat([batch.labels for batch in batches])
    dense = [batch.dense for batch in batches if batch.dense is not None]
    return dataclasses.replace(
        batches[0],
        features=features,
        labels=labels,
        dense=torch.cat(dense) if dense else None,
        sample_offset=0,
        global_size=len(labels),
    )


def _in_float64(batch: Batch) -> Batch:
    dense = None if batch.dense is None else batch.dense.double()
    return dataclasses.replace(batch, labels=batch.labels.double(), dense=dense)


def keep(path: Path, subject: Subject) -> None:
    """Write, as an npz file, the arrays that :mod:`trainer.generalization.sections` compares.

    The arrays are ``losses`` of the test split, ``train_labels``, and the parameters of the sample, float32, as
    ``dense`` and ``rows``.
    """
    dense = [one for name, one in subject.point.parameters.items() if not name.startswith("rows of ")]
    rows = [one for name, one in subject.point.parameters.items() if name.startswith("rows of ")]
    arrays: dict[str, npt.NDArray[Any]] = {
        name: torch.cat([one.detach().reshape(-1) for one in parts]).float().numpy()
        for name, parts in (("dense", dense), ("rows", rows))
        if parts
    }
    if is_labelled(subject.job, subject.data):
        split = "test" if subject.data.num_examples["test"] else "train"
        arrays["losses"] = subject.split_losses(split).astype(np.float32)
        arrays["train_labels"] = np.asarray(subject.data.labels("train"))
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
