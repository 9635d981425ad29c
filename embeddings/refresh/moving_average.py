"""The moving average of what is served with what was trained, item by item."""

from __future__ import annotations

import numpy as np

from embeddings.vectors.item_vectors import squares_of, unit_rows
from embeddings.vectors.lazy_rows import Array

MIN_AVERAGE_NORM = 1e-6


def average(new: Array, old: Array, new_weight: float, reset_below_cosine: float) -> tuple[Array, Array]:
    """Return (z float32 [n, d], reset bool [n]) of one chunk.

    z = unit((1 - w) unit(old) + w unit(new)), and z = unit(new) where the cosine of the two is below the limit (a faded
    average of two places is a place where nothing is), or where they cancel. Float32 rows whose squares float32 can
    hold are averaged in float32; the others in float64. Rows that are zero or not finite have no average: the caller
    leaves them out.

    Args:
        new: [n, d], aligned onto the coordinates of ``old``.
        old: [n, d], what is served.
        new_weight: w.
        reset_below_cosine: the limit of the cosine.
    """
    new_squares, old_squares = squares_of(new), squares_of(old)
    if new_squares is None or old_squares is None:
        new, old = unit_rows(new)[0], unit_rows(old)[0]
        new_squares = old_squares = np.ones(len(new))
    to_unit = 1.0 / np.sqrt(new_squares)
    old_to_unit = 1.0 / np.sqrt(old_squares)
    reset: Array = np.einsum("nd,nd->n", new, old) * to_unit * old_to_unit < reset_below_cosine
    mixed = new * (new_weight * to_unit)[:, None]
    mixed += old * ((1.0 - new_weight) * old_to_unit)[:, None]
    norms = np.sqrt(np.einsum("nd,nd->n", mixed, mixed))
    reset |= norms < MIN_AVERAGE_NORM
    mixed *= (1.0 / np.where(reset, 1.0, norms))[:, None]
    if reset.any():
        mixed[reset] = new[reset] * to_unit[reset][:, None]
    return mixed.astype(np.float32, copy=False), reset
