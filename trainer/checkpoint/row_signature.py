"""Meaning of the stored rows of a checkpoint: the optimizer that trained them, its schedule, and their dtypes.

Rows are stored as they were when they were last touched. Their deferred updates are computed when they are read
(:mod:`embeddings.optim.deferred_update`), from the optimizer's settings. With other settings every row would be
read with values that do not result from training. So a checkpoint records the settings, and a model with other
settings does not load it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from embeddings.optim.deferred_update import deferred_update_coefficients
from trainer.spec.optimizer import Optimizer

if TYPE_CHECKING:
    import torch

    from embeddings.optim import RowOptimizer
    from embeddings.sharding import TableSettings

# Tolerance of sums of many logarithms, which another version of numpy may round differently.
_TOLERANCE = 1e-9
# Number of steps whose learning rates are computed at a time.
_BLOCK = 1 << 16


def row_signature(settings: TableSettings, completed_steps: int) -> dict[str, Any]:
    """Return the settings that give stored rows their meaning, as JSON values, keyed by name.

    ``optimizer`` is its kind, and each of its fields has an entry. ``dtype`` and ``state_dtype`` are types, or types by
    table if tables differ. ``ahead``: True if stored rows already include later movement by momentum
    (:mod:`embeddings.optim.deferred_update`). ``rate_sum``: sum of the learning rates of the completed steps.
    ``decay_log_sum``: L[K], the logarithm of the factor by which weight decay has shrunk weights since step 0.
    """
    optimizer = settings.optimizer
    coefficients = deferred_update_coefficients(optimizer, str(settings.compute_dtype).removeprefix("torch."))
    rate_sum, decay_log_sum = _sums(optimizer, completed_steps)
    return {
        "ahead": coefficients is not None and coefficients.ahead,
        "rate_sum": rate_sum,
        "decay_log_sum": decay_log_sum,
        "dtype": _by_table(settings, settings.dtype_of),
        "state_dtype": _by_table(settings, settings.state_dtype_of),
        "optimizer": type(optimizer).__name__,
        **{
            field.name: _word(getattr(optimizer, field.name))
            for field in dataclasses.fields(optimizer)
            # Fields that were added after the first checkpoints are left out if they have their default.
            if (field.name, getattr(optimizer, field.name)) not in (("decay", "at_read"), ("epoch_steps", None))
        },
    }


def _sums(optimizer: RowOptimizer, completed_steps: int) -> tuple[float, float]:
    """Return ``rate_sum`` and ``decay_log_sum`` (:func:`row_signature`).

    Steps are summed block by block, and steps after the rate has become constant in one product.
    """
    settled = optimizer.schedule.settled
    changing = completed_steps if settled is None else min(completed_steps, settled - 1)
    rate_sum = decay_log_sum = 0.0
    for first in range(1, changing + 1, _BLOCK):
        rates = optimizer.rates(np.arange(first, min(first + _BLOCK, changing + 1)))
        rate_sum += float(rates.sum())
        decay_log_sum += float(np.log1p(-optimizer.constant_decay * rates).sum())
    if num_constant := completed_steps - changing:
        rate = optimizer.rate(completed_steps)
        rate_sum += num_constant * rate
        decay_log_sum += num_constant * math.log1p(-optimizer.constant_decay * rate)
    return rate_sum, decay_log_sum


def deferred_update_fields(optimizer: RowOptimizer) -> tuple[str, ...]:
    """Return the fields of the signature that stored rows depend on. A warm start may change all other fields."""
    sums = ("rate_sum", "decay_log_sum") if optimizer.idle_momentum else ("decay_log_sum",)
    return ("optimizer", "dtype", "state_dtype", "ahead", *optimizer.deferred_settings, *sums)


def differences(
    saved: Mapping[str, Any] | None, model: Mapping[str, Any], fields: Sequence[str] | None = None
) -> list[str]:
    """Return a phrase for each field in which a checkpoint's signature differs from the model's.

    ``fields`` are compared, or all if None. The result is [] if ``saved`` is None: older checkpoints have no signature.
    A setting may be saved under an older name.
    """
    if saved is None:
        return []
    saved = {Optimizer.old_names.get(name, name): value for name, value in saved.items()}
    return [
        f"{name} ({saved.get(name)}, the model has {model.get(name)})"
        for name in fields or sorted(saved.keys() | model.keys())
        if not _same(saved.get(name), model.get(name))
    ]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=_TOLERANCE)
    return bool(left == right)


def _by_table(settings: TableSettings, dtype_of: Callable[[str], torch.dtype]) -> Any:
    """Return the type as text if all tables have the same, else the types by table."""
    found = {name: str(dtype_of(name)) for name in sorted(settings.tables)}
    return found if len(set(found.values())) > 1 else next(iter(found.values()))


def _word(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _word(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
