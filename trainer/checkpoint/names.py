"""Names of checkpoints in a folder, and the choice of checkpoints to delete. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

# If a resumed run saves a step again, the name gets a suffix, so that no rename replaces a checkpoint.
_NAME = re.compile(r"^step-(\d{12})(?:\.(\d+))?$")


def newest_first(names: Iterable[str]) -> list[str]:
    """Return the names of checkpoints among ``names``, latest step first."""
    return sorted((name for name in names if _NAME.match(name)), key=_order, reverse=True)


def new_name(step: int, names: Iterable[str]) -> str:
    """Return a name for a checkpoint of ``step`` that is not among ``names``."""
    suffixes = [suffix for of_step, suffix in map(_order, newest_first(names)) if of_step == step]
    return f"step-{step:012d}" + (f".{max(suffixes) + 1}" if suffixes else "")


def replaced_by(newest: str, names: Iterable[str], keep_last: int) -> list[str]:
    """Return the names of checkpoints to delete once ``newest`` exists.

    These are all checkpoints of later steps, and of the others all but the newest ``keep_last``.
    """
    found = newest_first({*names, newest})
    position = found.index(newest)
    return [*found[:position], *found[position + keep_last :]]


def _order(name: str) -> tuple[int, int]:
    match = _NAME.match(name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
