"""Scoring of rows by a model, independent of the library that computes it. Torch-free.

The model is a job's checkpoint (trainer.inference.predict) or an export (trainer.inference.exported_model).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.columns.jagged import Jagged
from trainer.data.columns.row_encoder import EncodedRows, RowEncoder
from trainer.data.sources.source import Chunk
from trainer.inference.parquet_scoring import chunk_of
from trainer.inference.top_items import TopItems
from trainer.output_calibration.base import Calibrator, Uncalibrated
from trainer.spec import JobSpec
from trainer.spec.label_tasks import LabelTask
from trainer.spec.losses import LOSSES, Loss, loss_of

BATCH_ROWS = 8192
# Number of users whose next items are ranked at a time; their scores are [b, a piece of the catalogue].
RANKED_ROWS = 256

Float32s = npt.NDArray[np.float32]


class RowScorer(ABC):
    """Base of models as functions from rows to scores (:class:`trainer.inference.parquet_scoring.Scorer`).

    Output columns are the ``outputs`` of the loss (trainer.spec.losses). With several labels each label has its own
    columns, such as ``probability_click``. A probability is sigmoid(logit), or calibrated by the job's
    ``output_calibration``.

    A row of a sequence model has a list of the user's items, oldest first. Its outputs are ``items`` and ``scores``:
    the k items with the highest scores that the user has not had, highest first.

    ``top``: search for the items with the highest scores, for a sequence model; else None. ``calibrators``: by label
    ("" for a single label), if outputs are calibrated.
    """

    def __init__(
        self,
        job: JobSpec,
        encoder: RowEncoder,
        top: TopItems | None,
        tasks: Sequence[LabelTask] = (),
        calibrators: Mapping[str, Calibrator] = {},
    ):
        self.job, self.encoder, self._top = job, encoder, top
        # The loss of each label, by the suffix of its columns.
        self._losses = {f"_{task.name}": LOSSES[task.loss] for task in tasks} or {"": LOSSES[loss_of(job)]}
        names = [task.name for task in tasks] or [""]
        self._calibrators = [calibrators.get(name, Uncalibrated()) for name in names]

    @property
    def outputs(self) -> dict[str, pa.DataType]:
        if self._top is not None:
            return {"items": pa.list_(self._top.ids.type), "scores": pa.list_(pa.float32())}
        names = (f"{output}{suffix}" for suffix, loss in self._losses.items() for output in loss.outputs)
        return dict.fromkeys(names, pa.float32())

    @property
    def text_columns(self) -> Collection[str]:
        return self.encoder.text_columns

    @property
    def id_columns(self) -> Collection[str]:
        return self.encoder.id_columns

    def columns(self, there: Sequence[str], where: str) -> list[str]:
        return self.encoder.columns(there, where)

    def score(self, chunk: Chunk) -> tuple[list[pa.Array], EncodedRows]:
        coded = self.encoder.encode(chunk)
        if self._top is not None:
            return self._next_items(coded), coded
        labels = zip(self._losses.values(), self._calibrators, self.scores(coded).T, strict=True)
        return [one for loss, by, own in labels for one in _outputs(loss, by, np.ascontiguousarray(own))], coded

    def encode(self, chunk: Chunk) -> EncodedRows:
        """Return a chunk of rows, encoded as inputs of the model."""
        return self.encoder.encode(chunk)

    def scores(self, coded: EncodedRows) -> Float32s:
        """Return the scores of encoded rows, float32 [b, labels]; not for sequence models."""
        parts = [
            self._forward(coded.part(start, min(start + BATCH_ROWS, coded.num_rows)))
            for start in range(0, coded.num_rows, BATCH_ROWS)
        ]
        rows = [part.reshape(len(part), len(self._losses)) for part in parts]
        return np.concatenate([np.empty((0, len(self._losses)), dtype=np.float32), *rows])

    def predict(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        """Return the outputs for rows in memory as a table, in the order of the rows.

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
        """Return the scores of rows [b], or [b, labels] for several labels; for a sequence model, queries [b, dim]."""


def _outputs(loss: Loss, calibrator: Calibrator, scores: Float32s) -> list[pa.Array]:
    """Return the output columns of one label from its ``scores`` [b], in the order of the loss's ``outputs``."""
    if loss.is_log:
        return [pa.array(np.exp(scores))]
    if loss.is_logit:
        return [pa.array(scores), pa.array(calibrator.probabilities(scores).astype(np.float32))]
    return [pa.array(scores)]
