"""Numeric features: values from columns, statistics of the training rows, and the transforms that use them. Torch-free.

NaN and null are missing values; an infinite value, and text that is no number, are bad values. A missing value is
replaced by the mean of the transformed training values, or by the number in the feature's setting ``missing``, which is
transformed like others. With ``missing: error`` it is a bad value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.columns.base import Column, Problem
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import VALUE
from trainer.data.sources.source import Chunk
from trainer.data.sources.types import is_text, is_there
from trainer.spec import Feature

COMMA_REMEDY = "write a point before the fraction and nothing between thousands: 2.5, 1234"
NUMERIC_FILE = "numeric.json"
NUM_QUANTILES = 1000
# Quantiles are computed from at most this many training values, evenly spaced over the rows.
_SAMPLE_ROWS = 1 << 20
_PIECE_ROWS = 1 << 20
# A standard deviation below this share of the mean is rounding error: the values are constant.
_LEAST_SPREAD = 1e-12

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Numeric(Column):
    """A numeric feature x as a model reads it, float32.

    By transform it is

    - none: x;
    - log1p: sign(x) log(1 + |x|);
    - standardize: (x - mean) / std over the training values; x - mean if these are constant;
    - quantile: the share of training values below x, interpolated between NUM_QUANTILES of them, in [0, 1].

    ``fill`` replaces a missing value after the transform.
    """

    name: str
    column: str
    transform: str
    missing: str | float
    mean: float = 0.0
    std: float = 1.0
    fill: float = 0.0
    quantiles: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    dtype = np.dtype(np.float64)

    def apply(self, values: Float64s) -> npt.NDArray[np.float32]:
        """Return transformed ``values`` [n] as float32 [n]; NaN, a missing value, becomes ``fill``."""
        return np.where(np.isnan(values), self.fill, self._transformed(values)).astype(VALUE)

    def _transformed(self, values: Float64s) -> Float64s:
        if self.transform == "log1p":
            return np.sign(values) * np.log1p(np.abs(values))
        if self.transform == "standardize":
            return (values - self.mean) / self.std
        if self.transform == "quantile":
            return np.interp(values, self.quantiles, self.shares)
        return values

    def original(self, values: Float64s) -> Float64s:
        """Return the numbers [n] that :meth:`apply` transforms into ``values`` [n].

        With transform quantile, values below 0 or above 1 give the least or the greatest training value.
        """
        if self.transform == "log1p":
            return np.sign(values) * np.expm1(np.abs(values))
        if self.transform == "standardize":
            return values * self.std + self.mean
        if self.transform == "quantile":
            return np.interp(values, self.shares, self.quantiles)
        return values

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def split_file(self) -> str:
        """Name of the file with untransformed values, which is kept until the statistics are known."""
        return f"{self.name}.raw"

    def read(self, chunk: Chunk) -> Float64s:
        """Return the untransformed values, float64 [rows]; missing values are NaN."""
        column = chunk.column(self.column)
        values, bad = self._checked(column)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            value = column[row].as_py()
            is_missing = value is None or value != value
            raise DataError(
                f"feature '{self.name}' is {value!r}: {'missing' if is_missing else 'no finite number'}",
                where=chunk.where(self.column, row),
                remedy=COMMA_REMEDY
                if has_comma(value)
                else "correct it, remove the row, or set max_bad_rows of the dataset"
                + (", or missing of the feature" if is_missing else ""),
            )
        return values

    def problems(self, chunk: Chunk) -> Iterator[Problem]:
        column = chunk.column(self.column)
        bad = self._checked(column)[1]
        yield self.column, "no finite number", bad & is_there(column)
        yield self.column, "missing", bad

    def _checked(self, array: pa.Array) -> tuple[Float64s, npt.NDArray[np.bool_]]:
        """Return the values, and a mask of those that are bad for this feature."""
        values, bad = as_floats(array)
        return values, bad | np.isnan(values) if self.missing == "error" else bad


def numeric_of(document: Mapping[str, Any]) -> Numeric:
    """Return the feature that :meth:`Numeric.as_json` turned into this document."""
    lists = {name: tuple(document[name]) for name in ("quantiles", "shares")}
    return Numeric(**{**document, **lists})


def write_numeric(features: Sequence[Numeric], path: Path) -> None:
    path.write_text(json.dumps([one.as_json() for one in features], indent=1), "utf-8")


def open_numeric(path: Path) -> tuple[Numeric, ...]:
    """Return the features of a file that :func:`write_numeric` wrote."""
    return tuple(numeric_of(document) for document in json.loads(path.read_text("utf-8")))


def planned(features: Mapping[str, Feature]) -> list[Numeric]:
    """Return the numeric features among the given features, still without statistics of their values."""
    return [
        Numeric(name, feature.column or name, feature.transform, "mean" if feature.missing is None else feature.missing)
        for name, feature in features.items()
        if feature.type == "dense"
    ]


def fitted(feature: Numeric, values: Float64s, where: str) -> Numeric:
    """Return the feature with the statistics of training rows' ``values`` [n], which may be memory-mapped.

    Raises:
        DataError: all values are missing.
    """
    count, total, square = 0, 0.0, 0.0
    for piece in _pieces(values):
        count += len(piece)
        total += float(piece.sum())
    if count == 0:
        raise DataError(
            f"feature '{feature.name}' has no value in any training row",
            where=where,
            remedy="fill the column, or leave the feature out",
        )
    mean = total / count
    for piece in _pieces(values):
        square += float(np.square(piece - mean).sum())
    std = float(np.sqrt(square / count))
    # For a constant, std is only the rounding error of the mean.
    std = std if std > _LEAST_SPREAD * abs(mean) else 1.0
    quantiles, shares = _quantiles(values) if feature.transform == "quantile" else ((), ())
    known = Numeric(
        feature.name, feature.column, feature.transform, feature.missing, mean, std, quantiles=quantiles, shares=shares,
    )  # fmt: skip
    if not isinstance(feature.missing, str):
        return with_fill(known)
    fill = sum(float(known._transformed(piece).sum()) for piece in _pieces(values)) / count
    return replace(known, fill=fill)


def with_fill(feature: Numeric) -> Numeric:
    """Return the feature with its ``fill`` set, if ``missing`` is a number; otherwise the feature unchanged."""
    if isinstance(feature.missing, str):
        return feature
    return replace(feature, fill=float(feature._transformed(np.array([feature.missing]))[0]))


def _pieces(values: Float64s) -> Iterator[Float64s]:
    """Yield the values that are not missing, in pieces of up to ``_PIECE_ROWS`` rows each."""
    for start in range(0, len(values), _PIECE_ROWS):
        piece = np.asarray(values[start : start + _PIECE_ROWS])
        yield piece[~np.isnan(piece)]


def _quantiles(values: Float64s) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the distinct quantiles of the training values, ascending, and the share of training values below each."""
    # A value that equals several quantiles gets the mean of their shares.
    sample = np.asarray(values[:: max(1, -(-len(values) // _SAMPLE_ROWS))])
    shares = np.linspace(0.0, 1.0, NUM_QUANTILES + 1)
    quantiles = np.quantile(sample[~np.isnan(sample)], shares)
    distinct, position, counts = np.unique(quantiles, return_inverse=True, return_counts=True)
    return tuple(distinct.tolist()), tuple((np.bincount(position, shares) / counts).tolist())


def as_floats(array: pa.Array) -> tuple[Float64s, npt.NDArray[np.bool_]]:
    """Return a column's values, float64 with NaN for missing, and a mask of the bad values.

    Values are bad if they are infinite, beyond the range of float32, or no numbers.
    """
    if is_text(array.type):
        values, bad = _parsed(array)
    elif pa.types.is_null(array.type):
        values, bad = np.full(len(array), np.nan), np.zeros(len(array), dtype=bool)
    elif not (
        pa.types.is_integer(array.type)
        or pa.types.is_floating(array.type)
        or pa.types.is_decimal(array.type)
        or pa.types.is_boolean(array.type)
    ):
        values, bad = np.full(len(array), np.nan), np.ones(len(array), dtype=bool)
    else:
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.int8())
        values = pc.fill_null(pc.cast(array, pa.float64(), safe=False), np.nan).to_numpy(zero_copy_only=False)
        bad = np.zeros(len(values), dtype=bool)
    return values, bad | (np.abs(values) > np.finfo(VALUE).max)


def _parsed(array: pa.Array) -> tuple[Float64s, npt.NDArray[np.bool_]]:
    """Return (values, mask of bad values) of a column of text; CSV columns are text if any value is no number."""
    values, bad = np.full(len(array), np.nan), np.zeros(len(array), dtype=bool)
    for number, text in enumerate(array.to_pylist()):
        if text is None or not text.strip():
            continue
        try:
            values[number] = float(text)
        except ValueError:
            bad[number] = True
    return values, bad


def has_comma(value: Any) -> bool:
    """Return True for text of a number with a comma, such as ``2,5`` and ``1,234.5``."""
    return isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d[\d.]*(,\d+)+(\.\d+)?\s*", value) is not None
