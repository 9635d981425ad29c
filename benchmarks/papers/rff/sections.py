"""Sections of the ``rff`` recipe about vectors of several runs: a classification, figures 1c, 1d, A.3 and A.4."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.papers.pages import published
from benchmarks.papers.rff.figures import (
    Judged,
    LabelTask,
    aligned,
    directions,
    features_of,
    percent,
    products,
    representations,
    spread,
    unit,
)
from embeddings.rff.exponential import exponential
from embeddings.vectors.item_vectors import Array
from trainer.report_pages.section import Panel, Section
from trainer.search.records import facts

VARIANCES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""The values of sigma_Q^2 in figure A.4, and 1, the standard Gaussian of table 1."""
EXPONENTIAL_RUNS = 3
"""Limit of runs, as a regression with one feature per item takes a hundred times as long as a regression on h."""
PRODUCTS = "<h, h'>"
Runs = dict[int, dict[str, Array]]
"""The kept arrays of each run, by seed."""


def vectors_and_classes(runs: Runs, classes: Mapping[int, str]) -> tuple[list[Array], Array]:
    """Return (vectors [n, d] of each run after its last step, classes [n]) of the items that have a class."""
    ids = next(iter(runs.values()))["ids"].tolist()
    rows = [row for row, item in enumerate(ids) if item in classes]
    return [arrays["vectors"][-1][rows] for _, arrays in sorted(runs.items())], np.array(
        [classes[ids[row]] for row in rows]
    )


def class_table(
    runs: Runs,
    classes: Mapping[int, str],
    dim: int,
    behind: Sequence[dict[str, Any]],
    *,
    is_published: bool,
    name: str = "task1",
    of: str = "runs",
) -> tuple[Section, dict[str, Judged]]:
    """Return the table of the classification from the vectors of each run, and its figures.

    Args:
        runs: The kept arrays of each run.
        classes: The class of each item that has one, by id.
        dim: Dimension of the vectors.
        behind: The records of the runs.
        is_published: True if the table shows the paper's figures too.
        name: Name of the section.
        of: Name of the runs in the title.

    Returns:
        The section, and the figures by row.
    """
    vectors, labels = vectors_and_classes(runs, classes)
    task = LabelTask(labels)
    turned = aligned(vectors) if len(vectors) > 1 else vectors
    rows = representations(vectors, dim) | representations(turned, dim, ", aligned")
    rows[f"exp<h_{dim}, h>"] = (vectors[:EXPONENTIAL_RUNS], lambda rows: exponential(rows, rows))
    judged = {row: task.judge(of_runs, features) for row, (of_runs, features) in rows.items()}
    as_they_are = LabelTask(labels, standardised=False)
    plain = {
        row: percent(as_they_are.judge(*rows[row], frozen=False).accuracy) for row in representations(vectors, dim)
    }
    lines = []
    for row, one in judged.items():
        paper = published.RFF_TASK_1.get(row, ("", "")) if is_published else ("", "")
        lines.append(
            (row, percent(one.accuracy), paper[0], percent(one.f1), paper[1], percent(one.frozen), plain.get(row, ""))
        )
    return Section(
        name,
        f"Task 1: the class of an item from its vector, dimension {dim}, {len(vectors)} {of}",
        (
            "features", "accuracy (sd)", "published", "macro F1 (sd)", "published", "fitted on run 0 alone (sd)",
            "accuracy, not standardised (sd)",
        ),
        tuple(lines),
        (
            f"{len(labels)} items, {task.num_held_out} of them held out; the most frequent class is right on "
            f"{100 * task.majority:.2f} %. In per cent, mean and standard deviation over runs.",
            "exp<h, h>: the exponential vector of section 4.3, with one number for each item; from "
            f"{EXPONENTIAL_RUNS} runs at most.",
            "The last but one is no part of the paper's table: a consumer that was fitted on the first run and reads "
            "the vectors of the others, as a downstream model does between its own retrains. Features are standardised "
            "but in the last column.",
            facts(behind),
        ),
    ), judged  # fmt: skip


def growth(
    runs: Runs,
    behind: Sequence[dict[str, Any]],
    *,
    name: str = "growth",
    title: str = "Variance over runs, as training goes on (figures 1c, 1d)",
) -> tuple[list[Section], dict[str, float]]:
    """Return figures 1c and 1d, the variance over runs during training, and the shares at the end.

    Args:
        runs: The kept arrays of each run.
        behind: The records of the runs; steps count as epochs if the records lack the steps of an epoch.
        name: Name of the section.
        title: Title of the section.

    Returns:
        The section in a list, and {quantity: its figure after the last step}. A single run gives ([], {}).
    """
    if len(runs) < 2:
        return [], {}
    by_seed = [one for _, one in sorted(runs.items())]
    # A run that was stopped and resumed has one more checkpoint.
    steps = sorted(set.intersection(*(set(one["steps"].tolist()) for one in by_seed)))
    per_epoch = behind[0]["measured"].get("steps_per_epoch", 1)
    dim = by_seed[0]["vectors"].shape[-1]
    curves: dict[str, list[tuple[float, float]]] = {}
    lines = []
    for step in steps:
        raw = np.stack([one["vectors"][one["steps"].tolist().index(step)] for one in by_seed]).astype(np.float64)
        unit = directions(list(raw))
        turned = directions(aligned(list(unit)))
        phi = np.stack([features_of(dim, 2 * dim, 1.0)(rows) for rows in unit])
        figures = {
            "variance of a coordinate of h": float(raw.var(axis=0, ddof=1).mean()),
            "h": spread(unit),
            PRODUCTS: spread(products(unit)),
            f"phi_{2 * dim}": spread(phi.astype(np.float64)),
            "h, aligned": spread(turned),
        }
        epoch = step / per_epoch
        for what, value in figures.items():
            curves.setdefault(what, []).append((epoch, value))
        lines.append((f"{epoch:.3g}", *(f"{value:.4f}" for value in figures.values())))
    shares = {what: curve[-1][1] for what, curve in curves.items()}
    raw_name = "variance of a coordinate of h"
    panels = (
        Panel("raw vectors", "epoch", raw_name, {"h": curves.pop(raw_name)}),
        Panel("directions", "epoch", "variance over runs / mean square", curves),
    )
    return [
        Section(
            name,
            title,
            ("epoch", *shares),
            tuple(lines),
            (
                "All figures but the first are computed on unit vectors, as a share of the mean square. 1: every run "
                "has other values; 0: all runs have the same.",
            ),
            panels,
        )
    ], shares


def sensitivity(
    by_dim: Mapping[int, tuple[Runs, list[dict[str, Any]]]], classes: Mapping[int, str], *, name: str = "sensitivity",
    of: str = "runs",
) -> Section:  # fmt: skip
    """Return figures A.3 and A.4."""
    lines, behind = [], []
    curves: dict[str, list[tuple[float, float]]] = {}
    for dim, (runs, records) in sorted(by_dim.items()):
        vectors, labels = vectors_and_classes(runs, classes)
        task = LabelTask(labels)
        cells = [percent(task.judge(vectors, unit, frozen=False).accuracy)]
        for times in (1, 2):
            for variance in VARIANCES if times == 1 else VARIANCES[-1:]:
                features = features_of(dim, times * dim, float(np.sqrt(variance)))
                accuracy = task.judge(vectors, features, frozen=False).accuracy
                cells.append(percent(accuracy))
                if times == 1:
                    curves.setdefault(f"d = {dim}", []).append((variance, 100 * statistics.fmean(accuracy)))
        lines.append((str(dim), str(len(vectors)), *cells))
        behind += records
    return Section(
        name,
        f"Sensitivity to d and sigma_Q^2: accuracy of task 1 (figures A.3, A.4), by {of}",
        ("d", of, "h_d", *(f"phi_d, {variance:g}" for variance in VARIANCES), "phi_2d, 1"),
        tuple(lines),
        ("Published as charts alone: phi_d above h_d, phi_2d above phi_d, and flat in sigma_Q.", facts(behind)),
        (Panel("phi_d", "sigma_Q^2", "accuracy, per cent", curves),),
    )
