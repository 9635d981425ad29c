"""Accuracy and churn of the collection's frozen probes (embeddings.refresh.probe) on a candidate."""

from __future__ import annotations

import math

import numpy as np

from embeddings.refresh.gate_checks.base import STANDARD_ERROR, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.kernel_alignment import diagnostics
from embeddings.refresh.probe import Probe, predict
from embeddings.vectors.item_vectors import find_rows, keys_of


class FrozenProbes(GateCheck):
    """Accuracy and churn of each probe, ``canary_accuracy[NAME]`` and so on.

    ``accuracy`` is measured on the held-out items, ``drop`` is its loss since the probe was registered. ``churn`` is
    the share of predictions that changed since the previous version, among items with enough training rows in both;
    ``churn_all`` is the same for all items. ``judged`` and ``items`` are the numbers of items behind accuracy and
    churn. Only ``drop`` has a limit by default. The others are only reported, as are ``alignment``,
    ``alignment_lift`` and ``nw_accuracy`` (embeddings.refresh.kernel_alignment). Items without evidence in the
    candidate, and for churn in either version, do not count; NaN if none is left.
    """

    about = "vectors"
    limits = (
        Limit(
            "canary_drop",
            0.02,
            "a consumer that is frozen like yours gets worse: look at the other metrics and at the data",
            at_most=True,
            spread=0.01,
        ),
        Limit(
            "canary_churn",
            None,
            "a consumer that is frozen like yours changes too many predictions: look at the other metrics",
            at_most=True,
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        metrics = {}
        for name, probe in comparison.probes.items():
            figures = _figures(probe, comparison)
            metrics.update({f"canary_{figure}[{name}]": value for figure, value in figures.items()})
            metrics[f"canary_drop{STANDARD_ERROR}[{name}]"] = _standard_error(figures["churn"], figures["judged"])
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


def _standard_error(churn: float, num_items: float) -> float:
    """Return the standard error of a change of accuracy on ``num_items``; churn bounds the share that changes."""
    return math.sqrt(churn * (1.0 - churn) / num_items) if num_items > 0 and 0.0 <= churn <= 1.0 else 0.0
