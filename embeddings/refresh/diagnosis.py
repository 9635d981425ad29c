"""Diagnosis of a held version: the cause (data that moved, or a fault of rows, model or run) and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from embeddings.refresh.gate import Check
from embeddings.refresh.gate_checks.base import base_of
from embeddings.refresh.gate_checks.registry import subject_of
from embeddings.refresh.hold_policy import is_fault

Cause = Literal["data", "items", "vectors", "rows", "model", "run", "generation", "stale"]
NEW_GENERATION = ("same_dim", "same_model", "shared")
MAX_NAMED = 3
"""Largest number of metrics, or of figures of moved rows, named in a sentence; the lists have all."""

_ADVICE: dict[Cause, str] = {
    "data": "Nothing has to be done: the next refresh goes on from here, and after publish.gate.max_held such days a "
    "new generation opens. To serve it now, promote it with a reason.",
    "items": "Check that the window holds a whole day and that the ids are the same as before. If this job reads fewer "
    "days than the one before, set dataset.window in both. If the items changed, promote the version with a reason.",
    "vectors": "{own}Look at the run first: was it warm-started from the served version (init_from), with the same "
    "learning rate and ids as before? The next refresh goes on from here, and after publish.gate.max_held such days a "
    "new generation opens.",
    "rows": "Look at the rows of the window: the figure says what differs. Correct them and run the job again; the "
    "next refresh starts from the served version. If they are right, promote the version with a reason.",
    "model": "Look at what changed in the job or its rows, correct it, then run the job again; the next refresh starts "
    "from the served version.",
    "run": "Do not promote it. {remedies}. Then run the job again.",
    "generation": "{own}If the change is meant, promote it with a reason and override_gate; consumers read on by views "
    "VIEW@gN until they are retrained.",
    "stale": "Run the job again: it then starts from the version served now.",
}


@dataclass(frozen=True)
class Failure:
    """A check that failed, and by how much.

    ``times``: distance from the usual value, or from the best one (a cosine of 1), as a multiple of the distance that
    the limit allows: 2 for a cosine of .7 where .85 is the limit. None if it cannot be computed. ``usual``: median of
    the refreshes that were published before; None if the limit does not follow from them.
    """

    metric: str
    value: float | None
    limit: float
    bound: Literal["at_most", "at_least"]
    times: float | None
    about: str
    usual: float | None = None

    @classmethod
    def of(cls, check: Check) -> Failure:
        known = bool(np.isfinite(check.value))
        return cls(
            check.metric,
            float(check.value) if known else None,
            float(check.threshold),
            "at_most" if check.at_most else "at_least",
            check.times,
            subject_of(check.metric),
            None if check.usual is None else check.usual.median,
        )

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.metric} cannot be measured"
        usual = "" if self.usual is None else f" (usually {self.usual:.3g})"
        return f"{self.metric} is {self.value:.3g}, {self.bound.replace('_', ' ')} {self.limit:.3g} is asked for{usual}"


@dataclass(frozen=True)
class Diagnosis:
    """Cause of a hold, derived from the failed checks and the drift of the training rows.

    Attributes:
        cause: ``data``: training rows and vectors moved. ``items``: only checks on the set of items failed.
            ``vectors``: the vectors moved although the rows did not, or nothing is known of the rows. ``rows``: the
            rows are far from those of the days before. ``model``: the model is worse than the served model. ``run``:
            the output cannot be served, whatever the data. ``generation``: the vectors have other coordinates.
            ``stale``: another version is served by now.
        failed: failed checks, worst first.
        rows: figures of training rows that moved since the run that this run continues; None if unknown.
    """

    cause: Cause
    summary: str
    advice: str
    failed: tuple[Failure, ...] = ()
    rows: tuple[str, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis in the form that manifests and events store."""
        return asdict(self) | {
            "failed": [asdict(one) for one in self.failed],
            "rows": None if self.rows is None else list(self.rows),
        }


def diagnose(
    checks: Sequence[Check], lineage: Mapping[str, Any] | None, own_remedies: Mapping[str, str] | None = None
) -> Diagnosis | None:
    """Return the diagnosis of the failed checks; None if no check failed.

    ``drift`` in the ``lineage`` of the run lists figures of the rows that moved since the parent run, each with a
    ``message``; None or absent without a parent. ``own_remedies``: remedies that fit the job, by metric.
    """
    failed = [Failure.of(check) for check in checks if check.verdict == "fail"]
    if not failed:
        return None
    failed.sort(key=lambda one: -np.inf if one.times is None else -one.times)
    drift = (lineage or {}).get("drift")
    rows = None if drift is None else tuple(str(one["message"]) for one in drift)
    faults = {subject_of(check.metric) for check in checks if is_fault(check)}
    cause = _cause(failed, faults, rows)
    remedies = _sentences(check.remedy for check in checks if check.verdict == "fail" and is_fault(check))
    own = _sentences((own_remedies or {}).get(base_of(one.metric), "") for one in failed)
    advice = _ADVICE[cause].format(remedies=remedies, own=own and f"{own}. ")
    return Diagnosis(cause, _summary(cause, failed, rows), advice, tuple(failed), rows)


def _sentences(remedies: Iterable[str]) -> str:
    """Return the remedies, each once, joined as sentences without the last full stop."""
    return ". ".join(remedy[:1].upper() + remedy[1:] for remedy in dict.fromkeys(remedies) if remedy)


def stale(message: str) -> Diagnosis:
    """Return the diagnosis of a candidate whose parent is not served any more."""
    return Diagnosis("stale", f"The run was overtaken: {message.partition(':')[0]}.", _ADVICE["stale"])


def _cause(failed: Sequence[Failure], faults: Collection[str], rows: Sequence[str] | None) -> Cause:
    if any(one.metric in NEW_GENERATION for one in failed):
        return "generation"
    for cause in ("run", "rows", "model"):
        if cause in faults:
            return cause
    subjects = {one.about for one in failed}
    if subjects == {"items"}:
        return "items"
    return "data" if rows or "rows" in subjects else "vectors"


def _summary(cause: Cause, failed: Sequence[Failure], rows: Sequence[str] | None) -> str:
    named = _named([str(one) for one in failed])
    moved = _named(rows or ())
    if cause == "data":
        vectors = " and the vectors with them" if any(one.about == "vectors" for one in failed) else ""
        return f"The data moved{f' ({moved})' if rows else ''}{vectors}: {named}."
    if cause == "items":
        same = "moved no further than a refresh may"
        of_rows = f" ({moved})" if rows else ""
        return f"The data moved: other items have rows than before{of_rows}; items of both versions {same}: {named}."
    if cause == "vectors":
        alike = "nothing is known of the rows before" if rows is None else "the rows are like those before"
        return f"The vectors moved and {alike}: {named}."
    if cause == "rows":
        return f"The rows are unlike those of the days before{f' ({moved})' if rows else ''}: {named}."
    if cause == "model":
        return f"The model is worse{f' (rows: {moved})' if rows else ''}: {named}."
    if cause == "run":
        return f"The run is at fault: what it wrote cannot be served{f' (rows: {moved})' if rows else ''}: {named}."
    return f"The vectors have other coordinates, which no consumer of today's views can read: {named}."


def _named(parts: Sequence[str]) -> str:
    more = len(parts) - MAX_NAMED
    return "; ".join(parts[:MAX_NAMED]) + (f"; {more} more" if more > 0 else "")
