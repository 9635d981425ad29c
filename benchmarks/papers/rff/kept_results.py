"""Results of a report's own computations, cached in files: they take minutes, and a report may be made again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from embeddings.durable_files import write_json
from embeddings.vectors.item_vectors import Array


def kept(
    folder: Path, name: str, decides: object, arrays: Iterable[Array], compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the cached result of ``compute`` for the same arguments, or compute and cache it.

    ``decides``: a JSON document of everything else that decides the result, such as the settings. The result must be
    serializable as JSON.
    """
    content = hashlib.sha256(json.dumps(decides, sort_keys=True).encode())
    for array in arrays:
        content.update(np.ascontiguousarray(array).tobytes())
    path = folder / f"{name}-{content.hexdigest()[:16]}.json"
    if path.exists():
        result: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return result
    result = compute()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, result)
    return result


def settings_of(module: ModuleType) -> dict[str, int | float]:
    """Return the constants of a module that are numbers."""
    return {key: value for key, value in vars(module).items() if key.isupper() and isinstance(value, int | float)}
