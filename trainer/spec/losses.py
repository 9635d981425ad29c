"""Losses by name: what a score that one trained means. Without torch; trainer.models.losses computes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NamedTuple

from trainer.spec.base import May, Positive, Spec, later
from trainer.spec.evaluation import DEFAULT_METRICS, ORDER_METRICS, POINTWISE_METRICS, VALUE_METRICS

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec


class LossSettings(Spec):
    """Settings of losses, of a CTR model and of each of a dataset's labels; ``focal_alpha`` null: equal weights."""

    focal_gamma: Annotated[float, May.DIFFER_ON_WARM_START] = later(2.0, ge=0.0, le=100.0, allow_inf_nan=False)
    focal_alpha: Annotated[float | None, May.DIFFER_ON_WARM_START] = later(0.25, gt=0.0, lt=1.0)


SCORES_AT_ONCE = 1 << 18
"""Scores that losses of shared items make at a time, 1 MiB: they stay in the cache of a core between the products that
make and read them, which are twice as fast as with 4 MiB (3,418 items, dimension 64, AVX2)."""
LEAST_TARGETS_AT_ONCE = 64
"""Fewest targets of such a block: of fewer, reading all items takes longer than the products."""


class RetrievalSettings(Spec):
    """Settings of losses of a target among other items.

    ``share_negatives``: all targets of a batch have the same drawn items. ``normalize``: queries and item vectors have
    length 1 in scores. ``temperature``: the number that scores are divided by. ``calibration``: t of gbce (0: plain
    BCE, 1: as without sampling). ``margin``: the cosine from which on cosine_contrastive counts a drawn item;
    ``negative_weight``: weight of the mean of these beside the target.
    """

    share_negatives: Annotated[bool, May.DIFFER_ON_WARM_START] = later(False)
    normalize: bool = later(False)
    temperature: Positive = later(1.0)
    calibration: Annotated[float, May.DIFFER_ON_WARM_START] = later(0.75, ge=0.0, le=1.0)
    margin: Annotated[float, May.DIFFER_ON_WARM_START] = later(0.4, ge=-1.0, le=1.0)
    negative_weight: Annotated[float, May.DIFFER_ON_WARM_START] = later(150.0, gt=0.0, allow_inf_nan=False)


class Loss(NamedTuple):
    """A loss as jobs name it."""

    metrics: tuple[str, ...]
    """Metrics without a ranking that its scores have: only bce makes of a score the log odds of a class."""
    default_metrics: tuple[str, ...]
    outputs: tuple[str, ...]
    """Columns that ``evenkeel predict`` writes."""
    is_logit: bool = False
    """True if a score is the log odds of the label."""
    has_output_hessian: bool = False
    """True if its second derivative by the score is that of every label (trainer.training.regularizers.outputs)."""
    of_classes: bool = False
    """True if its labels are classes, which can be smoothed."""
    of_values: bool = False
    """True if it learns real-valued labels."""
    settings: Mapping[str, str] = MappingProxyType({})
    """The model's fields by the arguments of the loss that they are (trainer.models.losses, retrieval_losses)."""
    is_log: bool = False
    """True if a score is the log of what it predicts of the label."""
    least_label: float | None = None
    """The least label that it has a meaning for, of a loss of real-valued labels alone."""
    of_labels: bool = False
    """True if each row has a label of its own, and so a loss of its own outside of training too."""


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
        VALUE_METRICS,
        VALUE_METRICS,
        ("prediction",),
        of_values=True,
        is_log=True,
        least_label=0.0,
        of_labels=True,
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
    """Return the loss that the job's model is trained with; that of item2vec, which has no other name, is ``bce``."""
    losses = job.model.losses
    return losses[0] if losses and job.model.loss not in losses else job.model.loss


def loss_settings_of(job: JobSpec) -> dict[str, float | None]:
    """Return the arguments of that loss other than scores and labels (trainer.models.losses)."""
    return settings_of(loss_of(job), job.model)


def settings_of(loss: str, owner: Spec) -> dict[str, float | None]:
    """Return the arguments of a loss other than scores and labels, from the model's or the label's fields."""
    return {argument: getattr(owner, field) for argument, field in LOSSES[loss].settings.items()}


LABEL_LOSSES = tuple(name for name, loss in LOSSES.items() if loss.of_labels)
VALUE_LOSSES = tuple(name for name, loss in LOSSES.items() if loss.of_values)
