"""Shared part of the inference commands: printing a report as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from trainer.checkpoint.format import CheckpointError
from trainer.distributed.light_imports import quiet
from trainer.storage.base import StorageError

Report = dict[str, Any]


def report(make: Callable[[], Report], in_words: Callable[[Report], str], *, as_json: bool) -> int:
    """Print the report that ``make`` returns, as JSON or in words, or its error on stderr; return the exit code."""
    quiet()
    try:
        made = make()
    except (ValueError, OSError, CheckpointError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(made) if as_json else in_words(made))
    return 0
