"""The hidden layers h_i of any torch module: hooks record their outputs, or multiply them by 1 + eta_i."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from trainer.models.layers.mlp import HiddenLayer


class HiddenLayers:
    """Access to the outputs of some modules, [b, ...] each, in the order in which a forward pass calls the modules.

    For a module that returns a tuple, such as torch.nn.LSTM, it is the tuple's first element. A module that is called
    twice counts as two layers. Hooks exist only within the two contexts, so evaluation is not affected.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        if not layers:
            raise ValueError("there are no hidden layers: name the modules whose outputs are")
        self.layers = tuple(layers)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Yield a list; forward passes within the block append the layers' outputs to it."""
        outputs: list[Tensor] = []

        def record(site: int, output: Tensor) -> Tensor:
            outputs.append(output)
            return output

        with self._hooked(record):
            yield outputs

    @contextlib.contextmanager
    def multiplied(self, multipliers: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        """Multiply each output by ``multipliers(site, output)`` within the block, which may hold one forward pass.

        ``site`` is the number of the layer in the forward pass, from 0.
        """
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
    """Return the modules of a job's model whose outputs are hidden layers after their activation.

    The hidden layers belong to the towers of trainer.models.layers.mlp; layers within attention are left out.
    """
    return [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.ReLU, HiddenLayer)) and not name.startswith("attention.")
    ]
