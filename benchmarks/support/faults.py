"""Eleven ways in which a refresh goes wrong, at three severities each, as changes of its item rows.

A fault takes the rows of an honest refresh and returns those of a broken one. ``severity`` is a share of the items
unless the fault says otherwise. ``align: False`` marks faults that happen after, or instead of, the alignment, which
would undo them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import expm, logm

from embeddings.vectors.item_vectors import Array, ItemVectors

Rng = np.random.Generator


@dataclass(frozen=True)
class Fault:
    """``severities``: from small to large. ``unit``: what they count. ``make``: (rows, severity, generator) -> rows."""

    name: str
    severities: tuple[float, float, float]
    unit: str
    make: Callable[[ItemVectors, float, Rng], ItemVectors]
    align: bool = True


def shuffled(items: ItemVectors, share: float, rng: Rng) -> ItemVectors:
    """Shuffle the vectors of some items among them."""
    chosen = some(items, share, rng)
    order = np.arange(len(items))
    order[chosen] = rng.permutation(chosen)
    return reordered(items, order)


def swapped(items: ItemVectors, share: float, rng: Rng) -> ItemVectors:
    """Swap the vectors of pairs of items."""
    chosen = rng.permutation(some(items, share, rng))
    half = len(chosen) // 2
    order = np.arange(len(items))
    order[chosen[:half]], order[chosen[half : 2 * half]] = chosen[half : 2 * half], chosen[:half]
    return reordered(items, order)


def wrong_map(items: ItemVectors, share: float, rng: Rng) -> ItemVectors:
    """Insert an id into the map: from there to the end, each item has the vector of the one before it."""
    start = round((1 - share) * len(items))
    order = np.arange(len(items))
    order[start:] = np.roll(order[start:], 1)
    return reordered(items, order)


def turned(items: ItemVectors, part: float, rng: Rng) -> ItemVectors:
    """Change the basis by a random rotation to the power ``part``."""
    basis = np.linalg.qr(rng.standard_normal((items.dim, items.dim)))[0]
    if np.linalg.det(basis) < 0:
        basis[0] *= -1
    rotation = np.real(expm(part * np.real(logm(basis))))
    return with_vectors(items, np.asarray(items.vectors) @ rotation)


def flipped(items: ItemVectors, num_axes: float, rng: Rng) -> ItemVectors:
    """Flip the signs of some axes."""
    vectors = np.array(items.vectors)
    vectors[:, rng.permutation(items.dim)[: int(num_axes)]] *= -1
    return with_vectors(items, vectors)


def not_a_number(items: ItemVectors, share: float, rng: Rng) -> ItemVectors:
    vectors = np.array(items.vectors)
    vectors[some(items, share, rng)] = np.nan
    return with_vectors(items, vectors)


def constant(items: ItemVectors, share: float, rng: Rng) -> ItemVectors:
    """Give many items the same vector."""
    vectors = np.array(items.vectors)
    vectors[some(items, share, rng)] = vectors[np.flatnonzero(items.evidence)].mean(axis=0)
    return with_vectors(items, vectors)


def truncated(items: ItemVectors, share: float, rng: Rng) -> ItemVectors:
    """Remove some items."""
    keep = np.ones(len(items), dtype=bool)
    keep[some(items, share, rng)] = False
    counts = None if items.counts is None else items.counts[keep]
    vectors = np.asarray(items.vectors)[keep]
    return ItemVectors(items.keys[keep], vectors, norms=items.norms[keep], evidence=items.evidence[keep], counts=counts)


def scaled(items: ItemVectors, factor: float, rng: Rng) -> ItemVectors:
    """Scale up the rows of a tenth of the items."""
    factors = np.ones(len(items), dtype=np.float32)
    factors[some(items, 0.1, rng)] = factor
    vectors = np.asarray(items.vectors) * factors[:, None]
    return ItemVectors(items.keys, vectors, norms=items.norms * factors, evidence=items.evidence, counts=items.counts)


def foreign(others: ItemVectors) -> Callable[[ItemVectors, float, Rng], ItemVectors]:
    """Return a fault that gives some items the vector that another collection has at their place."""

    def make(items: ItemVectors, share: float, rng: Rng) -> ItemVectors:
        vectors = np.array(items.vectors)
        chosen = some(items, share, rng)
        vectors[chosen] = np.asarray(others.vectors)[chosen % len(others)]
        return with_vectors(items, vectors)

    return make


def faults_of_rows(others: ItemVectors) -> tuple[Fault, ...]:
    """Return ten of the eleven faults; a half-trained model is trained, not made.

    ``others``: another collection of the same dim.
    """
    return (
        Fault("shuffled ids", (0.01, 0.1, 1.0), "of the items", shuffled),
        Fault("skipped alignment", (0.05, 0.2, 1.0), "of a random rotation", turned, align=False),
        Fault("NaN rows", (0.001, 0.01, 0.1), "of the items", not_a_number),
        Fault("truncated collection", (0.02, 0.1, 0.5), "of the items", truncated),
        Fault("wrong id map", (0.01, 0.1, 1.0), "of the items", wrong_map),
        Fault("items swapped", (0.0025, 0.01, 0.05), "of the items", swapped),
        Fault("constant vectors", (0.01, 0.1, 1.0), "of the items", constant),
        Fault("another collection's vectors", (0.01, 0.1, 1.0), "of the items", foreign(others)),
        Fault("signs of axes after alignment", (1, 4, 16), "axes", flipped, align=False),
        Fault("scaled norms of a tenth", (1.5, 3.0, 10.0), "times", scaled),
    )


def some(items: ItemVectors, share: float, rng: Rng) -> Array:
    """Return the rows of a share of the items that have evidence, at least two."""
    rows = np.flatnonzero(items.evidence)
    return np.sort(rng.choice(rows, max(2, round(share * len(rows))), replace=False))


def reordered(items: ItemVectors, order: Array) -> ItemVectors:
    """Give row i the vector and norm of row ``order[i]``."""
    return ItemVectors(
        items.keys, np.asarray(items.vectors)[order], norms=items.norms[order], evidence=items.evidence,
        counts=items.counts,
    )  # fmt: skip


def with_vectors(items: ItemVectors, vectors: Array) -> ItemVectors:
    return ItemVectors(items.keys, vectors, norms=items.norms, evidence=items.evidence, counts=items.counts)
