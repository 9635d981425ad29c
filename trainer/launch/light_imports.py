"""Import of TorchRec without parts that a process that trains one run and ends does not need.

TorchRec asks three times whether an input is a TensorDict, and for that imports tensordict, which imports the whole of
torch's compiler: a second of processor time, a quarter of what `evenkeel train` needs before its first step.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def import_torchrec() -> None:
    """Import TorchRec with an empty class in the place of ``tensordict.TensorDict``, which nothing here is.

    Code that imports tensordict afterwards gets the real one. Does nothing where either is imported already.
    """
    if sys.modules.keys() & {"torchrec", "tensordict"}:
        return
    stand_in = ModuleType("tensordict")
    stand_in.TensorDict = type("TensorDict", (), {})  # type: ignore[attr-defined]
    sys.modules["tensordict"] = stand_in
    try:
        importlib.import_module("torchrec")
    finally:
        del sys.modules["tensordict"]
