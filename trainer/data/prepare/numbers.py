"""Numeric features of splits: their statistics, of the training split or a warm start, and what a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer.data.columns.numeric import Numeric, fitted
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import (
    NUMBERS,
    VALUE,
    Appender,
    map_array,
)
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import SPLIT_NAMES
from trainer.data.prepare.workers import Workers

_PIECE_VALUES = 1 << 22


def finish_numeric(
    plan: DataPlan, directory: Path, base: Sequence[Numeric] | None, workers: Workers
) -> tuple[Numeric, ...]:
    """Write the numbers as the model reads them, ``NUMBERS`` of each split.

    Statistics are those of the training split, or of a warm start.

    Raises:
        DataError: the warm start has other features or transforms.
    """
    if not plan.all_numeric:
        return ()
    if base is None:
        features = tuple(
            workers.map(lambda one: fit_numbers(plan, one, raw_file(directory / "train", one)), plan.all_numeric)
        )
    else:
        features = inherited_numeric(plan, base)
    write_numbers(features, directory, workers)
    return features


def fit_numbers(plan: DataPlan, feature: Numeric, raw: Path) -> Numeric:
    """Return a numeric feature with the statistics of the training split, whose values as they come are in ``raw``."""
    return fitted(feature, map_array(raw, np.float64), f"dataset '{plan.dataset.name}', training split")


def write_numbers(features: Sequence[Numeric], directory: Path, workers: Workers) -> None:
    """Write ``NUMBERS`` of each split in the place of the values as they come."""
    piece_rows = max(1, _PIECE_VALUES // len(features))
    for name in SPLIT_NAMES:
        raw = [map_array(raw_file(directory / name, one), np.float64) for one in features]
        numbers = Appender(directory / name / NUMBERS, VALUE)
        for start in range(0, len(raw[0]), piece_rows):
            pieces = [(one, column[start : start + piece_rows]) for one, column in zip(features, raw, strict=True)]
            numbers.append(np.stack(workers.map(lambda one: one[0].apply(one[1]), pieces), axis=1).reshape(-1))
        numbers.close()
        for one in features:
            raw_file(directory / name, one).unlink()


def inherited_numeric(plan: DataPlan, base: Sequence[Numeric]) -> tuple[Numeric, ...]:
    """Return the numeric features of a warm start, which are the job's.

    Raises:
        DataError: it has other features or transforms.
    """
    asked = [(one.name, one.transform, one.missing) for one in plan.all_numeric]
    if [(one.name, one.transform, one.missing) for one in base] != asked:
        raise DataError(
            f"the warm start's numeric features are {_in_words(base)}, this data's {_in_words(plan.all_numeric)}",
            where=f"dataset '{plan.dataset.name}'",
            remedy="use the same transforms, or start without init_from",
        )
    return tuple(base)


def raw_file(directory: Path, feature: Numeric) -> Path:
    """Return the file of a feature's values as they come, in a split."""
    return directory / f"{feature.name}.raw"


def _in_words(features: Sequence[Numeric]) -> str:
    return ", ".join(f"{one.name} ({one.transform}, missing {one.missing})" for one in features)
