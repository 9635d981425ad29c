"""Exports of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazy_exports(package: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` that imports each export on first use.

    So the parts without torch can be imported without torch. The package names each export once, for type checkers
    too, under ``if TYPE_CHECKING:`` as ``from MODULE import NAME as NAME``.
    """
    modules: dict[str, str] = {}

    def get(name: str) -> Any:
        if not modules:
            source = importlib.import_module(package).__loader__.get_source(package)  # type: ignore[union-attr]
            words = (line.split() for line in source.splitlines() if line.startswith("    from "))
            modules.update((exported, module) for _, module, _, exported, *_ in words)
        if name == "__all__":
            return sorted(modules)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get
