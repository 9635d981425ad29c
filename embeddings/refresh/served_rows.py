"""The rows of a version, computed when they are read: rotated, averaged with the served rows, or carried over."""

from __future__ import annotations

import numpy as np

from embeddings.refresh.merge import Plan
from embeddings.refresh.procrustes import turn_rows
from embeddings.refresh.settings import Evidence, MovingAverage
from embeddings.vectors.item_vectors import ItemVectors, shared_rows, squares_of, unit_float32, unit_rows
from embeddings.vectors.lazy_rows import Array, Rows, Vectors, take

MIN_AVERAGE_NORM = 1e-6


def average(new: Array, old: Array, new_weight: float, reset_below_cosine: float) -> tuple[Array, Array]:
    """Return (z float32 [n, d], reset bool [n]) of one chunk.

    z = unit((1 - w) unit(old) + w unit(new)). Rows with a cosine of old and new below the limit, or whose sum is zero,
    are reset: z = unit(new), since the average of two distant directions means nothing. Float32 rows are averaged in
    float32 if it can hold their squares, else in float64. The caller leaves out rows that are zero or not finite.

    Args:
        new: [n, d], aligned onto the coordinates of ``old``.
        old: [n, d], the served rows.
        new_weight: the weight w of ``new``.
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


class ServedRows(Rows):
    """Rows of a version: row i is the vector of ``plan.keys[i]``.

    For a carried item it is the parent's vector, bit for bit. For a found item it is the candidate's direction, rotated
    into the served coordinates. With ``ema`` on, that vector is averaged with the parent's, if the parent has one.

    Args:
        candidate: raw rows [n, d].
        rotation: the rotation R [d, d]; None: rows are not rotated.
        parent: vectors of the served version; None if nothing is averaged or carried.

    Attributes:
        reset: bool [m], flags of the items read so far that were not averaged because their vector turned too far.
    """

    def __init__(
        self, plan: Plan, candidate: Vectors, rotation: Array | None, parent: Vectors | None, ema: MovingAverage | None
    ):
        super().__init__(len(plan), candidate.shape[1])
        self._plan, self._candidate, self._rotation = plan, candidate, rotation
        self._parent, self._ema = parent, ema
        self.reset = np.zeros(len(plan), dtype=np.bool_)

    def read(self, rows: slice | Array) -> Array:
        found_rows, parent_rows = self._plan.found_rows[rows], self._plan.parent_rows[rows]
        is_found = found_rows >= 0
        if is_found.all():
            vectors, self.reset[rows] = self._renewed(found_rows, parent_rows)
            return vectors
        assert self._parent is not None
        vectors = np.empty((len(is_found), self.shape[1]), dtype=np.float32)
        vectors[~is_found] = self._parent[parent_rows[~is_found]]
        vectors[is_found], reset = self._renewed(found_rows[is_found], parent_rows[is_found])
        self.reset[np.arange(len(self))[rows][is_found] if isinstance(rows, slice) else rows[is_found]] = reset
        return vectors

    def _renewed(self, found_rows: Array, parent_rows: Array) -> tuple[Array, Array]:
        """Return (vectors float32 [k, d], reset bool [k]) of found items, by their rows in candidate and parent."""
        turned = turn_rows(take(self._candidate, found_rows), self._rotation)
        known = np.zeros(len(turned), dtype=np.bool_) if self._ema is None else parent_rows >= 0
        reset = np.zeros(len(turned), dtype=np.bool_)
        if self._ema is None or self._parent is None or not known.any():
            return unit_float32(turned), reset
        weight, limit = self._ema.new_weight, self._ema.reset_below_cosine
        if known.all():
            return average(turned, take(self._parent, parent_rows), weight, limit)
        vectors = unit_float32(turned)
        vectors[known], reset[known] = average(turned[known], self._parent[parent_rows[known]], weight, limit)
        return vectors, reset


def items_served(served: Plan, rows: ServedRows, previous: ItemVectors | None, candidate: ItemVectors) -> ItemVectors:
    """Return the items of the version as ItemVectors, with ``rows`` as their vectors."""
    return ItemVectors(
        served.keys,
        rows,
        norms=served.pick(candidate.norms, None if previous is None else previous.norms),
        counts=_counts(served, previous, candidate),
        statuses=served.statuses,
        carried_for=served.carried_for,
        last_found=served.last_found,
        biases=_biases(served, previous, candidate),
    )


def few_occurrences(candidate: ItemVectors, evidence: Evidence) -> Array | None:
    """Flag the candidate's items with fewer than ``min_count`` occurrences, bool [n]; None if none is to be marked."""
    if not evidence.mark_uncertain or candidate.counts is None:
        return None
    return candidate.counts < evidence.min_count


def _biases(served: Plan, previous: ItemVectors | None, candidate: ItemVectors) -> Array | None:
    """Return the biases of the items; a carried item of a version that stored none has 0."""
    if candidate.biases is None:
        return None
    of_parent = None if previous is None else previous.biases
    if previous is not None and of_parent is None:
        of_parent = np.zeros(len(previous), dtype=np.float32)
    return served.pick(candidate.biases, of_parent)


def _counts(served: Plan, previous: ItemVectors | None, candidate: ItemVectors) -> Array | None:
    """Return the number of each item's occurrences in this run's training, carried items included; None if unknown."""
    if candidate.counts is None:
        return None
    if previous is None or not (served.found_rows < 0).any():
        return candidate.counts[served.found_rows]
    of_parent = np.zeros(len(previous), dtype=np.int64)
    old, new = shared_rows(previous.keys, candidate.keys)
    of_parent[old] = candidate.counts[new]
    return served.pick(candidate.counts, of_parent)
