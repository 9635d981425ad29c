"""Towers: hidden layers with ReLU, and with batch normalisation and shortcuts if the job asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.models.base import ModelInputs, mlp
from trainer.models.layers.batch_norm import BatchNorm
from trainer.models.layers.fused import Stack
from trainer.models.layers.seeded_init import seeded
from trainer.spec.models.base import TowerSpec


def tower(
    sizes: Sequence[int],
    *,
    seed: int,
    dtype: torch.dtype,
    residual: bool = False,
    batch_norm: bool = False,
    logits: bool = True,
) -> nn.Module:
    """Return a tower, [b, sizes[0]] -> [b, sizes[-1]]: linear layers, all but the last followed by ReLU.

    With ``logits=False`` ReLU follows the last layer too, so that all layers are hidden layers.

    A hidden layer is h = relu(N(W x + b)) + S x. N is batch normalisation (with ``batch_norm``). S x is the shortcut
    (with ``residual``; He et al., CVPR 2016; Shan et al., Deep Crossing, KDD 2016): x itself if sizes are equal, else a
    linear map without bias. The initial W and b are the same with or without both.

    Number of parameters: the sum of (a + 1) b over neighbouring sizes a, b. Each hidden layer has 2 b more with batch
    normalisation, and a b more for a shortcut between different sizes.
    """
    if not (residual or batch_norm) and logits:
        return mlp(sizes, seed=seed, dtype=dtype)
    linear = [layer for layer in mlp(sizes, seed=seed, dtype=dtype) if isinstance(layer, nn.Linear)]
    num_hidden = len(linear) - 1 if logits else len(linear)
    with seeded(seed, "shortcuts"):
        layers: list[nn.Module] = [HiddenLayer(one, residual, batch_norm, dtype) for one in linear[:num_hidden]]
    return Stack(*layers, *linear[num_hidden:])


def tower_of(
    spec: TowerSpec, inputs: ModelInputs, sizes: Sequence[int], *, number: int = 0, logits: bool = True
) -> nn.Module:
    """Return a :func:`tower` with the settings of a model's spec; ``number``: the tower's number, added to the seed."""
    return tower(
        sizes, seed=inputs.seed + number, dtype=inputs.dtype, residual=spec.residual, batch_norm=spec.batch_norm,
        logits=logits,
    )  # fmt: skip


class HiddenLayer(nn.Module):
    """Hidden layer of a tower: relu(N(W x + b)) + S x; see :func:`tower`."""

    def __init__(self, linear: nn.Linear, residual: bool, batch_norm: bool, dtype: torch.dtype):
        super().__init__()
        self.linear = linear
        inputs, outputs = linear.in_features, linear.out_features
        self.norm = BatchNorm(outputs, dtype=dtype) if batch_norm else None
        self.residual = residual
        # Drawn in float32 like all weights, so that they are alike in every dtype.
        self.shortcut = (
            nn.Linear(inputs, outputs, bias=False, dtype=torch.float32).to(dtype)
            if residual and inputs != outputs
            else None
        )

    @property
    def linear_with_relu(self) -> nn.Linear | None:
        """The linear layer, if this layer is nothing but it and a ReLU (trainer.models.layers.fused)."""
        return self.linear if self.norm is None and not self.residual else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.norm is not None:
            h = self.norm(h)
        h = h.relu()
        if not self.residual:
            return h
        return h + (x if self.shortcut is None else self.shortcut(x))
