"""The comparison of a run's model with the served version's model: reading it, and describing it in words.

A run reports it by an event of type ``comparison``, because rank 0 may share no directory with the driver. This module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embeddings.refresh.model_comparison import ALL_ROWS, ModelComparison, ModelDifference
from trainer.runs.events import read_events

COMPARISON = "comparison"
"""Type of the event, and name of the entry in manifests of versions."""


def read_comparison(directory: Path | str, version: str | None) -> ModelComparison | None:
    """Return the last comparison with ``version`` among the events of a run directory, None if there is none."""
    found = None
    for event in read_events(directory):
        if event.fields["type"] == COMPARISON and event.fields["version"] == version:
            found = ModelComparison.of_json(event.fields)
    return found


def comparison_told(document: Mapping[str, Any]) -> ModelComparison | None:
    """Return ``comparison`` from a version's manifest or a job's publication event, None without a comparison."""
    told = document.get(COMPARISON)
    return None if told is None else ModelComparison.of_json(told)


def in_words(comparison: ModelComparison) -> str:
    """Return a clause for each difference, separated by semicolons, or the reason why there is no comparison."""
    if comparison.skipped:
        return f"not compared with the served model: {comparison.skipped}"
    return "; ".join(difference_in_words(one) for one in comparison.differences)


def difference_in_words(one: ModelDifference) -> str:
    """Return the difference in words.

    Example: ``auc 0.7312, served model 0.7298, on 12,345 rows (improvement +0.0004 to +0.0031)``.
    """
    where = "" if one.slice == ALL_ROWS else f"{one.slice}: "
    ends = f"{one.low:+.4f} to {one.high:+.4f}"
    popularity = "" if one.popularity is None else f"; popularity alone {one.popularity:.4f}"
    return (
        f"{where}{one.metric} {one.candidate:.4f}, served model {one.served:.4f}, on {one.rows:,} rows "
        f"(improvement {ends}{popularity})"
    )
