"""Row optimizers: their configurations, schedules, deferred updates and stochastic rounding; kernels carry them out.

A file for each family, ``registry`` has them by the name that a job gives. Nothing here needs torch.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.optim.adagrad import Adagrad, AdagradAR, RowwiseAdagrad
    from embeddings.optim.adam import Adam, AdamAR, AdamW, RowwiseAdam, RowwiseAdamAR
    from embeddings.optim.base import AdaptiveDecay, RowOptimizer
    from embeddings.optim.rmsprop import RMSprop, RMSpropAR
    from embeddings.optim.sgd import SGD

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
        "embeddings.optim.sgd": ["SGD"],
        "embeddings.optim.adagrad": ["Adagrad", "AdagradAR", "RowwiseAdagrad"],
        "embeddings.optim.adam": ["Adam", "AdamAR", "AdamW", "RowwiseAdam", "RowwiseAdamAR"],
        "embeddings.optim.base": ["AdaptiveDecay", "RowOptimizer"],
        "embeddings.optim.rmsprop": ["RMSprop", "RMSpropAR"],
    },
)
