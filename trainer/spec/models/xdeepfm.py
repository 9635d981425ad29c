"""xDeepFM: the compressed interaction network beside a tower (Lian et al., KDD 2018)."""

from __future__ import annotations

import itertools
from typing import Literal

from trainer.spec.base import later
from trainer.spec.models.base import FirstOrderSpec, Units
from trainer.spec.models.size import ModelSize


class XDeepFMSpec(FirstOrderSpec):
    """xDeepFM. ``cin_layers``: number of feature maps of each layer of the CIN."""

    kind: Literal["xdeepfm"]
    reads_vectors = True
    cin_layers: Units = later((100, 100), min_length=1, max_length=16)

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        return super().size(num_features, num_dense=num_dense) + self._cin(num_features)

    def _cin(self, num_fields: int) -> ModelSize:
        dim, maps = self.embedding_dim, self.cin_layers
        size = ModelSize(parameters=sum(maps))
        *inner, last = itertools.pairwise([num_fields, *maps])
        for before, after in inner:
            products = before * num_fields
            held = dim * (products + after)
            size += ModelSize(after * products, 0, held, 2 * held, dim * after * products)
        # Of the last layer sums over columns alone.
        before, after = last
        products = before * num_fields
        held = products + after
        return size + ModelSize(after * products, 0, held, 2 * held + dim * before, (dim + after) * products)
