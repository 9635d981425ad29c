"""The hidden layers h_i of any torch module, by hooks: recorded, or multiplied by 1 + eta_i as they pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.models.layers.mlp import HiddenLayer


class HiddenLayers:
    """The outputs of some modules, [b, ...] each, in the order in which a forward pass comes by them.

    Of a module that gives a tuple, as torch.nn.LSTM does, it is the tuple's first. A module that is called twice is two
    layers. Hooks are there within the two contexts alone, so evaluation sees
    nothing of them.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        if not layers:
            raise ValueError("there are no hidden layers: name the modules whose outputs are")
        self.layers = tuple(layers)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Yield a list that the forward passes within fill with the outputs."""
        outputs: list[Tensor] = []

        def record(site: int, output: Tensor) -> Tensor:
            outputs.append(output)
            return output

        with self._hooked(record):
            yield outputs

    @contextlib.contextmanager
    def multiplied(self, multipliers: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        """Multiply each output by ``multipliers(site, output)``; sites count from 0. For one forward pass."""
        with self._hooked(lambda site, output: output * multipliers(site, output)):
            yield

    @contextlib.contextmanager
    def _hooked(self, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        site = 0

        def hook(module: nn.Module, inputs: object, output: Any) -> Any:
            nonlocal site
            site += 1
            if isinstance(output, tuple):
                return (change(site - 1, output[0]), *output[1:])
            return change(site - 1, output)

        handles = [layer.register_forward_hook(hook) for layer in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def hidden_layers(model: nn.Module) -> list[nn.Module]:
    """Return the hidden layers of the towers of a job's model, each with its activation.

    Towers are those of trainer.models.layers.mlp. Attention is no tower.
    """
    return [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.ReLU, HiddenLayer)) and not name.startswith("attention.")
    ]
