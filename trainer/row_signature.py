"""What the stored rows of a checkpoint mean: the optimizer that trained them, its schedule, and their dtypes.

Rows are stored as they were when they were last touched. What idleness did to them since is computed when they are read
(:mod:`embeddings.decay`), from the optimizer's settings: with others every idle row would move at once, by a movement
that nobody trained. So a checkpoint records the settings, and a model with others does not load it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from embeddings.kernels.layout import COMPUTE_DTYPES

if TYPE_CHECKING:
    from embeddings.optim import RowOptimizer
    from embeddings.sharding import TableSettings

_OF_MOMENTUM = ("learning_rate", "schedule", "beta1", "beta2", "eps", "eps_inside_root")
_OF_WEIGHT_DECAY = ("learning_rate", "schedule", "weight_decay")


def row_signature(settings: TableSettings) -> dict[str, Any]:
    """The settings as JSON: ``optimizer`` (its kind), ``dtype``, ``state_dtype`` and each field of the optimizer."""
    return {
        "dtype": _word(settings.dtype),
        "state_dtype": _word(settings.state_dtype or COMPUTE_DTYPES[settings.dtype]),
        "optimizer": type(settings.optimizer).__name__,
        **{
            field.name: _word(getattr(settings.optimizer, field.name))
            for field in dataclasses.fields(settings.optimizer)
        },
    }


def owed_fields(optimizer: RowOptimizer) -> tuple[str, ...]:
    """The fields of the signature that stored rows depend on: a warm start may change the others."""
    fields = ["optimizer", "dtype", "state_dtype", "moments", "first_touch"]
    if optimizer.idle_alpha:
        fields.append("alpha")
    if optimizer.idle_momentum:
        fields.extend(_OF_MOMENTUM)
    if getattr(optimizer, "weight_decay", 0.0):
        fields.extend(_OF_WEIGHT_DECAY)
    return tuple(dict.fromkeys(fields))


def differences(
    saved: Mapping[str, Any] | None, mine: Mapping[str, Any], fields: Sequence[str] | None = None
) -> list[str]:
    """In words, the fields (all, if None) in which the checkpoint's signature differs; none if it has no signature."""
    if saved is None:
        return []
    return [
        f"{name} ({saved.get(name)}, the model has {mine.get(name)})"
        for name in fields or sorted(saved.keys() | mine.keys())
        if saved.get(name) != mine.get(name)
    ]


def _word(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _word(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
