"""Row optimizers: their configurations, schedules, deferred updates and stochastic rounding; kernels carry them out.

Each family has a file; ``registry`` maps the names that jobs use to them. Nothing here needs torch.
"""

from embeddings.optim.adagrad import Adagrad, AdagradAR, RowwiseAdagrad
from embeddings.optim.adam import Adam, AdamAR, AdamW, RowwiseAdam, RowwiseAdamAR
from embeddings.optim.base import AdaptiveDecay, RowOptimizer
from embeddings.optim.rmsprop import RMSprop, RMSpropAR
from embeddings.optim.sgd import SGD

__all__ = [
    "SGD", "Adagrad", "AdagradAR", "Adam", "AdamAR", "AdamW", "AdaptiveDecay", "RMSprop", "RMSpropAR",
    "RowOptimizer", "RowwiseAdagrad", "RowwiseAdam", "RowwiseAdamAR",
]  # fmt: skip
