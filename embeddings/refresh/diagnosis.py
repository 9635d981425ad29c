"""Why a version is held, for people: whether the data moved or the run is at fault, by how much, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from embeddings.refresh.gate import Check
from embeddings.refresh.gate_checks.norms import Norms
from embeddings.refresh.gate_checks.registry import subject_of

Cause = Literal["data", "items", "vectors", "run", "generation", "stale"]
NEW_GENERATION = ("same_dim", "same_model", "shared")
_NORMS = frozenset(limit.metric for limit in Norms.limits)
MAX_NAMED = 3
"""Rows' comparisons and metrics that a sentence names; the others are in the lists."""

_ADVICE: dict[Cause, str] = {
    "data": "Look at the rows of the window. If the world moved, promote the version with a reason, or let a rule do "
    "it (publish.gate.promote); if the rows are wrong, mend them and run the job again.",
    "items": "See that the window holds a whole day and that ids are the same ones. A job on fewer days than the one "
    "before says so by dataset.window, in both, and the gate asks for no more than so many days have. If the "
    "assortment changed, promote the version with a reason, or let a rule do it (publish.gate.promote).",
    "vectors": "Look at the run first: was it warm-started from the served version (init_from), with the learning rate "
    "and the ids of before? Where refreshes always move so much, let them train for fewer epochs or at a lower "
    "learning rate, or calibrate the gate: evenkeel calibrate COLLECTION.",
    "run": "Do not promote it. Mend what the checks name, then run the job again.",
    "generation": "If the change is meant, promote it with a reason and override_gate, and retrain the consumers.",
    "stale": "Run the job again: it starts from what is served now.",
}


@dataclass(frozen=True)
class Failure:
    """A check that failed, and by how much.

    ``times``: how many times as far from the ideal value as the limit allows (a cosine of .7 where .85 is asked for:
    .3 / .15 = 2); None where that cannot be said.
    """

    metric: str
    value: float | None
    limit: float
    bound: Literal["at_most", "at_least"]
    times: float | None
    about: str

    @classmethod
    def of(cls, check: Check) -> Failure:
        known = bool(np.isfinite(check.value))
        return cls(
            check.metric,
            float(check.value) if known else None,
            float(check.threshold),
            "at_most" if check.at_most else "at_least",
            _times(check) if known else None,
            subject_of(check.metric),
        )

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.metric} cannot be measured"
        return f"{self.metric} is {self.value:.3g}, {self.bound.replace('_', ' ')} {self.limit:.3g} is asked for"


@dataclass(frozen=True)
class Diagnosis:
    """What the failed checks and the rows' own drift say together.

    Attributes:
        cause: ``data``: rows and vectors moved; ``items``: only which items there are rows of; ``vectors``: they moved
            and the rows did not, or nothing is known of the rows; ``run``: what is written is no good, whatever the
            data; ``generation``: other coordinates; ``stale``: another version is served by now.
        summary: one sentence.
        advice: what to do.
        failed: what failed, worst first.
        rows: what of the rows moved since the run that this one goes on from; None where that is not known.
    """

    cause: Cause
    summary: str
    advice: str
    failed: tuple[Failure, ...] = ()
    rows: tuple[str, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as manifests and events have it."""
        return asdict(self) | {
            "failed": [asdict(one) for one in self.failed],
            "rows": None if self.rows is None else list(self.rows),
        }


def diagnose(checks: Sequence[Check], lineage: Mapping[str, Any] | None) -> Diagnosis | None:
    """Return what the failed checks come from; None where none failed.

    Args:
        checks: of the gate.
        lineage: of the run; its ``drift`` is what moved in the rows since the run that it goes on from, each with a
            ``message``, and None or absent where there was nothing to compare with.
    """
    failed = [Failure.of(check) for check in checks if check.verdict == "fail"]
    if not failed:
        return None
    failed.sort(key=lambda one: -np.inf if one.times is None else -one.times)
    drift = (lineage or {}).get("drift")
    rows = None if drift is None else tuple(str(one["message"]) for one in drift)
    cause = _cause(failed, rows)
    return Diagnosis(cause, _summary(cause, failed, rows), _ADVICE[cause], tuple(failed), rows)


def stale(message: str) -> Diagnosis:
    """Return the diagnosis of a candidate that rests on what is not served any more."""
    return Diagnosis("stale", f"The run was overtaken: {message.partition(':')[0]}.", _ADVICE["stale"])


def _cause(failed: Sequence[Failure], rows: Sequence[str] | None) -> Cause:
    if any(one.metric in NEW_GENERATION for one in failed):
        return "generation"
    # Norms alone are the run's doing; where directions moved too, both come from the same.
    moved = any(one.about == "vectors" for one in failed)
    subjects = {one.about for one in failed if not (moved and one.metric in _NORMS)}
    if "run" in subjects:
        return "run"
    if subjects == {"items"}:
        return "items"
    return "data" if rows else "vectors"


def _summary(cause: Cause, failed: Sequence[Failure], rows: Sequence[str] | None) -> str:
    named = _named([str(one) for one in failed])
    moved = _named(rows or ())
    if cause == "data":
        return f"The rows moved ({moved}) and the vectors with them: {named}."
    if cause == "items":
        same = "moved no further than a refresh may"
        return f"Other items have rows than before{f' ({moved})' if rows else ''}; those of both {same}: {named}."
    if cause == "vectors":
        alike = "nothing is known of the rows before" if rows is None else "the rows are like those before"
        return f"The vectors moved and {alike}, so look at the run first: {named}."
    if cause == "run":
        return f"What the run wrote cannot be served{f' (rows: {moved})' if rows else ''}: {named}."
    return f"The vectors have other coordinates, which no consumer of today's views can read: {named}."


def _named(parts: Sequence[str]) -> str:
    more = len(parts) - MAX_NAMED
    return "; ".join(parts[:MAX_NAMED]) + (f"; {more} more" if more > 0 else "")


def _times(check: Check) -> float | None:
    """Return how far the value is from the ideal one, in units of how far the limit lets it be."""
    value, limit = float(check.value), float(check.threshold)
    if check.at_most:
        return value / limit if limit > 0 else None
    if limit <= 1:  # shares and cosines, whose best is 1
        return (1 - value) / (1 - limit) if limit < 1 else None
    return limit / value if value > 0 else None
