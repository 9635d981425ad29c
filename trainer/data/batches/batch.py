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
        labels: float32 [b], or [b, labels] if there are several labels; an absent label is NaN.
        sample_offset: index in the global batch of the slice's first sample.
        global_size: number of samples of the whole batch.
        part_offset: index in the global batch of the micro-batch's first sample, which rank 0 holds.
        step: number of steps before this one since the first epoch (training), or number of the batch (evaluation).
        seen: for sequence models in evaluation, int64 [m, 2]: (sample, item row) of all items before the target.
        dense: float32 [b, n], numeric features and vectors (trainer.data.columns.vectors); None if there are none.
        shares: float32, shape of the labels: factors of the losses, applied before the mean over the global batch
            (trainer.data.batches.loss_shares). None, for a single label without weights: every factor is 1.
        id_keys: in one-pass training (trainer.data.one_pass), where ``features`` are hashes of ids: table -> all
            hashes of the global batch; None for prepared data, where features are table rows.
        place: in one-pass training, the position at which reading continues after this batch; else None.
        raw_ids: in one-pass training, the strings behind the hashes of the published feature's table; None if strings
            are not kept.
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
        """Return the batch on the model's device; if that is the CPU, the batch itself.

        A copy to a GPU does not wait for work that the GPU is doing.
        """
        if device.type == "cpu":
            return self
        return (self.pin() if device.type == "cuda" else self).to(device, non_blocking=True)
