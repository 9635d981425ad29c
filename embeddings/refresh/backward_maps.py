"""Maps from a new anchor generation back to earlier generations: fitted and judged when the new generation opens.

The vectors of the last version before the change are regressed on the new vectors, over items found in both versions.
Ridge regression is tried with several penalties, and between equal dims the rotation of orthogonal Procrustes too. Each
map is fitted on four fifths of the items and predicts the rest, in turn (cross-validation). The one of highest mean
cosine is taken, and fitted once more on all items. For generations before the last, the targets are the vectors that
the last version served for them, so maps compose. Hu et al. 2022, "Learning Backward Compatible Embeddings" (arXiv
2206.03040).

A generation that ends a series of held versions has the coordinates of the generation before, so nothing is fitted: its
map to that generation is the identity, and maps to generations before that stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from embeddings.refresh import probe
from embeddings.refresh.generation import shared_found
from embeddings.refresh.procrustes import min_shared, procrustes
from embeddings.store import Collection, VersionReader
from embeddings.store.generation_maps import GenerationMap, map_rows
from embeddings.vectors.item_vectors import Array, ItemVectors, find_rows, keys_of, unit_rows

MIN_R2 = 0.5
"""Smallest share of the variance of the earlier vectors that a served map predicts, for items it was not fitted on."""
MIN_KEPT = 0.95
"""Smallest share of its accuracy that an earlier generation's probe must keep on mapped vectors."""
MIN_ITEMS = 100
MAX_ITEMS = 20_000
"""Most shared items that a map is fitted on; of more, a sample is taken."""
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Penalties of ridge regression, in units of the mean variance of the new coordinates."""
NUM_FOLDS = 5

Kind = tuple[str, float | None]
"""Kind of a map, ``ridge`` or ``procrustes``, and its penalty."""


def backward_maps(
    target: Collection,
    parent: VersionReader,
    keep_generations: int,
    same_coordinates: bool,
    seed: int,
    written: ItemVectors,
) -> list[GenerationMap]:
    """Return the maps from a new generation to earlier generations, newest first; some may be held.

    ``parent`` is the version that was served before the change, ``written`` the first version of the new generation.
    With ``same_coordinates`` both have the same coordinates. ``seed`` is that of the sample and the folds.
    """
    generations = [parent.manifest.anchor_generation, *target.earlier_generations(parent.version)][:keep_generations]
    old, new = shared_found(parent, written)
    draw = np.random.Generator(np.random.Philox(seed))
    if len(old) > MAX_ITEMS:
        chosen = np.sort(draw.choice(len(old), MAX_ITEMS, replace=False))
        old, new = old[chosen], new[chosen]
    folds = draw.integers(NUM_FOLDS, size=len(old))
    inputs, served = unit_rows(written.vectors[new])[0], np.asarray(parent.items().vectors[old])
    maps = []
    for generation in generations:
        matrix = target.map_matrix(generation, parent.version)
        if same_coordinates:
            maps.append(GenerationMap(generation, matrix, {"kind": "same", "items": len(old)}))
        elif len(old) < MIN_ITEMS:
            few = f"{len(old)} items have a vector in both generations, {MIN_ITEMS} are needed for a map"
            empty = np.zeros((inputs.shape[1] + 1, matrix.shape[1]))
            reason = f"{few}: retrain the consumers"
            maps.append(GenerationMap(generation, empty, {"items": len(old)}, (reason,)))
        else:
            outputs = unit_rows(map_rows(served, matrix))[0]
            probes = probe.probes_of(target, [generation])
            maps.append(_fitted(generation, inputs, outputs, folds, written.keys[new], probes))
    return maps


def _fitted(
    generation: int, inputs: Array, outputs: Array, folds: Array, keys: Array, probes: Mapping[str, probe.Probe]
) -> GenerationMap:
    """Return the map to a generation, from rows [n, d] to rows [n, e] of the items ``keys``, with its figures."""
    predicted: dict[Kind, Array] = {}
    for fold in range(NUM_FOLDS):
        held_out = folds == fold
        for kind, matrix in _candidates(inputs[~held_out], outputs[~held_out]).items():
            rows = predicted.setdefault(kind, np.empty(outputs.shape, dtype=np.float32))
            rows[held_out] = inputs[held_out] @ matrix[:-1] + matrix[-1]
    cosines = {kind: float((unit_rows(rows)[0] * outputs).sum(axis=1).mean()) for kind, rows in predicted.items()}
    best = max(cosines, key=lambda kind: cosines[kind])
    residual = np.square(outputs - predicted[best]).sum()
    canaries = {
        name: kept
        for name, frozen in probes.items()
        if (kept := _kept(frozen, keys, outputs, predicted[best])) is not None
    }
    figures: dict[str, Any] = {
        "kind": best[0],
        "penalty": best[1],
        "items": len(keys),
        "r2": float(1.0 - residual / np.square(outputs - outputs.mean(axis=0)).sum()),
        "cosine": cosines[best],
        "canaries": canaries,
    }
    return GenerationMap(generation, _candidates(inputs, outputs)[best], figures, _reasons(figures))


def _candidates(inputs: Array, outputs: Array) -> dict[Kind, Array]:
    """Return maps A [d + 1, e] fitted to the rows, keyed by (method, penalty)."""
    dim = inputs.shape[1]
    mean, target_mean = inputs.mean(axis=0), outputs.mean(axis=0)
    centred = inputs - mean
    values, basis = np.linalg.eigh(centred.T @ centred)
    product = basis.T @ (centred.T @ (outputs - target_mean))
    maps: dict[Kind, Array] = {}
    for penalty in PENALTIES:
        weights = basis @ (product / (values + penalty * values.mean())[:, None])
        maps["ridge", penalty] = np.vstack([weights, target_mean - mean @ weights])
    if outputs.shape[1] == dim and len(inputs) >= min_shared(dim):
        maps["procrustes", None] = np.vstack([procrustes(inputs, outputs), np.zeros(dim)])
    return maps


def _kept(frozen: probe.Probe, keys: Array, outputs: Array, predicted: Array) -> dict[str, float] | None:
    """Return a probe's accuracy at its registration and on mapped vectors; None if it shares no item with the map.

    ``churn`` is the share of predictions that differ between the earlier vectors and mapped vectors.
    """
    rows = find_rows(keys, keys_of(frozen["ids"]))
    judged = (rows >= 0) & np.array(frozen["held_out"], dtype=bool)
    if not judged.any():
        return None
    codes, rows = np.array(frozen["codes"])[judged], rows[judged]
    before, after = (probe.predict(frozen, vectors[rows]) for vectors in (outputs, predicted))
    return {
        "before": float(frozen["accuracy"]),
        "accuracy": float((after == codes).mean()),
        "churn": float((before != after).mean()),
        "items": len(codes),
    }


def _reasons(figures: Mapping[str, Any]) -> tuple[str, ...]:
    reasons = []
    remedy = "check that ids mean the same items as before the change, or retrain the consumers"
    if not figures["r2"] >= MIN_R2:
        reasons.append(
            f"the map predicts {figures['r2']:.2f} of the variance of the earlier vectors, {MIN_R2} is needed: {remedy}"
        )
    for name, canary in figures["canaries"].items():
        error = np.sqrt(canary["churn"] * (1.0 - canary["churn"]) / canary["items"])
        if canary["accuracy"] + 2.0 * error < MIN_KEPT * canary["before"]:
            figures_of_both = f"{canary['accuracy']:.3f} on mapped vectors, {canary['before']:.3f} when it was fitted"
            reasons.append(f"canary '{name}' has an accuracy of {figures_of_both}: {remedy}")
    return tuple(reasons)
