"""Sections of a report: tables as text and as Markdown, notes and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NOT_RUN = "–"
"""Text of a cell without a figure."""
Curve = Sequence[tuple[float, ...]]
"""Points (x, y) or (x, y, standard deviation of y) in the order in which they are joined; empty: not drawn."""
Verdict = tuple[str, str, str]
"""A claim as it is reported: ("holds" or "does not hold", its text, what was measured)."""


@dataclass(frozen=True)
class Panel:
    """One chart: curves by label.

    ``x`` and ``y`` are labels of the axes. ``log``: the logarithmic axes: "", "x", "y" or "xy". ``joined``: True if a
    curve's points are joined by lines, False for dots.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    log: str = ""
    joined: bool = True


@dataclass(frozen=True)
class Section:
    """A section of a report.

    ``name``: name of its chart's file. ``header`` and ``lines``: cells of its table. ``notes``: paragraphs below the
    table. ``across``: largest number of panels side by side.
    """

    name: str
    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()
    across: int = 4


@dataclass(frozen=True)
class Findings:
    """Sections of a report, and claims with their verdicts."""

    sections: tuple[Section, ...] = ()
    claims: tuple[Verdict, ...] = ()


def verdict(text: str, holds: bool | None, measured: str) -> Verdict:
    """Return a claim with its verdict."""
    return ("holds" if holds else "does not hold", text, measured)


def table_of(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), "|---" * len(header) + "|", *map(line, lines)])
