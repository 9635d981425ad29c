"""The decision to hold a candidate or not, by the gate's verdict, and the end of a series of held versions.

Each candidate is judged against the served version. If the data changed permanently, every day's candidate is far from
that version. So after ``max_held`` held versions in a row without a fault, the newest is published as the first version
of a new generation. Consumers can read it, since it is aligned onto the served coordinates, but should be fitted again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embeddings.refresh.gate import Check, Verdict
from embeddings.refresh.gate_checks.registry import subject_of
from embeddings.refresh.model_comparison import ModelComparison
from embeddings.refresh.record import RefreshRecord
from embeddings.refresh.settings import Gate

FAULTS = frozenset({"run", "rows", "model"})
"""Subjects of failures that are faults: new but valid data does not cause them."""
FAR_ROWS = 2.0
"""Distance of a row figure from its usual value that counts as a fault, in units of what its limit allows."""


@dataclass(frozen=True)
class HoldDecision:
    """The decision on a judged candidate.

    Attributes:
        hold_for: reasons for which it is held; empty: it is published.
        sound: True if the next refresh may continue from its rows: nothing is wrong with run, rows or model.
        released: the manifest's entry on the series of held versions that its publication ends; None: it ends none.
        not_released: reason why a held candidate does not end the series; None for a candidate that is not held.
    """

    hold_for: list[str]
    sound: bool
    released: dict[str, Any] | None = None
    not_released: str | None = None


def hold_or_release(
    verdict: Verdict,
    gate: Gate,
    others: Sequence[str],
    held: Sequence[Mapping[str, Any]],
    models: ModelComparison | None,
) -> HoldDecision:
    """Decide if a candidate is held.

    ``others`` are more reasons to hold it, which apply in every mode of the gate, and ``held`` the manifests of the
    versions held in a row before it, oldest first.
    """
    sound = is_sound(verdict, models)
    if gate.mode != "enforce" or verdict.passed:
        return HoldDecision(list(others), sound)
    not_released = _not_released(verdict, gate, held, models)
    if not_released is not None or others:
        return HoldDecision([*others, *verdict.reasons], sound, not_released=not_released)
    return HoldDecision([], sound, {"in_a_row": _num_sound(held) + 1, "failed": verdict.failed})


def is_sound(verdict: Verdict, models: ModelComparison | None) -> bool:
    """Return True if nothing is wrong with the run, its rows or its model.

    If models were not compared, a failure of the vectors counts as a fault too.
    """
    if any(map(is_fault, verdict.checks)):
        return False
    return _compared(models) or all(subject_of(name) != "vectors" for name in verdict.failed)


def is_fault(check: Check) -> bool:
    """Return True if a failed check shows a fault; row figures do so only if they are far from their usual value."""
    subject = subject_of(check.metric)
    if check.verdict == "pass" or subject not in FAULTS:
        return False
    times = check.times
    return subject != "rows" or check.usual is None or times is None or times >= FAR_ROWS


def _not_released(
    verdict: Verdict, gate: Gate, held: Sequence[Mapping[str, Any]], models: ModelComparison | None
) -> str | None:
    if gate.when_stuck == "hold":
        return "publish.gate.when_stuck is hold"
    faults = [check.metric for check in verdict.checks if is_fault(check)]
    if faults:
        return f"{', '.join(faults)} failed"
    if not _compared(models):
        return f"its model was not compared with the served one{'' if models is None else f': {models.skipped}'}"
    in_a_row = _num_sound(held) + 1
    return f"{in_a_row} of {gate.max_held} sound refreshes in a row" if in_a_row < gate.max_held else None


def _compared(models: ModelComparison | None) -> bool:
    return models is not None and bool(models.differences)


def _num_sound(held: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of consecutive sound versions at the end of ``held``."""
    number = 0
    for manifest in reversed(held):
        if not RefreshRecord.of(manifest).sound:
            break
        number += 1
    return number
