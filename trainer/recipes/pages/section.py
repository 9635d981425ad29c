"""A part of a report beside the tables of test figures: a table of its own, and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[float, float]]
"""Points (x, y) in the order in which they are joined."""


@dataclass(frozen=True)
class Panel:
    """One chart: curves by label. ``log``: which axes are logarithmic, "", "x", "y" or "xy"."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    log: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a report.

    ``name``: of its chart's file. ``lines`` of cells under ``header``; ``notes``: what must be said of it.
    """

    name: str
    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()


@dataclass(frozen=True)
class Findings:
    """What a recipe finds beyond its tables. ``claims``: (verdict, "holds" or "does not hold", text, measured)."""

    sections: tuple[Section, ...] = ()
    claims: tuple[tuple[str, str, str], ...] = ()
