"""Import of TorchRec without parts that a process that trains one run and ends does not need.

TorchRec asks three times whether an input is a TensorDict, and for that imports tensordict, which imports the whole of
torch's compiler: a second of processor time. FBGEMM, DTensor and torch's checks guard symbolic shapes, which only a
compiler traces, and for that import sympy: another .85 s.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from types import ModuleType
from typing import Any

_GUARDS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
_SHAPES = "torch.fx.experimental.symbolic_shapes"


def import_torchrec() -> None:
    """Import TorchRec with an empty class in the place of ``tensordict.TensorDict``, which nothing here is.

    Code that imports tensordict, or more of symbolic shapes than guards, gets the real one afterwards. Does nothing
    where TorchRec or tensordict is imported already.
    """
    if sys.modules.keys() & {"torchrec", "tensordict"}:
        return
    importlib.import_module("torch.fx.experimental")
    if _SHAPES not in sys.modules:
        _stand_in_for_shapes()
    sys.modules["tensordict"] = _module("tensordict", TensorDict=type("TensorDict", (), {}))
    try:
        importlib.import_module("torchrec")
    finally:
        del sys.modules["tensordict"]


def _stand_in_for_shapes() -> None:
    """Give guards of symbolic shapes: of a shape that is no symbol each of them returns its argument's truth."""

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
    """Silence TorchRec's planner, which warns of its own defaults, and torch on an internal name that TorchRec uses."""
    logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="HeuristicalStorageReservation", category=FutureWarning)
