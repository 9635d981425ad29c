"""What a check of ``evenkeel doctor`` finds."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """One finding: ``level`` ok, warn (works, with a limit) or fail (will not work)."""

    name: str
    level: Level
    message: str
    remedy: str = ""
