"""``rff``: item vectors of repeated runs, raw and as random Fourier features, before two tasks.

The tasks are a genre task and a model of what users take next, and in place of the A/B test four consumers on held-out
days. Xu et al., Some Practical Concerns and Solutions for Using Pretrained Representation, table 1, ML-1m; figures 1,
A.3, A.4 and A.5.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from embeddings.vectors.item_vectors import Array
from trainer.recipes import rff_ab_test, rff_task_2, rff_theory
from trainer.recipes.held_out_days import Log, day_name, day_number, read_log, write_rows_before
from trainer.recipes.next_item_task import MAX_EPOCHS, histories
from trainer.recipes.pages import documents, published
from trainer.recipes.pages.layout import facts
from trainer.recipes.pages.section import Findings, Panel, Section, Verdict, verdict
from trainer.recipes.rff_figures import (
    HELD_OUT_SHARE,
    Judged,
    LabelTask,
    aligned,
    deviation_claim,
    directions,
    exponential,
    features_of,
    frozen_claim,
    percent,
    products,
    representations,
    spread,
    unit,
)
from trainer.recipes.trials.quick_data import TASTE_CLASSES, write_tastes
from trainer.recipes.trials.run_trial import KEPT, kept_path
from trainer.recipes.trials.trial import Recipe, Trial

DIMS = (16, 32, 64)
MAIN_DIM = 32
QUICK_DIM = 8
QUICK_CONSUMER_EPOCHS = 15
VARIANCES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""sigma_Q^2 of figure A.4, and that of the standard Gaussian of table 1."""
STEPS_PER_EPOCH = 242
"""988,129 training rows by 4096: a checkpoint after each epoch."""
EPOCHS = 8
FULL: dict[str, Any] = {"batch_size": 4096, "epochs": EPOCHS, "every_steps": STEPS_PER_EPOCH, "rate": 0.002}
QUICK: dict[str, Any] = {"batch_size": 256, "epochs": 4, "every_steps": 43, "rate": 0.01}
REPEATED, AB_TEST = "item2vec", "ab_test"
"""Tables of trials: runs that differ in their seed alone, and one for each held-out day."""
FIRST_DAY, QUICK_FIRST_DAY = "2000-11-24", "1970-01-07"
MAX_DAYS, QUICK_MAX_DAYS = 10, 5
DAY_EPOCHS = 6
"""Of the vectors of a held-out day."""
EXPONENTIAL_RUNS = 3
"""A regression of as many features as there are items takes a hundred times as long as one of h."""
PRODUCTS = "<h, h'>"
Runs = dict[int, dict[str, Array]]
"""What was kept of each run, by seed."""


def recipe(data: Path, seeds: int = 10, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return ``seeds`` independent runs of item2vec for each dimension, and as many held-out days.

    ``quick``: of one dimension, on generated tastes. ``rows``: the folder of files it writes, the rows before each day.
    """
    if quick:
        log = data / "tastes_by_day.parquet"
        of = documents.dataset("tastes", log, {"rule": "rating >= 1"}, order="pos")
        dims: tuple[int, ...] = (QUICK_DIM,)
        settings, day_settings = QUICK, QUICK
    else:
        log = data / "ml1m.parquet"
        of = documents.ml1m(data, {"rule": "rating >= 1"}, "ml1m_sequences", order="pos")
        dims, settings = (MAIN_DIM, *(dim for dim in DIMS if dim != MAIN_DIM)), FULL
        day_settings = FULL | {"epochs": DAY_EPOCHS}
    trials = [
        _trial(of, dim, seed, table=REPEATED, row="item2vec", **settings) for dim in dims for seed in range(seeds)
    ]
    first = day_number(QUICK_FIRST_DAY if quick else FIRST_DAY)
    days = [day_name(first + seed) for seed in range(min(seeds, QUICK_MAX_DAYS if quick else MAX_DAYS))]
    for seed, day in enumerate(days):
        before = of.model_copy(update={"name": f"before_{day}", "uri": str(rows / f"{log.stem}_before_{day}.parquet")})
        trials.append(_trial(before, dims[0], seed, table=AB_TEST, row=day, **day_settings))

    def prepare() -> None:
        if quick:
            write_tastes(log)
        whole = read_log(log)
        for trial in trials:
            if trial.table == AB_TEST:
                write_rows_before(whole, day_number(trial.row), Path(trial.dataset.uri))

    def findings_of(of_recipe: Recipe, records: Mapping[str, dict[str, Any]], out: Path) -> Findings:
        ended = [(trial, record) for trial in of_recipe.jobs
                 if (record := records.get(trial.key, {})).get("state") == "done"]  # fmt: skip
        by_dim: dict[int, tuple[Runs, list[dict[str, Any]]]] = {}
        for trial, record in ended:
            if trial.table == REPEATED:
                runs, behind = by_dim.setdefault(trial.job.model.embedding_dim, ({}, []))
                runs[trial.seed] = _arrays(trial, out)
                behind.append(record)
        classes = TASTE_CLASSES if quick else first_genres(data / "ml1m_movies.parquet")
        found = findings(by_dim, classes, dims[0], is_published=not quick)
        if dims[0] in by_dim:
            max_epochs = QUICK_CONSUMER_EPOCHS if quick else MAX_EPOCHS
            section, claims = task_2(by_dim[dims[0]], log, dims[0], out / KEPT, max_epochs, is_published=not quick)
            found = Findings((found.sections[0], section, *found.sections[1:]), (*found.claims, *claims))
        of_days = {trial.row: (_arrays(trial, out), record) for trial, record in ended if trial.table == AB_TEST}
        if of_days:
            found = _with_days(found, read_log(log), of_days, classes, dims[0], out / KEPT, is_published=not quick)
        return found

    return Recipe("rff", _TITLE, _SOURCE, _PROTOCOL, tuple(trials), (), (), prepare, findings_of)


def _with_days(
    found: Findings,
    log: Log,
    of_days: Mapping[str, tuple[dict[str, Array], dict[str, Any]]],
    classes: Mapping[int, str],
    dim: int,
    memory: Path,
    *,
    is_published: bool,
) -> Findings:
    """Return findings and those of held-out days, whose vectors are runs on nearly the same rows too."""
    ids = reduce(np.intersect1d, [arrays["ids"] for arrays, _ in of_days.values()])
    runs = {
        day_number(day): {"ids": ids, "vectors": arrays["vectors"][:, _rows_of(ids, arrays["ids"])]}
        for day, (arrays, _) in of_days.items()
    }
    behind = [record for _, record in of_days.values()]
    sensitivity = _sensitivity({dim: (runs, behind)}, classes, name="sensitivity_days", of="days")
    vectors = {number: arrays["vectors"][-1] for number, arrays in runs.items()}
    section, claims = rff_ab_test.findings(log, ids, vectors, dim, behind, memory, is_published=is_published)
    refreshes, _ = _table(
        runs, classes, dim, behind, is_published=is_published, name="task1_days", of="days, of the rows before each"
    )
    return Findings((*found.sections, section, refreshes, sensitivity), (*found.claims, *claims))


def _rows_of(ids: Array, known: Array) -> Array:
    """Return where each of ``ids`` stands in ``known``."""
    order = np.argsort(known)
    rows: Array = order[np.searchsorted(known, ids, sorter=order)]
    return rows


def _arrays(trial: Trial, out: Path) -> dict[str, Array]:
    with np.load(kept_path(trial, out)) as file:
        return {name: file[name] for name in file.files}


def _trial(
    of: Any, dim: int, seed: int, *, table: str, row: str, batch_size: int, epochs: int, every_steps: int, rate: float
) -> Trial:
    init = {"kind": "hash", "std": 0.1}
    return documents.trial(
        table, f"d{dim}", row, of, measured_by="item_vectors", name=f"rff {row} {dim}",
        model={"kind": "item2vec", "embedding_dim": dim, "window": 3, "negatives": 3, "init": init},
        optimizer={"kind": "adam", "learning_rate": rate, "moments": "dense"},
        epochs=epochs, batch_size=batch_size, seed=seed,
        evaluation=documents.LAST_ITEMS | {"metrics": ["hit_rate_10"]},
        checkpoint={"every_steps": every_steps, "keep_last": 2 * epochs},
    )  # fmt: skip


def first_genres(movies: Path) -> dict[int, str]:
    """Return the first genre of each movie of MovieLens-1M."""
    table = pq.read_table(movies, columns=["item", "genres"])
    pairs = zip(table["item"].to_pylist(), table["genres"].to_pylist(), strict=True)
    return {item: genres.partition("|")[0] for item, genres in pairs}


def findings(
    by_dim: Mapping[int, tuple[Runs, list[dict[str, Any]]]],
    classes: Mapping[int, str],
    main_dim: int,
    *,
    is_published: bool,
) -> Findings:
    """Return the sections and claims of what has ended: (what runs kept, their records) by dimension."""
    sections, claims = [], []
    if main_dim in by_dim:
        runs, behind = by_dim[main_dim]
        section, judged = _table(runs, classes, main_dim, behind, is_published=is_published)
        sections.append(section)
        growth, shares = _growth(runs, behind)
        sections += growth
        vectors, labels = _vectors(runs, classes)
        held_out = np.random.Generator(np.random.Philox(0)).random(len(labels)) < HELD_OUT_SHARE
        sections += [rff_theory.lemma_1(vectors, labels, held_out), rff_theory.proposition_4(vectors, labels)]
        claims += _claims(judged, shares, main_dim, is_published=is_published)
    if by_dim:
        sections.append(_sensitivity(by_dim, classes))
    return Findings(tuple(sections), tuple(claims))


def task_2(
    collected: tuple[Runs, list[dict[str, Any]]],
    rows: Path,
    dim: int,
    memory: Path,
    max_epochs: int,
    *,
    is_published: bool,
) -> tuple[Section, list[Verdict]]:
    """Return the section of task 2 and its claims."""
    runs, behind = collected
    vectors = [arrays["vectors"][-1] for _, arrays in sorted(runs.items())]
    of = histories(rows, next(iter(runs.values()))["ids"])
    section, judged = rff_task_2.section_of(vectors, of, dim, behind, memory, max_epochs, is_published=is_published)
    return section, rff_task_2.claims_of(judged, dim, is_published=is_published)


def _vectors(runs: Runs, classes: Mapping[int, str]) -> tuple[list[Array], Array]:
    """Return (vectors [n, d] of each run after its last step, classes [n]) of the items that have one."""
    ids = next(iter(runs.values()))["ids"].tolist()
    rows = [row for row, item in enumerate(ids) if item in classes]
    return [arrays["vectors"][-1][rows] for _, arrays in sorted(runs.items())], np.array(
        [classes[ids[row]] for row in rows]
    )


def _table(
    runs: Runs,
    classes: Mapping[int, str],
    dim: int,
    behind: Sequence[dict[str, Any]],
    *,
    is_published: bool,
    name: str = "task1",
    of: str = "runs",
) -> tuple[Section, dict[str, Judged]]:
    vectors, labels = _vectors(runs, classes)
    task = LabelTask(labels)
    turned = aligned(vectors) if len(vectors) > 1 else vectors
    rows = representations(vectors, dim) | representations(turned, dim, ", aligned")
    rows[f"exp<h_{dim}, h>"] = (vectors[:EXPONENTIAL_RUNS], exponential)
    judged = {row: task.judge(of_runs, features) for row, (of_runs, features) in rows.items()}
    lines = []
    for row, one in judged.items():
        paper = published.RFF_TASK_1.get(row, ("", "")) if is_published else ("", "")
        lines.append((row, percent(one.accuracy), paper[0], percent(one.f1), paper[1], percent(one.frozen)))
    return Section(
        name,
        f"Task 1: the class of an item from its vector, dimension {dim}, {len(vectors)} {of}",
        ("features", "accuracy (sd)", "published", "macro F1 (sd)", "published", "fitted on run 0 alone (sd)"),
        tuple(lines),
        (
            f"{len(labels)} items, {task.num_held_out} of them held out; the most frequent class is right on "
            f"{100 * task.majority:.2f} %. In per cent, mean and standard deviation over runs.",
            "exp<h, h>: the exponential vector of section 4.3, as many numbers as there are items; of "
            f"{EXPONENTIAL_RUNS} runs at most.",
            "The last column is no part of the paper's table: a consumer that was fitted on the first run and reads "
            "the vectors of the others, as a downstream model does between its own retrains.",
            facts(behind),
        ),
    ), judged  # fmt: skip


def _growth(runs: Runs, behind: Sequence[dict[str, Any]]) -> tuple[list[Section], dict[str, float]]:
    """Return figure 1c and 1d, variance over runs as training goes on, and the shares at the end.

    There are no figures ([]) for a single run.
    """
    if len(runs) < 2:
        return [], {}
    by_seed = [one for _, one in sorted(runs.items())]
    # A run that was stopped and gone on with has a checkpoint more.
    steps = sorted(set.intersection(*(set(one["steps"].tolist()) for one in by_seed)))
    per_epoch = behind[0]["measured"]["steps_per_epoch"]
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
        for name, value in figures.items():
            curves.setdefault(name, []).append((epoch, value))
        lines.append((f"{epoch:.3g}", *(f"{value:.4f}" for value in figures.values())))
    shares = {name: curve[-1][1] for name, curve in curves.items()}
    raw_name = "variance of a coordinate of h"
    panels = (
        Panel("raw vectors", "epoch", raw_name, {"h": curves.pop(raw_name)}),
        Panel("directions", "epoch", "variance over runs / mean square", curves),
    )
    return [
        Section(
            "growth",
            "Variance over runs, as training goes on (figures 1c, 1d)",
            ("epoch", *shares),
            tuple(lines),
            (
                "All but the first figure are of unit vectors, as a share of the mean square: 1 is what every run "
                "draws anew, 0 what is the same in each.",
            ),
            panels,
        )
    ], shares


def _sensitivity(
    by_dim: Mapping[int, tuple[Runs, list[dict[str, Any]]]], classes: Mapping[int, str], *, name: str = "sensitivity",
    of: str = "runs",
) -> Section:  # fmt: skip
    """Return figures A.3 and A.4."""
    lines, behind = [], []
    curves: dict[str, list[tuple[float, float]]] = {}
    for dim, (runs, records) in sorted(by_dim.items()):
        vectors, labels = _vectors(runs, classes)
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


def _claims(
    judged: Mapping[str, Judged], shares: Mapping[str, float], dim: int, *, is_published: bool
) -> list[Verdict]:
    if not shares:
        return []
    plain, turned = judged[f"h_{dim}"], judged[f"h_{dim}, aligned"]
    share, plain_share = (statistics.fmean(one.frozen) / statistics.fmean(one.accuracy) for one in (turned, plain))
    claims = [
        verdict(
            "directions are drawn anew by every run, their products are not: products vary less than half as much",
            shares[PRODUCTS] < 0.5 * shares["h"],
            f"{shares[PRODUCTS]:.3f} of their mean square, coordinates {shares['h']:.3f}",
        ),
        frozen_claim(
            "a consumer fitted on one run keeps nine tenths of its accuracy on aligned vectors of the others, and "
            "not on vectors as they are",
            share,
            plain_share,
        ),
    ]
    if is_published:
        text = f"published: phi_{dim} has a tenth of the standard deviation of h_{dim}"
        claims.append(deviation_claim(text, judged[f"phi_{dim}"].accuracy, plain.accuracy))
        gain = statistics.fmean(judged[f"phi_{2 * dim}"].accuracy) - statistics.fmean(plain.accuracy)
        text = f"published: phi_{2 * dim} is far above h_{dim} (+20.95)"
        claims.append(verdict(text, gain >= 0.1, f"{100 * gain:+.2f} per cent"))
    return claims


_TITLE = "Random Fourier features of item vectors, before a downstream task"
_SOURCE = (
    "Xu et al., Some Practical Concerns and Solutions for Using Pretrained Representation, table 1, figures 1, A.3, A.4"
)
_PROTOCOL = f"""\
item2vec (window 3, 3 negatives, Adam of rate .002, {EPOCHS} epochs of batches of 4096) on each user's movies in order,
in runs that differ in their seed alone. Class of a movie: the first of its genres, 18 in all; a multinomial logistic
regression with scikit-learn's penalty on standardised features, four fifths of the movies to fit, one to judge.
Features: unit vectors, or phi of them with Gaussian frequencies of variance 1, drawn once. The paper does not say which
of a movie's genres counts (half of the movies have several), trains at rate .001 with weight decay 1e-4 until the loss
stops falling, and does not say its batch size. In place of its A/B test: days in a row, vectors of dimension
{MAIN_DIM} on all timed rows before each ({DAY_EPOCHS} epochs, with another seed each day), and four consumers of them
which are asked about the rows of that day."""
