"""Statistics of numeric features, from the training split or a warm start, and the transformed values of splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainer.data.columns.numeric import Numeric, fitted
from trainer.data.prepare.arrays import NUMBERS, VALUE, Appender, map_array
from trainer.data.prepare.plan import DataPlan
from trainer.data.prepare.split import SPLIT_NAMES
from trainer.data.prepare.workers import Workers

_PIECE_VALUES = 1 << 22


def finish_numeric(
    plan: DataPlan, directory: Path, base: Sequence[Numeric] | None, workers: Workers
) -> tuple[Numeric, ...]:
    """Write the transformed numeric features to the file ``NUMBERS`` of each split; return them with statistics.

    The statistics of features that a warm start's parent read are kept; others are computed from the training split.
    """
    if not plan.all_numeric:
        return ()
    known = inherited_numeric(plan, base or ())
    features = tuple(
        workers.map(
            lambda one: known.get(one.name) or fit_numbers(plan, one, directory / "train" / one.split_file),
            plan.all_numeric,
        )
    )
    write_numbers(features, directory, workers)
    return features


def fit_numbers(plan: DataPlan, feature: Numeric, raw: Path) -> Numeric:
    """Return a numeric feature with the statistics of the training split, whose untransformed values are in ``raw``."""
    return fitted(feature, map_array(raw, np.float64), f"dataset '{plan.dataset.name}', training split")


def write_numbers(features: Sequence[Numeric], directory: Path, workers: Workers) -> None:
    """Replace, in each split, the files of untransformed values by one file ``NUMBERS`` of transformed values."""
    piece_rows = max(1, _PIECE_VALUES // len(features))
    for name in SPLIT_NAMES:
        raw = [map_array(directory / name / one.split_file, np.float64) for one in features]
        numbers = Appender(directory / name / NUMBERS, VALUE)
        for start in range(0, len(raw[0]), piece_rows):
            pieces = [(one, column[start : start + piece_rows]) for one, column in zip(features, raw, strict=True)]
            numbers.append(np.stack(workers.map(lambda one: one[0].apply(one[1]), pieces), axis=1).reshape(-1))
        numbers.close()
        for one in features:
            (directory / name / one.split_file).unlink()


def inherited_numeric(plan: DataPlan, base: Sequence[Numeric]) -> dict[str, Numeric]:
    """Return {name: the parent's statistics} of the job's numeric features that the warm start's parent read."""
    columns = {one.name: one.column for one in plan.all_numeric}
    return {one.name: replace(one, column=columns[one.name]) for one in base if one.name in columns}
