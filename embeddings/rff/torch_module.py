"""A random Fourier view as a torch module: the first layer of models that are trained or served with torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load
from torch import nn

from embeddings.rff.export import TENSOR
from embeddings.rff.features import digest


class RandomFourierLayer(nn.Module):
    """phi(h) = m^{-1/2} [cos(U h), sin(U h)], with h brought to unit length; [..., d] -> [..., dim].

    A zero row gives a zero row. U is a buffer: it moves and is saved with the model, but is not trained, because with a
    trained U the layer would differ from the served view. ``metadata`` is the description of the view in the layer's
    file. The layer is differentiable in h, with gradient zero at a zero row.
    """

    frequencies: torch.Tensor

    def __init__(self, frequencies: np.ndarray | torch.Tensor, metadata: dict[str, str] | None = None):
        super().__init__()
        self.metadata = dict(metadata or {})
        self.register_buffer("frequencies", torch.as_tensor(frequencies, dtype=torch.float32).clone())

    @classmethod
    def load(cls, source: bytes | str | os.PathLike[str]) -> RandomFourierLayer:
        """Load a layer in safetensors from its bytes (``Client.layer``) or its path.

        Raises:
            ValueError: the file has no layer, or the tensor's sha256 is not that in the file's metadata.
        """
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        try:
            frequencies = load(data)[TENSOR]
        except KeyError:
            raise ValueError(f"the file has no tensor '{TENSOR}': it is not the layer of a view") from None
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata: dict[str, str] = header.get("__metadata__", {})
        expected = metadata.get("frequencies_sha256")
        if expected is not None and digest(frequencies) != expected:
            raise ValueError(
                f"the frequencies have sha256 {digest(frequencies)}, not {expected}: fetch the layer again"
            )
        return cls(frequencies, metadata)

    @property
    def dim_in(self) -> int:
        return int(self.frequencies.shape[1])

    @property
    def dim(self) -> int:
        return 2 * int(self.frequencies.shape[0])

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        # Scaled first, so that squares neither vanish nor overflow; the factor cancels, so it has no gradient.
        largest = h.detach().abs().amax(dim=-1, keepdim=True)
        empty = largest == 0
        scaled = h / torch.where(empty, 1.0, largest)
        norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
        unit = scaled / torch.where(empty, 1.0, norm)
        angles = unit @ self.frequencies.to(h.dtype).T
        phi = torch.cat([angles.cos(), angles.sin()], dim=-1) / math.sqrt(len(self.frequencies))
        return torch.where(empty, 0.0, phi)

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}, dim={self.dim}"
