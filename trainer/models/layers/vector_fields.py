"""Projections of vector features, which models read as fields like the embedding rows of ids."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.data.columns.hashing import derive_key
from trainer.data.columns.vectors import Vector

if TYPE_CHECKING:
    from trainer.models.base import ModelInputs


class VectorFields(nn.Module):
    """x_f [b, dim_f] -> W_f x_f + b_f [b, columns_f] for each vector f, which itself is not trained.

    A missing vector is zeros, and reads as b_f. Initial weights are torch's default for a linear layer, drawn from the
    seed and the vector's name.

    Args:
        columns: vector's name -> number of columns of its projection.
        inputs: arguments of the model; its ``vectors`` are in the order of their columns in a batch's ``dense``.
    """

    def __init__(self, columns: Mapping[str, int], inputs: ModelInputs):
        super().__init__()
        self.vectors: tuple[Vector, ...] = inputs.vectors
        # Named with a prefix, because a feature may have the name of a method of ModuleDict, such as items or values.
        self.projections = nn.ModuleDict()
        for one in self.vectors:
            # A generator uses only the low 32 bits of its seed: they must depend on both the seed and the name.
            key = derive_key(inputs.seed, zlib.crc32(one.name.encode())) % 2**32
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(key)
                projection = nn.Linear(one.dim, columns[one.name], dtype=torch.float32)
            self.projections[f"of_{one.name}"] = projection.to(inputs.dtype)

    @property
    def num_columns(self) -> int:
        """Number of columns of a batch's ``dense`` that the vectors take."""
        return sum(one.dim for one in self.vectors)

    def forward(self, numbers: Tensor, vectors: Sequence[Vector] | None = None) -> dict[str, Tensor]:
        """Return {name: projection [b, columns]} of the vectors.

        ``vectors``: vectors to project; None: all vectors. ``numbers`` [b, n] must end with their columns.
        """
        chosen = self.vectors if vectors is None else vectors
        first = numbers.shape[1] - sum(one.dim for one in chosen)
        fields = {}
        for one in chosen:
            projection = self.projections[f"of_{one.name}"]
            assert isinstance(projection, nn.Linear)
            given = numbers[:, first : first + one.dim]
            fields[one.name] = projection(given.to(projection.weight.dtype))
            first += one.dim
        return fields
