"""What a candidate does to the collection's probes (embeddings.refresh.probe)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embeddings.refresh.gate_checks.base import Calibrated, GateCheck, Limit, Metrics
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.kernel_alignment import diagnostics
from embeddings.refresh.probe import Probe, predict
from embeddings.vectors.item_vectors import find_rows, keys_of

_STANDARD_ERRORS = 2.0
"""A probe's figures are shares of its items: a margin is at least so many standard errors of such a share, or a task
of 150 items would hold every refresh that flips one more of them than the nulls did."""


@dataclass(frozen=True)
class ProbeLimit(Limit):
    """The limit of a share of a probe's items; the metric ``size`` says of how many."""

    size: str = ""

    def from_nulls(self, name: str, worst: float, nulls: Sequence[Metrics]) -> float:
        # Nulls that go on learning make a probe better; a refresh that does not is no fault.
        return super().from_nulls(name, max(worst, 0.0), nulls)

    def margin(self, name: str, nulls: Sequence[Metrics]) -> float:
        assert self.calibrated is not None
        return max(self.calibrated.margin, _STANDARD_ERRORS * self._standard_error(name, nulls))

    def _standard_error(self, name: str, nulls: Sequence[Metrics]) -> float:
        """Return sqrt(p (1 - p) / n), 0 where nulls do not say how many items there are.

        p is the worst churn of the nulls, which bounds how much a drop can be, and n the fewest items that it was a
        share of.
        """
        probe = name[name.index("[") :]
        fewest = min(metrics.get(self.size + probe, 0.0) for metrics in nulls)
        churn = max(metrics.get("canary_churn" + probe, 0.0) for metrics in nulls)
        return math.sqrt(churn * (1.0 - churn) / fewest) if fewest > 0 and 0.0 <= churn <= 1.0 else 0.0


class FrozenProbes(GateCheck):
    """Accuracy and churn of each probe, ``canary_accuracy[NAME]`` and so on.

    ``accuracy`` is that on the items kept for judging, ``drop`` what it lost since the day the probe was registered;
    ``churn`` the share of predictions, over all its items, that differ from those on the previous version; ``judged``
    and ``items`` are how many items accuracy and churn are shares of. Churn is that of evident items;
    ``churn_all`` that of all, without a limit. Without one, too: ``alignment``,
    ``alignment_lift`` and ``nw_accuracy`` (embeddings.refresh.kernel_alignment). Items without evidence in the
    candidate, and for churn in either, do not count; NaN where none is left.

    Starting limits: two points under the accuracy of the first day, and one prediction in four.
    """

    about = "vectors"
    limits = (
        ProbeLimit(
            "canary_drop",
            None,
            "a consumer that is frozen like yours gets worse: look at the other metrics and at the data",
            at_most=True,
            starting_in_group=0.02,
            calibrated=Calibrated(1.0, 0.02),
            size="canary_judged",
        ),
        ProbeLimit(
            "canary_churn",
            None,
            "a consumer that is frozen like yours changes its mind too often: look at the other metrics",
            at_most=True,
            starting_in_group=0.25,
            calibrated=Calibrated(1.3, 0.01),
            size="canary_items",
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        metrics = {}
        for name, probe in comparison.probes.items():
            figures = _figures(probe, comparison)
            metrics.update({f"canary_{figure}[{name}]": value for figure, value in figures.items()})
        return metrics


def _figures(probe: Probe, comparison: Comparison) -> dict[str, float]:
    previous, candidate = comparison.served, comparison.candidate
    keys = keys_of(probe["ids"])
    new, old = find_rows(candidate.keys, keys), find_rows(previous.keys, keys)
    has_new = (new >= 0) & candidate.evidence[new]
    has_old = (old >= 0) & previous.renewed[old]
    predicted = np.full(len(keys), -1)
    vectors = candidate.vectors[new[has_new]]
    predicted[has_new] = predict(probe, vectors)
    before = np.full(len(keys), -1)
    before[has_old] = predict(probe, previous.vectors[old[has_old]])
    judged = has_new & np.array(probe["held_out"], dtype=bool)
    both = has_new & has_old
    changed = predicted != before
    evident = both & np.isin(new, comparison.evident[1])
    judged_for_churn = evident if evident.any() else both
    right = predicted == np.array(probe["codes"])
    accuracy = float(right[judged].mean()) if judged.any() else float("nan")
    codes, held_out = (np.array(probe[part])[has_new] for part in ("codes", "held_out"))
    return {
        "accuracy": accuracy,
        "drop": float(probe["accuracy"]) - accuracy,
        "churn": float(changed[judged_for_churn].mean()) if both.any() else float("nan"),
        **({} if comparison.all_evident or not both.any() else {"churn_all": float(changed[both].mean())}),
        "judged": float(judged.sum()),
        "items": float(judged_for_churn.sum()),
        **diagnostics(np.nan_to_num(vectors), codes, held_out.astype(bool), len(probe["classes"])),
    }
