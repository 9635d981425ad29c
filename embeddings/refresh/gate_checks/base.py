"""What a check of the gate is: a measurement, and limits of what it measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from embeddings.refresh.gate_checks.comparison import Comparison

Metrics = Mapping[str, float]
Subject = Literal["items", "vectors", "run"]

MOVED = (
    "the vectors moved more than a refresh moves them. Check that the run was warm-started from the current version "
    "(init_from), and its data; to serve it all the same, promote it with a reason and override_gate"
)


def base_of(metric: str) -> str:
    """Return ``cosine_p5[10-99]`` without its bucket, ``canary_churn[genre]`` without its probe."""
    return metric.partition("[")[0]


@dataclass(frozen=True)
class Calibrated:
    """How far from the worst null refresh a limit lies: ``factor * worst``, then ``margin`` further out.

    A factor alone would leave nothing where the nulls are near zero, so there is a margin too.

    Attributes:
        group_margin: takes the place of ``margin`` for the metric in a bucket of counts, which has fewer items.
        loosest: no null makes the limit looser than this share of the starting one; None: the nulls alone decide.
        by_halves: as tight as nulls on halves of the rows may make the limit, which do not tighten others; None: they
            do not tighten this one.
    """

    factor: float
    margin: float
    group_margin: float = 0.0
    loosest: float | None = None
    by_halves: float | None = None


@dataclass(frozen=True)
class Limit:
    """The limit of one metric.

    Attributes:
        metric: its name, without a bucket.
        starting: the limit before a calibration; None: there is none.
        remedy: what to do about a failure.
        at_most: what is judged from above; others are judged from below.
        starting_in_group: the same for ``metric[GROUP]``: in a bucket of counts, whose items are fewer and rarer and
            move more; or of a probe.
        calibrated: how null refreshes set it; None: they do not.
    """

    metric: str
    starting: float | None
    remedy: str = MOVED
    at_most: bool = False
    starting_in_group: float | None = None
    calibrated: Calibrated | None = None

    def starting_for(self, name: str, dim: float) -> float | None:
        """Return the starting limit of ``metric`` or ``metric[GROUP]`` of vectors of ``dim`` coordinates."""
        return self.starting_in_group if "[" in name else self.starting

    def binding(self, name: str, dim: float, own: float | None) -> float | None:
        """Return the limit that binds: one's ``own`` where there is one, else the starting one, None without both."""
        return self.starting_for(name, dim) if own is None else float(own)

    def from_nulls(self, name: str, worst: float, nulls: Sequence[Metrics]) -> float:
        """Return the limit that the ``worst`` of the ``nulls`` calls for."""
        assert self.calibrated is not None
        margin = self.margin(name, nulls)
        return self.calibrated.factor * worst + (margin if self.at_most else -margin)

    def margin(self, name: str, nulls: Sequence[Metrics]) -> float:
        """Return how far beyond the worst null the limit lies."""
        assert self.calibrated is not None
        return self.calibrated.group_margin if "[" in name else self.calibrated.margin


class GateCheck(ABC):
    """One measurement of a candidate, and the limits that hold it."""

    limits: ClassVar[tuple[Limit, ...]]
    about: ClassVar[Subject] = "run"
    """What a failure is of: of which ``items`` there were rows, of where their ``vectors`` went, or of the ``run``,
    whose rows nobody is to be served or to go on from."""
    needs_previous: ClassVar[bool] = True
    """Whether there is nothing to measure of a first version."""

    @staticmethod
    @abstractmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        """Return metrics by name; what cannot be measured is NaN, and fails where it has a limit."""
