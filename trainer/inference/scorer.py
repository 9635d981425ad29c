"""Scoring of rows by a model, whatever computes it. Torch-free.

It is a job's checkpoint (trainer.inference.predict) or an export (trainer.inference.exported_model).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.jagged import Jagged
from trainer.data.columns.row_encoder import EncodedRows, RowEncoder
from trainer.data.sources.source import Chunk
from trainer.inference.parquet_scoring import chunk_of
from trainer.inference.top_items import TopItems
from trainer.metrics.classification import sigmoid
from trainer.spec import JobSpec
from trainer.spec.losses import LOSSES, loss_of

BATCH_ROWS = 8192
# Of users whose next items are ranked among all: their scores are [b, a piece of the catalogue].
RANKED_ROWS = 256

Float32s = npt.NDArray[np.float32]


class RowScorer(ABC):
    """A model as a function from rows to scores.

    Outputs, by the loss: ``logit`` and ``probability`` = sigmoid(logit) of bce, ``prediction`` of mse, ``score`` of
    focal and of the losses that rank. For sequence models, whose rows hold a list of the user's items, oldest first,
    ``items`` and ``scores``: the k that the user has not had, the highest first.
    """

    def __init__(self, job: JobSpec, coder: RowEncoder, top: TopItems | None):
        self.job, self._coder, self._top = job, coder, top

    @property
    def outputs(self) -> dict[str, pa.DataType]:
        if self._top is not None:
            return {"items": pa.list_(self._top.ids.type), "scores": pa.list_(pa.float32())}
        return dict.fromkeys(LOSSES[loss_of(self.job)].outputs, pa.float32())

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        """Return what is read of rows that have the columns ``there``.

        Raises:
            DataError: a column is missing.
        """
        return self._coder.columns(there, where)

    def score(self, chunk: Chunk) -> tuple[list[pa.Array], EncodedRows]:
        """Return the outputs for each row, in the order of ``outputs``, and how its ids were known."""
        coded = self._coder.encode(chunk)
        if self._top is not None:
            return self._next_items(coded), coded
        parts = [
            self._forward(coded.part(start, min(start + BATCH_ROWS, coded.num_rows)))
            for start in range(0, coded.num_rows, BATCH_ROWS)
        ]
        logits = np.concatenate([np.empty(0, dtype=np.float32), *parts])
        if "probability" not in self.outputs:
            return [pa.array(logits)], coded
        return [pa.array(logits), pa.array(sigmoid(logits).astype(np.float32))], coded

    def predict(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        """Return the outputs for rows in memory, as a table.

        Raises:
            DataError: the model cannot read the rows.
        """
        self.columns(rows.schema.names, "rows")
        scores, _ = self.score(chunk_of(rows))
        return pa.table(dict(zip(self.outputs, scores, strict=True)), schema=pa.schema(list(self.outputs.items())))

    def _next_items(self, coded: EncodedRows) -> list[pa.Array]:
        assert self._top is not None
        length, parts = self.job.model.history_length, []
        for start in range(0, coded.num_rows, RANKED_ROWS):
            part = coded.part(start, min(start + RANKED_ROWS, coded.num_rows))
            had = part.rows["item"]
            assert isinstance(had, Jagged)
            parts.append(self._top.of(self._forward(part.replaced(item=had.last(length))), had))
        columns: list[list[Any]] = [list(column) for column in zip(*parts, strict=True)] or [[], []]
        return [
            pa.concat_arrays([pa.array([], type_), *column])
            for type_, column in zip(self.outputs.values(), columns, strict=True)
        ]

    @abstractmethod
    def _forward(self, coded: EncodedRows) -> Float32s:
        """Return the logits [b] of a batch of rows, or for a sequence model the queries [b, dim]."""


def is_sequence(job: JobSpec) -> bool:
    return job.model.reads_sequences
