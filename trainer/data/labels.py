"""Labels by column or rule. Torch-free."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.errors import DataError
from trainer.data.source import Chunk
from trainer.data.values import as_numbers
from trainer.spec import Label, parse_rule

_COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def labels_of(chunk: Chunk, label: Label) -> npt.NDArray[np.uint8]:
    """0 or 1 per row, from ``label.column`` or ``label.rule``. Raises DataError at the first bad value."""
    if label.rule is not None:
        column, comparison, number = parse_rule(label.rule)
        return _COMPARISONS[comparison](as_numbers(chunk, column, f"label (rule '{label.rule}')"), number).astype(
            np.uint8
        )
    assert label.column is not None
    values = as_numbers(chunk, label.column, "label")
    bad = np.flatnonzero((values != 0) & (values != 1))
    if len(bad):
        raise DataError(
            f"the label is {values[bad[0]]}, neither 0 nor 1",
            where=chunk.where(label.column, int(bad[0])),
            remedy=f"correct it, or use a rule such as label: {{rule: '{label.column} >= 1'}}",
        )
    return values.astype(np.uint8)
