"""All measures of one trained model for the generalization report."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import nn

from trainer.generalization import bounds
from trainer.generalization.sharpness import (
    ALPHA,
    RELATIVE_RHO,
    RELATIVE_SIGMA,
    ascent_rise,
    gradient_norms,
    noise_rise,
    rescalable,
    rescaled,
    top_eigenvalue,
)
from trainer.generalization.spectrum import SHARES, rank_of, spectrum, truncated_losses
from trainer.generalization.subject import Subject, is_classifier, is_labelled

LEVELS = (0.5, 0.25, 0.1)
"""Values of t: the report has the number of singular values above t times the largest, at most stable rank / t^2."""
SHOWN_VALUES = 64
"""Number of the largest singular values that a report draws."""


def measures(subject: Subject) -> dict[str, Any]:
    """Return the measures as JSON.

    ``sharpness``: figures as trained and, if some layers can be rescaled, ``rescaled``; ``rescaling`` has the largest
    change of a loss. ``matrices``: spectra, keyed by name, and test losses at each share of the rank. ``gradients``:
    norms, keyed by parameter. ``bounds``, for classifiers of rows only: mean losses in [0, 1], and bounds on the gap by
    PAC-Bayes and by theorem 4.1 of Wei, Kakade and Ma.
    """
    figures: dict[str, Any] = {
        "sample": subject.num_rows,
        "loss": subject.point.value(),
        "sharpness": {"as trained": sharpness(subject)},
        "gradients": {name: list(pair) for name, pair in gradient_norms(subject.point).items()},
        "matrices": _matrices(subject),
    }
    if is_classifier(subject.job, subject.data):
        figures["bounds"] = _bounds(subject)
    pairs = rescalable(subject.model)
    if pairs:
        before = subject.losses().detach()
        with rescaled(pairs):
            moved = float((subject.losses().detach() - before).abs().max())
            figures["sharpness"]["rescaled"] = sharpness(subject)
        figures["rescaling"] = {"alpha": ALPHA, "pairs": len(pairs), "largest change of a loss": moved}
    return figures


def _bounds(subject: Subject) -> dict[str, Any]:
    num_rows = subject.data.num_examples["train"]
    best = bounds.pac_bayes(subject.point, subject.losses, subject.squared_distance, num_rows)
    last = last_layer(subject)
    with contextlib.nullcontext([0.0]) if last is None else bounds.largest_input(last) as largest:
        losses = subject.split_losses("train")
    mu, nu = bounds.derivatives(losses)
    figures: dict[str, Any] = {
        "rows": num_rows,
        "train": bounds.wrong(losses),
        "mu": mu,
        "nu": nu,
        "massart": bounds.massart_bound(subject.num_parameters, num_rows),
        "squared_distance": subject.squared_distance,
        "pac_bayes": {"bound": best.bound, **dataclasses.asdict(best)},
    }
    if subject.data.num_examples["test"]:
        figures["test"] = bounds.wrong(subject.split_losses("test"))
    if subject.job.model.kind == "dnn" and not subject.data.num_dense:
        figures["norm_bound"] = _norm_bound(subject)
    if last is not None:
        norm, longest = bounds.norm_of(last), max(largest)
        found = bounds.linear_bound(losses, norm, longest)
        figures["linear"] = {
            "norm": norm, "largest_input": longest, "terms": list(found.terms), "train": found.train,
            "gap": found.gap, "bound": found.bound, "vacuous": found.is_vacuous,
        }  # fmt: skip
    return figures


def last_layer(subject: Subject) -> nn.Linear | None:
    """Return the last layer of a ``dnn``, whose output is the logit; None for other models, which add to its output."""
    if subject.job.model.kind != "dnn":
        return None
    tower: Any = subject.model.tower
    layer = tower[-1]
    assert isinstance(layer, nn.Linear)
    return layer


def _norm_bound(subject: Subject) -> float:
    """Return the bound by norms for an MLP over embeddings only, with the inputs of the sample."""
    matrices = subject.matrices()
    tables = [float(matrices[f"table {key.table}"].double().norm()) for key in subject.data.keys]
    layers = [float(one.detach().norm()) for _, one in subject.model.dense_parameters() if one.ndim == 2]
    return bounds.norm_bound(layers, tables, subject.mean_squared_input(), subject.data.num_examples["train"])


def random_fit(subject: Subject) -> dict[str, Any]:
    """Return the number of training rows and the fit of signs (:func:`trainer.generalization.bounds.fit_of_signs`).

    The model must have been trained on labels of :func:`trainer.generalization.label_randomization.coins`.
    """
    return {"rows": subject.data.num_examples["train"], "fit": bounds.fit_of_signs(subject.split_losses("train"))}


def sharpness(subject: Subject) -> dict[str, float]:
    """Return three measures of sharpness, keyed by name, absolute and relative to the parameters' magnitudes."""
    point, scale = subject.point, subject.point.magnitudes()
    return {
        "lambda_max": top_eigenvalue(point),
        "ascent": ascent_rise(point),
        "noise": noise_rise(point),
        "relative lambda_max": top_eigenvalue(point, scale=scale),
        "relative ascent": ascent_rise(point, RELATIVE_RHO, scale=scale),
        "relative noise": noise_rise(point, RELATIVE_SIGMA, scale=scale),
    }


def _matrices(subject: Subject) -> dict[str, Any]:
    matrices = subject.matrices()
    spectra = {name: spectrum(matrix) for name, matrix in matrices.items()}
    figures: dict[str, Any] = {
        name: {
            "shape": list(matrices[name].shape),
            "stable_rank": one.stable_rank,
            "above": [one.num_above(t) for t in LEVELS],
            "values": (one.values / (one.values[0] or 1.0))[:SHOWN_VALUES].tolist(),
            "error": [one.error(rank_of(one, share)) for share in SHARES],
        }
        for name, one in spectra.items()
    }
    if is_labelled(subject.job, subject.data) and subject.data.num_examples["test"]:
        lost = truncated_losses(matrices, spectra, lambda: float(subject.split_losses("test").mean()))
        for name, values in lost.items():
            figures.setdefault(name, {})["loss"] = values
    return figures
