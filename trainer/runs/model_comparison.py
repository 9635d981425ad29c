"""The comparison of a run's model with the served version's: where it is kept, and how it is said. Torch-free.

A run tells it by an event of type ``comparison``: rank 0 may be on a host that shares no directory with the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embeddings.refresh.model_comparison import ALL_ROWS, ModelComparison, ModelDifference
from trainer.runs.events import read_events

COMPARISON = "comparison"
"""Type of the event."""


def read_comparison(directory: Path | str, version: str | None) -> ModelComparison | None:
    """Return the last comparison with a version that the run of a directory has told, None without one."""
    found = None
    for event in read_events(directory):
        if event.fields["type"] == COMPARISON and event.fields["version"] == version:
            found = ModelComparison.of_json(event.fields)
    return found


def comparison_told(document: Mapping[str, Any]) -> ModelComparison | None:
    """Return the ``comparison`` of a version's manifest or a job's publication, None where it has none."""
    told = document.get(COMPARISON)
    return None if told is None else ModelComparison.of_json(told)


def in_words(comparison: ModelComparison) -> str:
    """Return one sentence for each difference, or why there is none."""
    if comparison.skipped:
        return f"not compared with the served model: {comparison.skipped}"
    return "; ".join(difference_in_words(one) for one in comparison.differences)


def difference_in_words(one: ModelDifference) -> str:
    """Return ``auc 0.7312 beside 0.7298 of the served model on 12,345 rows (better by 0.0004 to 0.0031)``."""
    where = "" if one.slice == ALL_ROWS else f"{one.slice}: "
    ends = f"{one.low:+.4f} to {one.high:+.4f}"
    popularity = "" if one.popularity is None else f"; popularity alone {one.popularity:.4f}"
    return (
        f"{where}{one.metric} {one.candidate:.4f} beside {one.served:.4f} of the served model on {one.rows:,} rows "
        f"(improvement {ends}{popularity})"
    )
