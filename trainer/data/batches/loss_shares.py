"""Share of each sample's loss in the mean of its batch, from row weights and missing labels. Torch-free.

The loss of label t is sum_i w_i m_it l_it / sum_i w_i m_it over all samples i of the global batch. A sample has the
weight w_i, and m_it is 1 if it has the label, else 0. Every rank can compute the sums from its own files, without
communication. The loss does not depend on the division of a batch into ranks and micro-batches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.columns.hashing import Int64s


class LossShares:
    """The shares of training rows in the loss, for data with weights of rows or several labels.

    ``labels``: float [rows, labels] if there are several labels, with NaN for absent labels. ``weights``: float32
    [rows]. None: a single label, no weights.
    """

    def __init__(self, labels: npt.NDArray[np.floating] | None, weights: npt.NDArray[np.float32] | None):
        self._labels, self._weights = labels, weights

    @staticmethod
    def of_split(data: PreparedColumns, split: str) -> LossShares:
        """Return the shares of the rows of a prepared split."""
        return LossShares(
            data.labels(split).view(np.ndarray) if data.tasks else None,
            data.row_weights(split).view(np.ndarray) if data.is_weighted else None,
        )

    def of(self, rows: Int64s, batch: Int64s) -> npt.NDArray[np.float32]:
        """Return g w_i m_it / sum_j w_j m_jt of ``rows``, j over the g rows of the global ``batch``.

        The mean over g of losses times shares is the loss of the batch. The shape is [rows], with several labels
        [rows, labels]. The share is 0 for a label that no row of the batch has.
        """
        totals = self._counted(batch).sum(axis=0)
        scale = np.divide(len(batch), totals, out=np.zeros_like(totals), where=totals > 0)
        return (self._counted(rows) * scale).astype(np.float32)

    def _counted(self, rows: Int64s) -> npt.NDArray[np.float64]:
        counted = np.ones(len(rows)) if self._weights is None else self._weights[rows].astype(np.float64)
        return counted if self._labels is None else counted[:, None] * ~np.isnan(self._labels[rows])
