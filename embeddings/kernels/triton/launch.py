"""Launches of the kernels of one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_MAX_INT32 = 2**31 - 1


class Launcher:
    """Launches Triton kernels; for compiled kernels it skips Triton's check of each argument, which takes 0.1 ms.

    Compiled kernels are cached by kernel, constants, and kinds of the arguments that may differ between calls. The kind
    is the argument's type and the properties on which Triton specializes.
    """

    def __init__(self, interpreted: bool) -> None:
        self._interpreted = interpreted
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        kernel: Any,
        num_programs: int,
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        num_warps: int,
        differing: Sequence[torch.Tensor | int | None],
    ) -> None:
        """Launch ``kernel``; ``differing`` are the arguments whose kinds may differ from call to call."""
        if self._interpreted:
            kernel[(num_programs,)](*arguments, **constants)
            return
        key = (kernel, num_warps, *constants.values(), *map(_kind, differing))
        found = self._compiled.get(key)
        if found is None:
            compiled = kernel[(num_programs,)](*arguments, **constants, num_warps=num_warps)
            values = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            self._compiled[key] = compiled, values
            return
        compiled, values = found
        compiled[num_programs, 1, 1](*arguments, *values)


def _kind(argument: torch.Tensor | int | None) -> Any:
    """Return the properties of an argument that a kernel is compiled for."""
    if argument is None:
        return None
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument > _MAX_INT32
    return argument.dtype, argument.data_ptr() % 16 == 0
