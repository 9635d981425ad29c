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

    ``log``: which axes are logarithmic, "", "x", "y" or "xy". ``joined``: whether a curve's points are joined, or dots.
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

    ``name``: of its chart's file. ``lines`` of cells under ``header``; ``notes``: what must be said of it. ``across``:
    how many panels stand side by side.
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
    """Sections and claims that a report is given."""

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
