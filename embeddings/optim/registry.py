"""Row optimizers by the name that a job gives them, with the settings that each accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from embeddings.optim.adagrad import Adagrad, AdagradAR, RowwiseAdagrad
from embeddings.optim.adam import Adam, AdamAR, AdamW, RowwiseAdam, RowwiseAdamAR
from embeddings.optim.base import RowOptimizer
from embeddings.optim.rmsprop import RMSprop, RMSpropAR
from embeddings.optim.sgd import SGD


class Kind(NamedTuple):
    """An entry of the registry: a row optimizer's class, and the settings that jobs may give it."""

    optimizer: type[RowOptimizer]
    without: tuple[str, ...] = ()
    """Settings of the class that this kind of optimizer does not accept."""
    on_fbgemm: bool = False
    """True if FBGEMM has a fused kernel for this optimizer."""

    def takes(self, setting: str) -> bool:
        """Return True if this kind of optimizer has a setting, such as ``beta1``."""
        return setting not in self.without and setting in {one.name for one in dataclasses.fields(self.optimizer)}

    def default(self, setting: str) -> Any:
        """Return the class's default of a setting."""
        return next(one.default for one in dataclasses.fields(self.optimizer) if one.name == setting)

    @property
    def is_rowwise(self) -> bool:
        """True if its state has a tensor with one number for a whole row."""
        return bool(self.optimizer.row_state_names)


KINDS: dict[str, Kind] = {
    "sgd": Kind(SGD, on_fbgemm=True),
    "adam": Kind(Adam),
    "adamw": Kind(AdamW),
    "adam_ar": Kind(AdamAR),
    "adagrad": Kind(Adagrad, without=("weight_decay", "first_touch"), on_fbgemm=True),
    "adagradw": Kind(Adagrad),
    "adagrad_ar": Kind(AdagradAR, without=("weight_decay",)),
    "rowwise_adagrad": Kind(RowwiseAdagrad, on_fbgemm=True),
    "rmsprop": Kind(RMSprop),
    "rmsprop_ar": Kind(RMSpropAR),
    "rowwise_adam": Kind(RowwiseAdam),
    "rowwise_adam_ar": Kind(RowwiseAdamAR),
}
"""Row optimizers by the name in jobs; error messages list them in this order."""


def kinds_that_take(setting: str) -> Iterator[str]:
    """Yield the names of the kinds that have a setting."""
    return (name for name, kind in KINDS.items() if kind.takes(setting))
