"""Sections of the generalization report: curves, sharpness, spectra, gradients, bounds and stability."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.generalization.bounds import COIN, DELTA, SIGMAS, TRUNCATION, rademacher_bound
from trainer.generalization.measures import LEVELS
from trainer.generalization.spectrum import SHARES
from trainer.generalization.trainings import COINS, NEIGHBOURS, ORIGINAL, PERMUTED, Training
from trainer.report_pages.section import NOT_RUN, Findings, Panel, Section, Verdict, verdict
from trainer.search.records import Record, facts


class Ended(NamedTuple):
    """A training that has succeeded, its record, and the file ``arrays`` with its losses and parameters."""

    training: Training
    record: Record
    arrays: Path


def findings(ended: Sequence[Ended]) -> Findings:
    """Return the sections and claims of the trainings of a report."""
    is_several = len({one.training.job.seed for one in ended}) > 1
    labels = {
        (one.training.label, one.training.job.seed): f"{one.training.label}, seed {one.training.job.seed}"
        if is_several
        else one.training.label
        for one in ended
    }
    by_kind: dict[str, dict[str, Record]] = {}
    for one in ended:
        label = labels[one.training.label, one.training.job.seed]
        by_kind.setdefault(one.training.kind, {})[label] = one.record
    originals = by_kind.get(ORIGINAL, {})
    measured = {label: record["measured"] for label, record in originals.items()}
    if not measured:
        return Findings()
    fits = {label: record["measured"] for label, record in by_kind.get(COINS, {}).items()}
    sections = [
        _sharpness(measured, facts([*originals.values()])), *_spectra(measured), _gradients(measured),
        *_bounds(measured, fits), *_linear_bounds(measured), *_stability(ended, labels),
    ]  # fmt: skip
    return Findings(tuple(sections), tuple(_claims(measured)))


def curves(ended: Sequence[Ended]) -> list[Section]:
    """Return sections with training and test figures after each epoch, and their gap, for true and permuted labels."""
    sections = []
    for kind, title in (
        (ORIGINAL, "Training and test figures after each epoch, and the gap (section 2)"),
        (PERMUTED, "Permuted labels: the same job where labels say nothing of their rows (section 5)"),
    ):
        lines, panels, behind = [], [], []
        for one in ended:
            if one.training.kind != kind:
                continue
            metrics = one.record["metrics"] + gaps(one.record["metrics"])
            by_curve: dict[str, list[tuple[float, float]]] = {}
            for row in sorted(metrics, key=lambda row: row["epoch"]):
                for name in ("auc", "logloss", "rmse"):
                    if row["split"] in ("train", "test", "gap") and row.get(name) is not None:
                        by_curve.setdefault(f"{row['split']} {name}", []).append((row["epoch"], float(row[name])))
            label = f"{one.training.label}, seed {one.training.job.seed}"
            lines += [(label, name, "/".join(f"{value:.4f}" for _, value in curve)) for name, curve in by_curve.items()]
            panels.append(Panel(label, "epoch", "", by_curve))
            behind.append(one.record)
        if lines:
            header = ("", "", "by epoch")
            sections.append(Section(kind, title, header, tuple(lines), (facts(behind),), tuple(panels)))
    return sections


SHARPNESS = ("lambda_max", "ascent", "noise", "relative lambda_max", "relative ascent", "relative noise")


def _sharpness(measured: Mapping[str, Record], said: str) -> Section:
    lines = []
    for label, record in measured.items():
        for how, figures in record["sharpness"].items():
            lines.append((label, how, *(f"{figures[name]:.4g}" for name in SHARPNESS)))
    notes = []
    for label, record in measured.items():
        rescaling = record.get("rescaling")
        if rescaling is None:
            notes.append(f"{label}: no two linear layers with a ReLU between them: nothing to rescale.")
            continue
        notes.append(
            f"{label}, rescaled: {rescaling['pairs']} pairs of layers, the first times {rescaling['alpha']:g} and the "
            f"second divided by it; the loss of an example changed by at most "
            f"{rescaling['largest change of a loss']:.1e}."
        )
    sample = next(iter(measured.values()))["sample"]
    return Section(
        "sharpness",
        "Sharpness, and the reparametrisation check (sections 6 and 6.1)",
        ("", "", *SHARPNESS),
        tuple(lines),
        (
            f"Sharpness of the training loss of {sample} training rows, as a function of all dense weights and of the "
            "rows that they look up. lambda_max: the largest eigenvalue of the Hessian; ascent: the rise after a step "
            "of length .05 along the gradient (SAM); noise: the mean rise under Gaussian noise of deviation .01. "
            "Relative: the same with every parameter's own magnitude as its unit (radius .5, deviation .1), which does "
            "not change if layers are rescaled. The figures that are not relative depend on the parametrisation.",
            *notes,
            said,
        ),
    )


def _spectra(measured: Mapping[str, Record]) -> Iterator[Section]:
    lines, panels = [], []
    for label, record in measured.items():
        curves = {}
        for name, one in record["matrices"].items():
            if "values" not in one:
                continue
            bounds = [
                f"{above} ({one['stable_rank'] / t**2:.0f})" for above, t in zip(one["above"], LEVELS, strict=True)
            ]
            lines.append(
                (label, name, " x ".join(map(str, one["shape"])), f"{one['stable_rank']:.2f}", *bounds,
                 *(f"{error:.3f}" for error in one["error"][:-1]))
            )  # fmt: skip
            curves[name] = [(rank + 1.0, max(value, 1e-6)) for rank, value in enumerate(one["values"])]
        panels.append(Panel(label, "number", "singular value / largest", curves, "y"))
    yield Section(
        "spectra",
        "Spectra of weight matrices and tables (sections 7 and 7.2)",
        ("", "matrix", "shape", "stable rank", *(f"above {t:g} (bound)" for t in LEVELS),
         *(f"error, {share:.4g} of rank" for share in SHARES[:-1])),
        tuple(lines),
        (
            "Stable rank: |M|_F^2 / |M|_2^2. Above t: singular values above t of the largest, of which there are at "
            "most stable rank / t^2. Error: |M - M_r|_F / |M|_F.",
        ),
        tuple(panels),
    )  # fmt: skip
    lines, panels = [], []
    for label, record in measured.items():
        lost = {name: one["loss"] for name, one in record["matrices"].items() if "loss" in one}
        if not lost:
            continue
        lines += [(label, name, *(f"{value:.4f}" for value in losses)) for name, losses in lost.items()]
        curves = {name: list(zip(SHARES, losses, strict=True)) for name, losses in lost.items()}
        panels.append(Panel(label, "share of rank kept", "test loss", curves, "x"))
    if lines:
        yield Section(
            "compression",
            "Compression by truncated SVD: mean test loss with a share of the rank (section 7)",
            ("", "matrix", *(f"{share:.4g}" for share in SHARES)),
            tuple(lines),
            ("One matrix at a time, the others whole; all: all of them at once.",),
            tuple(panels),
        )


def _gradients(measured: Mapping[str, Record]) -> Section:
    lines = [
        (label, name, f"{length:.3g}", NOT_RUN if math.isnan(ratio) else f"{ratio:.3g}")
        for label, record in measured.items()
        for name, (length, ratio) in record["gradients"].items()
    ]
    return Section(
        "gradients",
        "Norms of gradients after the last epoch (section 1)",
        ("", "parameter", "gradient", "gradient / parameter"),
        tuple(lines),
        ("Of the mean training loss of the same rows; Euclidean norms.",),
    )


def _bounds(measured: Mapping[str, Record], fits: Mapping[str, Record]) -> Iterator[Section]:
    lines = []
    for label, record in measured.items():
        one = record.get("bounds")
        if one is None:
            continue
        fit, bayes = fits.get(label), one["pac_bayes"]
        signs = (NOT_RUN, NOT_RUN)
        if fit is not None:
            signs = (f"{fit['fit']:.3f}", f"{rademacher_bound(fit['fit'], fit['rows']):.3f}")
        gap = f"{one['test'] - one['train']:+.4f}" if "test" in one else NOT_RUN
        lines.append(
            (label, f"{one['rows']:,}", f"{one['train']:.4f}", gap, *signs, f"{bayes['sigma']:.2g}",
             f"{bayes['divergence']:,.0f}", f"{bayes['loss']:.3f}", f"{bayes['gap']:.3f}", f"{bayes['bound']:.3f}",
             f"{one['norm_bound']:,.3g}" if "norm_bound" in one else NOT_RUN, f"{one['massart']:.3g}")
        )  # fmt: skip
    if lines:
        yield Section(
            "bounds",
            "Bounds on the gap: Rademacher complexity and PAC-Bayes (sections 3 and 4)",
            ("", "training rows", "training loss", "gap", "fit of signs", "Rademacher bound", "sigma", "KL",
             "loss under noise", "PAC-Bayes gap", "bound", "complexity by norms", "Massart"),
            tuple(lines),
            (
                "The loss is the probability given to the wrong label, in [0, 1]; gap: the loss of the test split "
                "minus that of training. Fit of signs: the mean of sign times 2 p - 1 over the rows if the same job is "
                "trained on labels from fair coins. It is at most the supremum in the Rademacher complexity, so the "
                f"bound computed from it may be too low. Both bounds hold with probability {1 - DELTA:g} over rows "
                "drawn independently.",
                "PAC-Bayes: P and Q are normal around the initial and the trained parameters, dense weights and all "
                f"rows, with the sigma, of {len(SIGMAS)}, whose bound is smallest (the bound includes the price of "
                "this choice); loss under noise: on the rows that sharpness is measured on. A bound of .5 or more says "
                "nothing: a fair coin has that loss.",
                "Complexity by norms: a bound on the empirical Rademacher complexity of an MLP over embeddings by the "
                "Frobenius norms of its layers and tables (Li and Lyu, preliminaries), for `dnn` without numbers. It "
                "is that of the logit; above 1 it says nothing about the gap, and serves only to compare jobs. "
                "Massart: the complexity of the set of functions that the parameters' bits can encode (section 5); "
                "above 1 it says nothing either.",
            ),
        )  # fmt: skip


def _linear_bounds(measured: Mapping[str, Record]) -> Iterator[Section]:
    lines = []
    for label, record in measured.items():
        one = record.get("bounds")
        if one is None or "mu" not in one:
            continue
        of_layer = one.get("linear")
        figures: tuple[str, ...] = (NOT_RUN,) * 9
        if of_layer is not None:
            figures = (
                f"{of_layer['norm']:.3g}", f"{of_layer['largest_input']:.3g}",
                *(f"{term:.3g}" for term in of_layer["terms"]), f"{of_layer['train']:.4f}",
                f"{of_layer['bound']:.3g}", "vacuous" if of_layer["vacuous"] else f"below {COIN:.3f}",
            )  # fmt: skip
        lines.append((label, f"{one['mu']:.4f}", f"{one['nu']:.4f}", *figures))
    if lines:
        yield Section(
            "linear-bound",
            "A bound by derivatives of the loss (Wei, Kakade and Ma, theorem 4.1)",
            ("", "mu", "nu", "A", "largest input", "term of mu", "term of nu", "term of norms", "zeta", "training loss",
             "bound", ""),
            tuple(lines),
            (
                "mu and nu are means over all training rows of derivatives of the cross-entropy by the logits of two "
                "classes: of the gradient's length, and of the Hessian's trace. The bound is on the loss of new rows, "
                f"truncated at {TRUNCATION:g}, with probability {1 - DELTA:g}: 1.01 times the training loss, truncated "
                f"too, and the four terms. Vacuous: {COIN:.3f} or more, the loss of a fair coin.",
                "The theorem holds for linear models and has a universal constant that the paper does not give: 1 is "
                "used here. For `dnn` it is applied to the last layer, as if that layer's inputs did not depend on the "
                "training rows, and A is the layer's own norm. So it is a figure to compare, and no bound on the gap "
                "of the whole model even where it is not vacuous. Other models add to the last layer's output: for "
                "them, only mu and nu are given.",
            ),
        )  # fmt: skip


def _stability(ended: Sequence[Ended], labels: Mapping[tuple[str, int], str]) -> Iterator[Section]:
    bases = {(one.training.label, one.training.job.seed): one for one in ended if one.training.kind == ORIGINAL}
    lines, behind = [], []
    for one in ended:
        key = one.training.label, one.training.job.seed
        if one.training.kind != NEIGHBOURS or key not in bases:
            continue
        with np.load(bases[key].arrays) as file, np.load(one.arrays) as other:
            names = [name for name in ("dense", "rows") if name in file]
            distances = distance(
                file["losses"], other["losses"],
                {name: file[name] for name in names}, {name: other[name] for name in names},
            )  # fmt: skip
            count = int((file["train_labels"] != other["train_labels"]).sum())
            total = len(file["train_labels"])
        apart = " / ".join(f"{distances.parameters[name]:.4f}" for name in names)
        figures = (f"{distances.epsilon:.4f}", f"{distances.mean:.5f}", f"{distances.risk:+.6f}", apart)
        lines.append((labels[key], f"{count} of {total}", *figures))
        behind.append(one.record)
    if lines:
        yield Section(
            "stability",
            "Uniform stability: the same training with a few labels changed (section 8)",
            ("", "labels changed", "epsilon", "mean", "difference of test losses", "dense / rows apart"),
            tuple(lines),
            (
                "epsilon: the largest difference of the loss of one test row between both models, a lower bound of "
                "the definition's epsilon; mean: the mean difference. Apart: |a - b| / |a| of the parameters. The "
                "order of rows and the random draws are the same: with no label changed, every figure is 0.",
                facts(behind),
            ),
        )


def _claims(measured: Mapping[str, Record]) -> list[Verdict]:
    verdicts = []
    for label, one in measured.items():
        if "rescaled" not in one["sharpness"]:
            continue
        plain, rescaled = one["sharpness"]["as trained"], one["sharpness"]["rescaled"]
        ratio, relative = (rescaled[name] / plain[name] for name in ("lambda_max", "relative lambda_max"))
        same = one["rescaling"]["largest change of a loss"] < 1e-9
        holds = same and abs(relative - 1) < 0.01 and not 0.5 < ratio < 2
        text = f"{label}: rescaled layers compute the same function and keep the relative sharpness, not the sharpness"
        verdicts.append(verdict(text, holds, f"lambda_max times {ratio:.3g}, relative lambda_max times {relative:.4f}"))
    return verdicts


LOSSES = ("logloss", "rmse", "mae")


def gaps(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of metrics with split ``gap`` for each epoch that has figures of both training and test.

    The gap is test - train for losses and train - test for AUC, so a larger gap is always worse.
    """
    by_epoch_and_split = {(one["epoch"], one["split"]): one for one in metrics}
    rows = []
    for epoch in sorted({epoch for epoch, _ in by_epoch_and_split}):
        train, test = by_epoch_and_split.get((epoch, "train"), {}), by_epoch_and_split.get((epoch, "test"), {})
        row: dict[str, Any] = {}
        for name in (*LOSSES, "auc"):
            if train.get(name) is not None and test.get(name) is not None:
                difference = float(test[name]) - float(train[name])
                row[name] = -difference if name == "auc" else difference
        if row:
            rows.append({"epoch": epoch, "split": "gap", **row})
    return rows


Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Distance:
    """Distances between two trained models.

    ``epsilon`` and ``mean``: the largest and the mean absolute difference between the losses of an example. ``risk``:
    the difference of the mean losses, at most ``mean``. ``parameters``: |a - b| / |a| of each parameter.
    """

    epsilon: float
    mean: float
    risk: float
    parameters: dict[str, float]


def distance(
    losses: Floats, other_losses: Floats, parameters: dict[str, Floats], other_parameters: dict[str, Floats]
) -> Distance:
    """Return the distances of models A(S) and A(S').

    Losses are [n], of the same held-out examples; parameters are keyed by name.
    """
    apart = np.abs(losses.astype(np.float64) - other_losses)
    return Distance(
        float(apart.max()),
        float(apart.mean()),
        float(losses.mean(dtype=np.float64) - other_losses.mean(dtype=np.float64)),
        {
            name: float(np.linalg.norm(values.astype(np.float64) - other_parameters[name]) / np.linalg.norm(values))
            for name, values in parameters.items()
        },
    )
