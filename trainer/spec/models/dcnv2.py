"""DCN-V2: cross layers with a full or low-rank matrix (Wang et al., WWW 2021)."""

from __future__ import annotations

from typing import Literal

from trainer.spec.base import later
from trainer.spec.models.base import ClickSpec
from trainer.spec.models.size import ModelSize


class DCNv2Spec(ClickSpec):
    """DCN-V2: ``cross_layers`` cross layers before (``stacked``) or beside (``parallel``) the tower.

    Their matrices have rank ``low_rank``; without it they are full matrices.
    """

    kind: Literal["dcnv2"]
    reads_vectors = True
    structure: Literal["stacked", "parallel"] = later("stacked")
    cross_layers: int = later(2, ge=1, le=64)
    low_rank: int | None = later(None, ge=1, le=4096)

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        width, rank = num_features * self.embedding_dim + num_dense, self.low_rank
        weights = width * width if rank is None else 2 * width * rank
        size = ModelSize()
        for _ in range(self.cross_layers):
            size += ModelSize(weights + width, 0, 3 * width + (rank or 0), 3 * width, weights + width)
        if self.structure == "stacked":
            return size + self.tower(width, 1)
        output = width + [width, *self.hidden][-1]
        return size + self.tower(width, logits=False) + ModelSize(output + 1, 0, output, output, output)
