"""What is compiled once and launched again: a stand-in for Triton's kernels, which a GPU alone compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embeddings.kernels.triton.launch import Launcher
from embeddings.kernels.triton.staging import NUMPY, Staging


class Kernel:
    """As Triton's: ``kernel[grid](*arguments, **constants)`` looks at them, and returns what it has compiled."""

    arg_names = ("output", "count", "FIRST", "SECOND")

    def __init__(self) -> None:
        self.looked: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.looked.append((grid, arguments, constants))
            return Compiled(self.launched)

        return launch


class Compiled:
    def __init__(self, launched: list[Any]) -> None:
        self.launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launched.append((grid, arguments))


def test_a_call_of_the_same_kind_is_not_looked_at_again() -> None:
    kernel, launch = Kernel(), Launcher(interpreted=False)
    output = torch.zeros(8)
    # In another order than the kernel's own: it is by name that constants are told apart.
    constants = {"SECOND": 2, "FIRST": 1}
    launch(kernel, 5, (output, 7), constants, 4, (output,))
    assert kernel.looked == [((5,), (output, 7), constants | {"num_warps": 4})]
    launch(kernel, 6, (output, 9), constants, 4, (output,))
    assert len(kernel.looked) == 1
    assert kernel.launched == [((6, 1, 1), (output, 9, 1, 2))]


@pytest.mark.parametrize(
    "other",
    [
        {"constants": {"FIRST": 1, "SECOND": 3}},
        {"num_warps": 8},
        {"differing": (torch.zeros(8, dtype=torch.float64), 32)},
        {"differing": (torch.zeros(9)[1:], 32)},
        {"differing": (torch.zeros(8), 33)},
        {"differing": (torch.zeros(8), 1)},
        {"differing": (torch.zeros(8), 2**31)},
        {"differing": (None, 32)},
    ],
    ids=["constants", "warps", "type", "address", "not a multiple of 16", "one", "beyond int32", "none"],
)
def test_what_triton_compiles_for_is_told_apart(other: dict[str, Any]) -> None:
    kernel, launch = Kernel(), Launcher(interpreted=False)
    given = {"constants": {"FIRST": 1, "SECOND": 2}, "num_warps": 4, "differing": (torch.zeros(8), 32)}
    for call in (given, given | other, given, given | other):
        launch(kernel, 1, (call["differing"][0], 0), call["constants"], call["num_warps"], call["differing"])
    assert len(kernel.looked) == 2
    assert len(kernel.launched) == 2


def test_the_interpreter_is_given_all() -> None:
    kernel, launch = Kernel(), Launcher(interpreted=True)
    for _ in range(2):
        launch(kernel, 3, (1, 2), {"FIRST": 1, "SECOND": 2}, 4, ())
    assert kernel.looked == [((3,), (1, 2), {"FIRST": 1, "SECOND": 2})] * 2


@pytest.mark.parametrize("dtype", NUMPY)
def test_what_is_staged_is_a_copy_of_the_type_asked_for(dtype: torch.dtype) -> None:
    values = torch.arange(6, dtype=torch.float64).view(2, 3).numpy()
    staged = Staging(torch.device("cpu"))(values, dtype)
    values[:] = -1.0
    assert staged.dtype == dtype
    assert staged.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
