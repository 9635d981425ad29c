"""Regularizers of a job: terms and methods in addition to its loss, each off unless it is set. Torch-free.

SSE and weight decay are set elsewhere: in ``sse``, ``optimizer.weight_decay`` (of rows) and
``dense_optimizer.weight_decay``. A setting that has no meaning for a model is refused
(trainer.spec.checks.regularizers).
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from trainer.spec.base import Name, Positive, Spec, later


class DropoutMethod(Spec):
    """Computation of ``dropout`` of probability q: by masks, an explicit regularizer, and noise on the gradient.

    The paper is Wei, Kakade and Ma, The Implicit and Explicit Regularization Effects of Dropout;
    trainer.training.regularizers.dropout has the equations.

    ``masks``: k of DROPOUT_k (Algorithm 1), the number of draws over which the loss is averaged. 1 is ordinary dropout;
    with 0, ``explicit`` and ``noise`` replace masks (Algorithm 2). ``explicit``: R of ``output_hessian`` (R_approx,
    4.4), ``loss_jacobian`` (R~, 5.1) or ``identity`` (C.4); ``explicit_strength``: its lambda_1, by default q / (1 -
    q). ``noise`` added to the gradient: ``exact`` (section 3.1) or ``approximate`` (xi_approx, 4.6; with masks that is
    Algorithm 4); ``noise_strength``: its factor, by default that which gives the covariance of DROPOUT_1.

    ``label_samples``: number of sampled labels for the output Hessian (Algorithm 3); without it, the Hessian is exact.
    ``sign_samples``: number of draws of signs for ``identity`` (C.4); without it, the sum is exact. ``coefficient``:
    factor of R, 1 as ``published``, or 1/2 as in the second order of a ``taylor`` series.
    """

    masks: int = Field(default=1, ge=0, le=64)
    noise: Literal["none", "exact", "approximate"] = "none"
    explicit: Literal["none", "output_hessian", "loss_jacobian", "identity"] = "none"
    explicit_strength: Positive | None = None
    noise_strength: Positive | None = None
    label_samples: int | None = Field(default=None, ge=1, le=64)
    sign_samples: int | None = later(None, ge=1, le=64)
    coefficient: Literal["published", "taylor"] = "published"

    @property
    def passes(self) -> int:
        """Number of forward passes whose activations are kept at once; a differentiated derivative counts as two."""
        factors = 0 if self.explicit == "none" else self.label_samples or self.sign_samples or 1
        derivatives = factors + (self.noise == "approximate")
        plain = 1 if derivatives or not self.masks else 0
        return self.masks + plain + 2 * derivatives + (2 if self.noise == "exact" else 0)

    def lambda_1(self, rate: float) -> float:
        """Return the factor of R: ``explicit_strength``, by default q / (1 - q) = Var(eta), halved for ``taylor``."""
        strength = rate / (1.0 - rate) if self.explicit_strength is None else self.explicit_strength
        return strength * (0.5 if self.coefficient == "taylor" else 1.0)

    def noise_factor(self, rate: float) -> float:
        """Return the factor of the noise: ``noise_strength``, or its default.

        The default is sqrt((1 - 1/k) / 2) for the difference of two draws, and sqrt(q / (1 - q)) sqrt(1 - 1/k) for
        xi_approx of signs; 1 - 1/k is 1 without masks.
        """
        if self.noise_strength is not None:
            return self.noise_strength
        missing = 1.0 - 1.0 / self.masks if self.masks else 1.0
        return math.sqrt(missing / 2.0 if self.noise == "exact" else missing * rate / (1.0 - rate))


class Sam(Spec):
    """Sharpness-aware minimization (Foret et al., ICLR 2021).

    The gradient is computed at w + ``rho`` g / |g|, and applied at w. ``of``: the parameters w: all, only the rows of
    tables, or only the dense parameters.
    """

    rho: Positive = 0.05
    of: Literal["all", "tables", "dense"] = "all"


class EarlyStopping(Spec):
    """Stop training once ``metric`` of the validation split has not improved for ``patience`` epochs.

    ``metric``: default is NDCG among all items if the job measures it, else the first of auc, rmse and logloss, else
    the first ranking metric. A change counts as an improvement
    if it is more than ``min_delta``. ``keep``: the final parameters, those after the ``best`` or after the ``last``
    epoch. A job that publishes and has validation rows keeps its best epoch by default, and trains all epochs.
    """

    metric: str | None = Field(default=None, min_length=1, max_length=64)
    patience: int = Field(default=1, ge=1, le=1000)
    min_delta: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    keep: Literal["best", "last"] = "best"


class Laplacian(Spec):
    """Graph regularizer: ``strength`` |e_j - e_k|^2 is added to the loss.

    j is each looked-up row of ``feature``, and k a uniformly drawn neighbour of it in ``graph``.
    """

    feature: str = Field(min_length=1)
    graph: Name
    strength: Positive = 0.01


class Regularizers(Spec):
    """Dropout, label smoothing and other regularizers of a job, each off unless it is set.

    ``dropout``: probability q, after each hidden layer of a tower, or on looked-up rows (``dropout_layers``; default:
    hidden layers if the model has any, else rows); sasrec, gru4rec and hstu apply it at positions of their own.
    ``label_smoothing``: class labels y become y (1 - s) + s / 2. ``l2``: l2 |e|^2 of every row that a sample looks up
    is added to its loss, so that touched rows shrink. ``meda``: rows and their optimizer's state are reset at the start
    of each epoch.
    """

    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    dropout_layers: Literal["hidden", "embeddings", "both"] | None = later(None)
    dropout_method: DropoutMethod = later(DropoutMethod())
    label_smoothing: float = later(0.0, ge=0.0, lt=1.0)
    l2: float = later(0.0, ge=0.0, allow_inf_nan=False)
    meda: bool = later(False)
    sam: Sam | None = later(None)
    early_stopping: EarlyStopping | None = later(None)
    laplacian: Laplacian | None = later(None)
