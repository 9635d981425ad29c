"""Model quality: the served model and the candidate's on the same held-out rows."""

from __future__ import annotations

from embeddings.refresh.gate_checks.base import STANDARD_ERROR, GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison
from embeddings.refresh.model_comparison import ALL_ROWS, NEWEST_ROWS

MARGIN = 0.005
"""Loss of the main metric (AUC, NDCG, ...) below which a model does not count as worse."""


class ModelQuality(GateCheck):
    """Figures of :class:`embeddings.refresh.model_comparison.ModelComparison`.

    ``model_gain[SLICE]``: upper confidence limit of the candidate's metric less the served model's; below ``-MARGIN``
    the candidate is held. ``model_gain[ndcg_20_full]``: the same for rankings of all items, if each user has such a
    ranking. ``model_metric``, ``model_metric[newest]``: the candidate's own metric; ``model_metric_before``,
    ``model_metric_before[SLICE]``: the served model's on today's rows. A fall of either below its usual values holds
    the candidate, because a comparison misses two faults: unreadable rows make all models equally bad, and on rows with
    wrong labels a model that has learnt them is the better one.
    """

    about = "model"
    limits = (
        Limit(
            "model_gain",
            -MARGIN,
            "the model is worse than the served one on rows that neither was trained on: look at what changed in the "
            "job or in its rows",
        ),
        Limit(
            "model_metric",
            None,
            "the model is worse than those of the days before on their held-out rows: look at the job and its rows",
            spread=0.01,
        ),
        Limit(
            "model_metric_before",
            None,
            "the served model reads today's rows worse than those of the days before: look at the rows",
            spread=0.02,
            about="rows",
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        models = comparison.models
        if models is None or not models.differences:
            return {}
        main, metrics = models.differences[0].metric, {}
        for one in models.differences:
            metrics[f"model_gain[{one.slice if one.metric == main else one.metric}]"] = one.high
        for one in models.differences:
            if one.metric != main:
                continue
            group = "" if one.slice == ALL_ROWS else f"[{one.slice}]"
            sign = -1.0 if one.lower_is_better else 1.0
            if one.slice in (ALL_ROWS, NEWEST_ROWS):
                metrics[f"model_metric{group}"] = sign * one.candidate
                metrics[f"model_metric{STANDARD_ERROR}{group}"] = one.candidate_error
            metrics[f"model_metric_before{group}"] = sign * one.served
            metrics[f"model_metric_before{STANDARD_ERROR}{group}"] = one.served_error
        return metrics
