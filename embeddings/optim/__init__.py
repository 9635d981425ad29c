"""Row optimizers: their configurations, schedules, deferred updates and stochastic rounding; kernels carry them out.

``row_optimizers`` and ``lr_schedules`` need no torch.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.optim.row_optimizers import (
        SGD,
        Adagrad,
        AdagradAR,
        Adam,
        AdamAR,
        AdamW,
        AdaptiveDecay,
        RMSprop,
        RMSpropAR,
        RowOptimizer,
        RowwiseAdagrad,
        RowwiseAdam,
        RowwiseAdamAR,
    )

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradAR",
    "Adam",
    "AdamAR",
    "AdamW",
    "AdaptiveDecay",
    "RMSprop",
    "RMSpropAR",
    "RowOptimizer",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "RowwiseAdamAR",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "embeddings.optim.row_optimizers": [
            "RowOptimizer",
            "AdaptiveDecay",
            "SGD",
            "Adagrad",
            "RowwiseAdagrad",
            "AdagradAR",
            "RMSprop",
            "RMSpropAR",
            "Adam",
            "AdamW",
            "AdamAR",
            "RowwiseAdam",
            "RowwiseAdamAR",
        ]
    },
)
