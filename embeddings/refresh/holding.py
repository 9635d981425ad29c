"""From the gate's verdict to held or not: refreshes held in a row, and a user's rule for when that is to end.

A candidate is judged against what is served, always. Where one was held before, it is also measured against that one:
two refreshes that end in the same place, each passing by the limits of one refresh, say that the data are there now.
That is what ``settled`` means, and it means something because a fault cannot hand itself on: a refresh goes on from
held rows only if they are ``sound`` (docs/adr/0063).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embeddings.refresh.gate import Verdict
from embeddings.refresh.gate_checks.base import base_of
from embeddings.refresh.gate_checks.registry import subject_of
from embeddings.refresh.settings import GateSettings


@dataclass(frozen=True)
class Before:
    """A version that was held before the candidate, and the candidate measured against it.

    Attributes:
        version: its name.
        failed: checks that the candidate fails against it.
        is_start: whether the candidate's run went on from its rows.
    """

    version: str
    failed: tuple[str, ...]
    is_start: bool

    @property
    def settled(self) -> bool:
        """Whether the candidate is where the one before it was."""
        return not self.failed


@dataclass(frozen=True)
class Holding:
    """What becomes of a judged candidate.

    Attributes:
        hold_for: why it is held; empty: it is published.
        in_a_row: how many were held in a row, it included, if it is held.
        sound: whether the next refresh may go on from its rows: its vectors passed every check against the version that
            its run started from, be that the served one or a held one.
        before: the one held before it.
        released: what the user's rule let through, as the manifest has it; None: no rule did.
        refused: why the user's rule did not, None without a rule.
    """

    hold_for: list[str]
    in_a_row: int
    sound: bool
    before: Before | None = None
    released: dict[str, Any] | None = None
    refused: str | None = None

    @property
    def record(self) -> dict[str, Any]:
        """Entries of the manifest."""
        before = self.before
        return {
            "sound": self.sound,
            "held_before": None
            if before is None
            else {"version": before.version, "failed": list(before.failed), "is_start": before.is_start},
            "released": self.released,
            "rule_refused": self.refused,
        }


def hold_or_release(
    verdict: Verdict, gate: GateSettings, others: Sequence[str], num_held: int, before: Before | None
) -> Holding:
    """Return what becomes of a candidate.

    Args:
        verdict: against what is served.
        gate: the collection's mode and rule.
        others: what holds it besides the gate, which no rule lets through.
        num_held: how many were held in a row before it.
        before: the last of these, if it can be compared with.
    """
    sound = _sound(verdict, before)
    if gate.mode != "enforce" or verdict.passed:
        return Holding(list(others), num_held + 1, sound, before)
    in_a_row, rule = num_held + 1, gate.promote
    refused = None if rule is None else _refused(verdict, rule.only, rule.settled, in_a_row, gate.max_held, before)
    if rule is None or refused is not None or others:
        return Holding([*others, *verdict.reasons], in_a_row, sound, before, refused=refused)
    released = {"in_a_row": in_a_row, "failed": verdict.failed, "only": list(rule.only), "settled": rule.settled}
    return Holding([], in_a_row, sound, before, released)


def _sound(verdict: Verdict, before: Before | None) -> bool:
    against_served = [name for name in verdict.failed if subject_of(name) != "items"]
    if before is None or not before.is_start:
        return not against_served
    # Faults that need no version to compare with count in any case.
    of_run = [name for name in against_served if subject_of(name) == "run"]
    return not of_run and all(subject_of(name) == "items" for name in before.failed)


def _refused(
    verdict: Verdict, only: Sequence[str], settled: bool, in_a_row: int, max_held: int, before: Before | None
) -> str | None:
    """Return why the rule does not let the candidate through, None where it does."""
    beyond = [name for name in verdict.failed if name not in only and base_of(name) not in only]
    beyond += [name for name in verdict.failed if subject_of(name) == "run" and name not in beyond]
    if in_a_row < max_held:
        return f"{in_a_row} of {max_held} in a row"
    if beyond:
        return f"{', '.join(beyond)} failed"
    if settled and (before is None or not before.settled):
        return "there is none before it to compare with" if before is None else f"{', '.join(before.failed)} moved on"
    return None
