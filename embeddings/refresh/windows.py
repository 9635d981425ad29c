"""Comparison of a candidate's window of training days with those of the versions before it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from embeddings.refresh.gate_checks.absent_items import RECENT_PUBLICATIONS
from embeddings.refresh.gate_checks.comparison import Shorter
from embeddings.refresh.record import RefreshRecord
from embeddings.store import Collection, StoreError

WINDOW = "window"
"""Lineage key: {last, days} of the job's window, None if it asks for all rows."""

Lineage = Mapping[str, Any] | None


def shorter_than_before(target: Collection, parent: str | None, lineage: Lineage) -> Shorter:
    """Compare the length of the candidate's window with those of its parent, grandparent and so on.

    At most ``RECENT_PUBLICATIONS`` versions are compared. If either window is unknown, the share is 1.
    """
    days = _days(target, lineage)
    befores: list[frozenset[int]] = []
    while days and parent is not None and len(befores) < RECENT_PUBLICATIONS:
        try:
            manifest = target.manifest(parent)
        except StoreError:
            break
        befores.append(_days(target, RefreshRecord.of(manifest).lineage))
        parent = manifest["parent"]
    if not befores:
        return Shorter()
    shares = tuple(min(1.0, len(days) / len(before)) if before else 1.0 for before in befores)
    if shares[0] == 1.0:
        return Shorter(shares)
    num_fresh, num_left_out = len(days - befores[0]), len(befores[0]) - len(days)
    return Shorter(shares, 1.0 + num_left_out / num_fresh if num_fresh else None)


def _days(target: Collection, lineage: Lineage) -> frozenset[int]:
    """Return the days in the windows of a run and of the held versions that it continued from; none if unknown."""
    days: set[int] = set()
    while lineage is not None:
        window, start = lineage.get(WINDOW), lineage.get("start_version")
        if window is None:
            return frozenset()
        last = datetime.date.fromisoformat(window["last"]).toordinal()
        days.update(range(last - int(window["days"]) + 1, last + 1))
        try:
            lineage = None if start is None else RefreshRecord.of(target.manifest(start)).lineage
        except StoreError:
            break
    return frozenset(days)
