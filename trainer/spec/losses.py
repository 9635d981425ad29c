"""Losses, keyed by name, and the meaning of scores trained by each. Torch-free; trainer.models.losses computes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NamedTuple

from trainer.spec.base import May, Positive, Spec, later
from trainer.spec.evaluation import DEFAULT_METRICS, ORDER_METRICS, POINTWISE_METRICS, VALUE_METRICS

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec


class LossSettings(Spec):
    """Settings of the focal loss, for a CTR model or a label of a dataset; ``focal_alpha`` null: equal weights."""

    focal_gamma: Annotated[float, May.DIFFER_ON_WARM_START] = later(2.0, ge=0.0, le=100.0, allow_inf_nan=False)
    focal_alpha: Annotated[float | None, May.DIFFER_ON_WARM_START] = later(0.25, gt=0.0, lt=1.0)


SCORES_AT_ONCE = 1 << 18
"""Number of scores in a block, for losses with shared items: its 1 MiB stays in a core's cache until it is read. The
matrix products are twice as fast as with 4 MiB (3,418 items, dimension 64, AVX2)."""
LEAST_TARGETS_AT_ONCE = 64
"""Fewest targets of a block of scores: with fewer, reading all items takes longer than the products."""


class RetrievalSettings(Spec):
    """Settings of losses that compare a target item's score with scores of other items.

    ``share_negatives``: all targets of a batch have the same drawn items. ``normalize``: queries and item vectors have
    length 1 in scores (to which bpr adds the item's bias). ``temperature``: the divisor of scores.
    ``calibration``: t of gbce (0: plain BCE, 1: as without sampling). ``margin``: cosine above which cosine_contrastive
    penalises a drawn item; ``negative_weight``: weight of the mean penalty, relative to the target's term.
    """

    share_negatives: Annotated[bool, May.DIFFER_ON_WARM_START] = later(False)
    normalize: bool = later(False)
    temperature: Positive = later(1.0)
    calibration: Annotated[float, May.DIFFER_ON_WARM_START] = later(0.75, ge=0.0, le=1.0)
    margin: Annotated[float, May.DIFFER_ON_WARM_START] = later(0.4, ge=-1.0, le=1.0)
    negative_weight: Annotated[float, May.DIFFER_ON_WARM_START] = later(150.0, gt=0.0, allow_inf_nan=False)


class Loss(NamedTuple):
    """Properties of a loss that jobs name."""

    metrics: tuple[str, ...]
    """Pointwise metrics that suit its scores; some need the log odds of a class, which only bce trains."""
    default_metrics: tuple[str, ...]
    outputs: tuple[str, ...]
    """Columns that ``evenkeel predict`` writes."""
    is_logit: bool = False
    """True if a score is the log odds of the label."""
    has_output_hessian: bool = False
    """True if its second derivative by the score is the same for every label (trainer.training.regularizers.outputs).
    """
    of_classes: bool = False
    """True if its labels are classes, which can be smoothed."""
    of_values: bool = False
    """True if it learns real-valued labels."""
    settings: Mapping[str, str] = MappingProxyType({})
    """Names of the spec's fields by argument of the loss function (trainer.models.losses, retrieval_losses)."""
    is_log: bool = False
    """True if a score is the log of the predicted label."""
    least_label: float | None = None
    """Smallest label for which the loss has a meaning; None: there is no such limit."""
    of_labels: bool = False
    """True if it compares a row's score with the row's label, so that evaluation can compute it too."""


LOSSES: dict[str, Loss] = {
    "bce": Loss(
        POINTWISE_METRICS,
        DEFAULT_METRICS,
        ("logit", "probability"),
        is_logit=True,
        has_output_hessian=True,
        of_classes=True,
        of_labels=True,
    ),
    "mse": Loss(
        (*ORDER_METRICS, *VALUE_METRICS),
        ("auc", "rmse"),
        ("prediction",),
        has_output_hessian=True,
        of_values=True,
        of_labels=True,
    ),
    "focal": Loss(
        ORDER_METRICS,
        ("auc",),
        ("score",),
        of_classes=True,
        of_labels=True,
        settings={"gamma": "focal_gamma", "alpha": "focal_alpha"},
    ),
    "poisson": Loss(
        VALUE_METRICS,
        VALUE_METRICS,
        ("prediction",),
        has_output_hessian=True,
        of_values=True,
        is_log=True,
        least_label=0.0,
        of_labels=True,
    ),
    "exponential": Loss(
        VALUE_METRICS, VALUE_METRICS, ("prediction",), of_values=True, is_log=True, least_label=0.0, of_labels=True
    ),
    "sampled_softmax": Loss(ORDER_METRICS, ("auc",), ("score",)),
    "bpr": Loss((*ORDER_METRICS, "logloss"), DEFAULT_METRICS, ("score",)),
    "top1": Loss(("auc",), ("auc",), ("score",)),
    "softmax": Loss(ORDER_METRICS, ("auc",), ("score",)),
    "gbce": Loss(ORDER_METRICS, ("auc",), ("score",), settings={"calibration": "calibration"}),
    "cosine_contrastive": Loss(
        ORDER_METRICS, ("auc",), ("score",), settings={"margin": "margin", "negative_weight": "negative_weight"}
    ),
}


def loss_of(job: JobSpec) -> str:
    """Return the name of the loss that the job's model is trained with; the loss of item2vec is named ``bce``."""
    losses = job.model.losses
    return losses[0] if losses and job.model.loss not in losses else job.model.loss


def loss_settings_of(job: JobSpec) -> dict[str, float | None]:
    """Return the keyword arguments of the loss of the job's model, other than scores and labels."""
    return settings_of(loss_of(job), job.model)


def settings_of(loss: str, owner: Spec) -> dict[str, float | None]:
    """Return the keyword arguments of a loss, read from the fields of ``owner``, a model or a label."""
    return {argument: getattr(owner, field) for argument, field in LOSSES[loss].settings.items()}


LABEL_LOSSES = tuple(name for name, loss in LOSSES.items() if loss.of_labels)
VALUE_LOSSES = tuple(name for name, loss in LOSSES.items() if loss.of_values)
