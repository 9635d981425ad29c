"""From rows to typed batches: :func:`prepare` once per run, :class:`PreparedData` on every rank.

Names are loaded lazily, so that the torch-free parts (errors, source) cost no torch import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data.batches import Batch
    from trainer.data.errors import DataError
    from trainer.data.preparation import prepare
    from trainer.data.prepared import PreparedData, TableInfo

__all__ = ["Batch", "DataError", "PreparedData", "TableInfo", "prepare"]

_HOMES = {
    "Batch": "batches",
    "DataError": "errors",
    "PreparedData": "prepared",
    "TableInfo": "prepared",
    "prepare": "preparation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"trainer.data.{_HOMES[name]}"), name)
