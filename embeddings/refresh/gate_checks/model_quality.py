"""Whether the model got worse: the served one and the candidate on the same held-out rows."""

from __future__ import annotations

from embeddings.refresh.gate_checks.base import GateCheck, Limit
from embeddings.refresh.gate_checks.comparison import Comparison

MARGIN = 0.005
"""Loss of the main metric (AUC, NDCG, ...) below which a model does not count as worse."""


class ModelQuality(GateCheck):
    """Figures of :class:`embeddings.refresh.model_comparison.ModelComparison`.

    ``model_gain[SLICE]``: upper end of the interval of what the candidate's metric gains on the served model's; held
    below ``-MARGIN``. ``model_gain[ndcg_20_full]``: the same of all items ranked for each user, where they are.
    ``model_metric``: the candidate's own metric; ``model_metric_before``: the served model's on
    today's rows. Both are held where they fall below what they usually are, since rows that no model can read make all
    models equally bad.
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
        ),
    )

    @staticmethod
    def measure(comparison: Comparison) -> dict[str, float]:
        models = comparison.models
        if models is None or not models.differences:
            return {}
        of_all = models.differences[0]
        gains = {
            f"model_gain[{one.slice if one.metric == of_all.metric else one.metric}]": one.high
            for one in models.differences
        }
        sign = -1.0 if of_all.lower_is_better else 1.0
        return {**gains, "model_metric": sign * of_all.candidate, "model_metric_before": sign * of_all.served}
