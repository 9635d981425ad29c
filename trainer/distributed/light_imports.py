"""Faster import of TorchRec, without parts that a short-lived training process does not need.

TorchRec checks in three places if an input is a TensorDict. For this it imports tensordict, which imports all of
torch's compiler and so takes a second of processor time. FBGEMM, DTensor and torch import sympy for symbolic shapes,
which only a compiler uses: another .85 s.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_GUARDS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
_SHAPES = "torch.fx.experimental.symbolic_shapes"


def import_torchrec() -> None:
    """Import TorchRec with an empty class instead of ``tensordict.TensorDict``: no input is ever such a dict.

    Later imports of tensordict, and of symbolic shapes beyond their guards, get the real modules. Does nothing if
    TorchRec or tensordict is imported already.
    """
    if sys.modules.keys() & {"torchrec", "tensordict"}:
        return
    with without_collections():
        importlib.import_module("torch.fx.experimental")
        if _SHAPES not in sys.modules:
            _stand_in_for_shapes()
        sys.modules["tensordict"] = _module("tensordict", TensorDict=type("TensorDict", (), {}))
        try:
            importlib.import_module("torchrec")
        finally:
            del sys.modules["tensordict"]


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause the garbage collector during imports, and exempt from it all objects that exist at the end of the block.

    Modules are no garbage, but full collections would search all of them, which takes a sixth of the time of imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _stand_in_for_shapes() -> None:
    """Install a small module instead of torch's symbolic shapes, with only its guard functions.

    For shapes that are plain numbers each guard returns ``bool`` of its argument. Any other attribute imports the real
    module.
    """

    def real(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_SHAPES) is module:
            del sys.modules[_SHAPES]
        return getattr(importlib.import_module(_SHAPES), name)

    error = type("GuardOnDataDependentSymNode", (RuntimeError,), {})
    module = _module(_SHAPES, **dict.fromkeys(_GUARDS, bool), GuardOnDataDependentSymNode=error, __getattr__=real)
    sys.modules[_SHAPES] = module
    sys.modules["torch.fx.experimental"].symbolic_shapes = module  # type: ignore[attr-defined]


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


def quiet() -> None:
    """Silence warnings of TorchRec's planner about its own defaults, and of torch about an internal name."""
    logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="HeuristicalStorageReservation", category=FutureWarning)
