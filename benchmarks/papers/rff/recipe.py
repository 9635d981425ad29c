"""``rff``: item vectors of repeated runs, raw and as random Fourier features, as inputs of two tasks.

The tasks are a classification of genres and a model of the item that a user takes next. Four consumers on held-out days
replace the paper's A/B test. texts.py has the experiments on texts. Xu et al., Some Practical Concerns and Solutions
for Using Pretrained Representation, table 1, ML-1m; figures 1, A.3, A.4 and A.5.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.papers.data import documents
from benchmarks.papers.data.quick_data import TASTE_CLASSES, write_tastes
from benchmarks.papers.data.quick_texts import write_quick_movies, write_quick_reviews
from benchmarks.papers.rff import ab_test, theory
from benchmarks.papers.rff import texts as text_tables
from benchmarks.papers.rff.figures import HELD_OUT_SHARE, Judged, deviation_claim, frozen_claim
from benchmarks.papers.rff.held_out_days import Log, day_name, day_number, read_log, write_rows_before
from benchmarks.papers.rff.next_item_task import MAX_EPOCHS, histories
from benchmarks.papers.rff.sections import PRODUCTS, Runs, class_table, growth, sensitivity, vectors_and_classes
from benchmarks.papers.rff.task_2 import claims_of, section_of
from benchmarks.papers.trials.run_trial import KEPT, kept_path
from benchmarks.papers.trials.trial import AnyTrial, Recipe, Trial
from embeddings.vectors.item_vectors import Array
from trainer.report_pages.section import Findings, Section, Verdict, verdict

DIMS = (16, 32, 64)
MAIN_DIM = 32
QUICK_DIM = 8
QUICK_CONSUMER_EPOCHS = 5
STEPS_PER_EPOCH = 242
"""988,129 training rows / 4096: a checkpoint after each epoch."""
EPOCHS = 8
FULL: dict[str, Any] = {"batch_size": 4096, "epochs": EPOCHS, "every_steps": STEPS_PER_EPOCH, "rate": 0.002}
QUICK: dict[str, Any] = {"batch_size": 256, "epochs": 4, "every_steps": 43, "rate": 0.01}
REPEATED, AB_TEST = "item2vec", "ab_test"
"""Tables of trials: runs that differ only in their seed, and one run for each held-out day."""
FIRST_DAY, QUICK_FIRST_DAY = "2000-11-24", "1970-01-07"
MAX_DAYS, QUICK_MAX_DAYS = 10, 2
DAY_EPOCHS = 6
"""Epochs of item2vec for each held-out day."""


def recipe(data: Path, seeds: int = 10, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return ``seeds`` independent runs of item2vec for each dimension, and the same number of held-out days.

    ``quick``: one dimension, on generated data. ``rows``: the folder for the files with the rows before each day.
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
    texts = text_tables.QUICK if quick else text_tables.FULL
    first = day_number(QUICK_FIRST_DAY if quick else FIRST_DAY)
    days = [day_name(first + seed) for seed in range(min(seeds, QUICK_MAX_DAYS if quick else MAX_DAYS))]
    for seed, day in enumerate(days):
        before = of.model_copy(update={"name": f"before_{day}", "uri": str(rows / f"{log.stem}_before_{day}.parquet")})
        trials.append(_trial(before, dims[0], seed, table=AB_TEST, row=day, **day_settings))

    def prepare() -> None:
        if quick:
            write_tastes(log)
            write_quick_movies(data, TASTE_CLASSES)
            write_quick_reviews(data)
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
        of_texts = text_tables.findings(
            of_recipe, records, out, data, log, texts, is_published=not quick
        )  # fmt: skip
        return Findings((*found.sections, *of_texts.sections), (*found.claims, *of_texts.claims))

    tables, claims = (text_tables.table(texts, is_published=not quick),), () if quick else text_tables.claims(texts)
    of_all: tuple[AnyTrial, ...] = (*trials, *text_tables.trials(data, seeds, texts))
    return Recipe("rff", _TITLE, _SOURCE, _PROTOCOL, of_all, tables, claims, prepare, findings_of)


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
    """Return the findings plus those of held-out days, whose vectors are runs on nearly the same rows."""
    ids = reduce(np.intersect1d, [arrays["ids"] for arrays, _ in of_days.values()])
    runs = {
        day_number(day): {"ids": ids, "vectors": arrays["vectors"][:, _rows_of(ids, arrays["ids"])]}
        for day, (arrays, _) in of_days.items()
    }
    behind = [record for _, record in of_days.values()]
    by_day = sensitivity({dim: (runs, behind)}, classes, name="sensitivity_days", of="days")
    vectors = {number: arrays["vectors"][-1] for number, arrays in runs.items()}
    section, claims = ab_test.findings(log, ids, vectors, dim, behind, memory, is_published=is_published)
    refreshes, _ = class_table(
        runs, classes, dim, behind, is_published=is_published, name="task1_days", of="days, of the rows before each"
    )
    return Findings((*found.sections, section, refreshes, by_day), (*found.claims, *claims))


def _rows_of(ids: Array, known: Array) -> Array:
    """Return the row of each of ``ids`` in ``known``."""
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
    """Return the sections and claims of the ended runs; ``by_dim``: (kept arrays, records) by dimension."""
    sections, claims = [], []
    if main_dim in by_dim:
        runs, behind = by_dim[main_dim]
        section, judged = class_table(runs, classes, main_dim, behind, is_published=is_published)
        sections.append(section)
        of_growth, shares = growth(runs, behind)
        sections += of_growth
        vectors, labels = vectors_and_classes(runs, classes)
        held_out = np.random.Generator(np.random.Philox(0)).random(len(labels)) < HELD_OUT_SHARE
        num_draws = theory.NUM_DRAWS if is_published else theory.QUICK_DRAWS
        sections += [
            theory.lemma_1(vectors, labels, held_out),
            theory.proposition_4(vectors, labels, num_draws),
        ]
        claims += _claims(judged, shares, main_dim, is_published=is_published)
    if by_dim:
        sections.append(sensitivity(by_dim, classes))
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
    section, judged = section_of(vectors, of, dim, behind, memory, max_epochs, is_published=is_published)
    return section, claims_of(judged, dim, is_published=is_published)


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
in runs that differ only in their seed. The class of a movie is the first of its genres, 18 in all. It is predicted by a
multinomial logistic regression with scikit-learn's penalty on standardised features, fitted on four fifths of the
movies and evaluated on one. Features: unit vectors, or phi of them with Gaussian frequencies of variance 1, drawn once.
The paper does not say which of a movie's genres counts (half of the movies have several), trains at rate .001 with
weight decay 1e-4 until the loss stops falling, and does not give its batch size. In place of its A/B test: for each of
several days, vectors of dimension {MAIN_DIM} are trained on all rows with a time before it ({DAY_EPOCHS} epochs,
another seed each day), and four consumers of them are evaluated on the rows of that day. Texts: doc2vec (PV-DM, window
3, 3 negatives, SGD, rate .05 falling to .0002) of titles and genres (100 epochs); word2vec (CBOW, rate .2) of all
reviews (3 epochs, the paper has 30) as input of an LSTM of 32 in both directions and a dense layer of 32; Adam of rate
.001 (the paper's is .0001), at most 20 epochs, the first 200 words of a review; folds 0 to 6 train, 7 validates, 8 and
9 test."""
