"""Prepared data and the batches over them, for every rank. Torch is imported with the first batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.batches.prepared_columns import PreparedColumns
from trainer.data.prefetch import Prefetched

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch


class PreparedData(PreparedColumns):
    """Memory-mapped splits, vocabularies, and the deterministic batches over them."""

    def train_batches(
        self, epoch: int, start_step_in_epoch: int = 0, rank: int = 0, world_size: int = 1, micro_batches: int = 1
    ) -> Prefetched[Batch]:
        """Return the batches of an epoch from a step on.

        Every rank gets the same steps, and its own slice of each step's global batch.

        Args:
            epoch: counted from 0.
            start_step_in_epoch: the first step to return.
            rank: this rank, from 0 to ``world_size`` - 1.
            world_size: number of ranks.
            micro_batches: number of consecutive parts that the slice of a step is cut into; with a short last batch
                some may be empty.
        """
        from trainer.data.batches.batches import train_batches

        return train_batches(self, epoch, start_step_in_epoch, rank, world_size, micro_batches)

    def eval_batches(
        self, split: str, batch_size: int | None = None, rank: int = 0, world_size: int = 1
    ) -> Prefetched[Batch]:
        """Return the batches of a split in row order: ``validation``, ``test``, or ``train`` itself."""
        from trainer.data.batches.batches import eval_batches

        return eval_batches(self, split, batch_size or self.batch_size, rank, world_size)
