"""One rank's slice of a batch, as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torchrec import KeyedJaggedTensor

if TYPE_CHECKING:
    from trainer.data.one_pass.position import Place
    from trainer.data.one_pass.rows import RawIds


@dataclass(frozen=True)
class Batch:
    """One rank's slice of a global batch, or of one of its micro-batches.

    Attributes:
        features: table rows, int64, with keys in the fixed order of ``PreparedData.keys``.
        labels: float32 [b]; of several labels [b, labels], NaN where one is absent.
        sample_offset: index in the global batch of the slice's first sample.
        global_size: number of samples of the whole batch.
        part_offset: index in the global batch of the micro-batch's first sample, which rank 0 holds.
        step: number of steps before this one since the first epoch (training), or number of the batch (evaluation).
        seen: for sequence models in evaluation, int64 [m, 2]: (sample, item row) of everything that came before.
        dense: float32 [b, n], numeric features and vectors (trainer.data.columns.vectors); None where there are none.
        shares: float32, like the labels: what a loss is multiplied with before the mean over the global batch is taken,
            where rows have weights or several labels (trainer.data.batches.loss_shares); None: 1.
        id_keys: of rows that are trained on as they are read (trainer.data.one_pass), whose ``features`` are hashes of
            ids: by table, those of the whole global batch; None where features are numbers of prepared ids.
        place: of these, where reading goes on after this batch.
        raw_ids: of these, the strings behind hashes of the published feature's table; None where none are kept.
    """

    features: KeyedJaggedTensor
    labels: torch.Tensor
    sample_offset: int
    global_size: int
    step: int
    part_offset: int = 0
    seen: torch.Tensor | None = None
    dense: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    id_keys: Mapping[str, npt.NDArray[np.int64]] | None = None
    place: Place | None = None
    raw_ids: RawIds | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        device = torch.device(device)
        return replace(
            self,
            features=self.features.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            seen=None if self.seen is None else self.seen.to(device, non_blocking=non_blocking),
            dense=None if self.dense is None else self.dense.to(device, non_blocking=non_blocking),
            shares=None if self.shares is None else self.shares.to(device, non_blocking=non_blocking),
        )

    def pin(self) -> Batch:
        """Return the batch in page-locked memory, for asynchronous copies to a GPU."""
        dense = None if self.dense is None else self.dense.pin_memory()
        shares = None if self.shares is None else self.shares.pin_memory()
        features, labels = self.features.pin_memory(), self.labels.pin_memory()
        return replace(self, features=features, labels=labels, dense=dense, shares=shares)

    def on(self, device: torch.device) -> Batch:
        """Return the batch on the model's device; on the CPU the batch itself.

        A copy to a GPU does not wait for the work that runs there.
        """
        if device.type == "cpu":
            return self
        return (self.pin() if device.type == "cuda" else self).to(device, non_blocking=True)
