"""Probes: classifiers of published vectors, frozen when they are registered, by which the gate tests every candidate.

A probe is multinomial logistic regression from an item's published vector to a label. Its weights never change. The
gate measures its accuracy, on items on which it was not fitted, and its churn: the share of predictions that differ
from those on the served version. It is stored as one JSON document in the collection's settings, with at most
``MAX_ITEMS`` items.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from embeddings.store.views import utc_now
from embeddings.vectors.item_vectors import FOUND, Array, arrow_of, find_rows, keys_of, unit_rows

if TYPE_CHECKING:
    from embeddings.store import Collection

SETTINGS = "canary"
"""File of a probe's settings; its lists by item are in :data:`embeddings.store.collection.erasure.LISTS_BY_ITEM`."""
MAX_ITEMS = 20_000
MAX_CLASSES = 256
MIN_ITEMS = 100
HELD_OUT = 0.25
L2 = 1e-3

Probe = Mapping[str, Any]


# --- logistic regression ---------------------------------------------------------------------------------------------


def fit(features: Array, classes: Array, num_classes: int, *, l2: float = L2, num_steps: int = 1000) -> Array:
    """Return weights [d + 1, c], the intercept last, of multinomial logistic regression.

    The weights minimise mean cross-entropy + l2/2 |W|^2 (intercept free) for ``features`` [n, d], ``classes`` int [n].
    Nesterov's method with restarts, from zero: the same weights on every machine up to rounding.
    """
    inputs = np.hstack([features, np.ones((len(features), 1))])
    one_hot = np.zeros((len(features), num_classes))
    one_hot[np.arange(len(features)), classes] = 1.0
    penalty = np.full((inputs.shape[1], 1), l2)
    penalty[-1] = 0.0
    # The Hessian of softmax is at most a half.
    step = 1.0 / (0.5 * float(np.linalg.eigvalsh(inputs.T @ inputs / len(inputs))[-1]) + l2)
    weights = ahead = np.zeros((inputs.shape[1], num_classes))
    momentum = 1.0
    for _ in range(num_steps):
        gradient = inputs.T @ (_softmax(inputs @ ahead) - one_hot) / len(inputs) + penalty * ahead
        following = ahead - step * gradient
        if float(np.sum(gradient * (following - weights))) > 0:
            momentum, ahead = 1.0, weights
            continue
        larger = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        ahead = following + (momentum - 1.0) / larger * (following - weights)
        change = float(np.abs(following - weights).max())
        weights, momentum = following, larger
        if change < 1e-6:
            break
    return weights


def _softmax(logits: Array) -> Array:
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


# --- registering -----------------------------------------------------------------------------------------------------


def register(collection: Collection, name: str, ids: Any, labels: Any, *, seed: int = 0) -> dict[str, Any]:
    """Fit a probe on the current version, save it in the collection's settings, and return its document.

    Items that the version has not found are left out; of more than ``MAX_ITEMS`` items a sample is taken. A quarter of
    them is held out to measure accuracy.

    Args:
        collection: the collection whose current version the probe is fitted on.
        name: name of the probe; an existing probe of that name is replaced.
        ids: one id per item.
        labels: one label per item: string, boolean or integer; items with a null are left out.
        seed: seed of the sample and the split.

    Raises:
        ValueError: fewer than ``MIN_ITEMS`` items, one class, or too many; an id that occurs twice, or ids and labels
            that do not pair.
    """
    reader = collection.open()
    keys, values = keys_of(ids), np.asarray(labels, dtype=object)
    if values.shape != (len(keys),):
        raise ValueError(f"canary '{name}': {len(keys)} ids and labels of shape {values.shape}: one label for each id")
    if len(np.unique(keys)) != len(keys):
        raise ValueError(f"canary '{name}': an id occurs more than once: one label for each id")
    rows = find_rows(reader.keys, keys)
    usable = (rows >= 0) & np.array([value is not None and value == value for value in values.tolist()], dtype=bool)
    usable[usable] = reader.statuses[rows[usable]] == FOUND
    chosen = np.flatnonzero(usable)
    if len(chosen) < MIN_ITEMS:
        raise ValueError(
            f"canary '{name}': {len(chosen)} of {len(keys)} labelled items have a vector in {reader.version}, "
            f"{MIN_ITEMS} are needed: check that the ids are those of '{collection.name}'"
        )
    draw = np.random.Generator(np.random.Philox(seed))
    if len(chosen) > MAX_ITEMS:
        chosen = np.sort(draw.choice(chosen, MAX_ITEMS, replace=False))
    names, codes = np.unique(np.array([str(value) for value in values[chosen].tolist()]), return_inverse=True)
    if not 2 <= len(names) <= MAX_CLASSES:
        raise ValueError(
            f"canary '{name}': {len(names)} classes: 2 to {MAX_CLASSES} can be told apart; group the labels"
        )
    held_out = draw.random(len(chosen)) < HELD_OUT
    features = unit_rows(reader.vectors[rows[chosen]])[0]
    mean, scale = features[~held_out].mean(axis=0), features[~held_out].std(axis=0) + 1e-6
    weights = fit((features[~held_out] - mean) / scale, codes[~held_out], len(names))
    # Fold the standardisation into the weights, because a probe reads vectors as they are served.
    folded = weights[:-1] / scale[:, None]
    intercept = weights[-1] - mean @ folded
    right = (features @ folded + intercept).argmax(axis=1) == codes
    document = {
        "name": name,
        "version": reader.version,
        "anchor_generation": reader.manifest.anchor_generation,
        "dim": reader.dim,
        "classes": names.tolist(),
        "ids": arrow_of(keys[chosen]).to_pylist(),
        "codes": codes.tolist(),
        "held_out": held_out.astype(int).tolist(),
        "weights": _packed(folded),
        "intercept": _packed(intercept),
        "accuracy": float(right[held_out].mean()),
        "majority": float(np.bincount(codes[held_out], minlength=len(names)).max() / held_out.sum()),
        "created_at": utc_now(),
    }
    collection.save_settings(SETTINGS, name, document)
    return document


def copy_to(source: Collection, target: Collection) -> list[str]:
    """Register the probes of ``source`` anew on the current version of ``target``, and return their names."""
    for name, probe in source.settings(SETTINGS).items():
        register(target, name, probe["ids"], [probe["classes"][code] for code in probe["codes"]])
    return list(source.settings(SETTINGS))


def summary(probe: Probe) -> dict[str, Any]:
    """Return a short form of a probe for lists, without items and weights."""
    shown = ("name", "version", "anchor_generation", "dim", "classes", "accuracy", "majority", "created_at")
    return {**{name: probe[name] for name in shown}, "num_items": len(probe["ids"])}


# --- measuring -------------------------------------------------------------------------------------------------------


def probes_of(collection: Collection, anchor_generations: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the probes of the given anchor generations, keyed by name. A probe reads only vectors of its generation.

    Probes whose held-out items were all erased are left out.
    """
    return {
        name: probe
        for name, probe in collection.settings(SETTINGS).items()
        if probe["anchor_generation"] in anchor_generations and any(probe["held_out"])
    }


def predict(probe: Probe, vectors: Array) -> Array:
    """Return class codes int [n] for ``vectors`` [n, d], read as directions; rows that are not finite give class 0."""
    dim, num_classes = int(probe["dim"]), len(probe["classes"])
    weights = _unpacked(probe["weights"]).reshape(dim, num_classes)
    scores = np.nan_to_num(unit_rows(vectors)[0]) @ weights + _unpacked(probe["intercept"])
    return scores.argmax(axis=1)


def _packed(numbers: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode()


def _unpacked(text: str) -> Array:
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float64)
