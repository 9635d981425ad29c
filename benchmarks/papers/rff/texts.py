"""Text experiments of the ``rff`` recipe: task 2 on doc2vec of movies, and an RNN over word2vec of reviews.

Xu et al., appendix F.1 (figure A.1), F.2 (task 2 of table 1) and table A.1, which uses IMDB's reviews.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from benchmarks.papers.pages import published
from benchmarks.papers.rff.next_item_task import MAX_EPOCHS, histories
from benchmarks.papers.rff.sections import Runs, growth
from benchmarks.papers.rff.task_2 import claims_of, section_of
from benchmarks.papers.trials.experiments import MOVIES, REVIEWS
from benchmarks.papers.trials.run_trial import KEPT, kept_path
from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table, TextTrial
from embeddings.vectors.item_vectors import Array
from trainer.report_pages.section import Findings, Section, Verdict

TITLES, RNN = "titles", "review_rnn"
"""Tables of trials: doc2vec of movies, the RNN over word2vec of reviews."""
CONFIGURATIONS = ((3, 3), (3, 4), (4, 3), (4, 4))
"""(window, negatives) of word2vec in table A.1."""
DECAYS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Weight decay of the RNN, chosen by validation accuracy."""
JOINT = "trained jointly"


class Size(NamedTuple):
    """Settings of the full or quick form of the recipe."""

    dim: int
    configurations: tuple[tuple[int, int], ...]
    decays: tuple[float, ...]
    titles: dict[str, Any]
    titles_every: int
    words: dict[str, Any]
    rnn: dict[str, Any]
    max_epochs: int = MAX_EPOCHS
    """Most epochs of task 2."""


FULL = Size(32, CONFIGURATIONS, DECAYS, {"epochs": 100}, 10,
            {"epochs": 3, "min_count": 5, "learning_rate": 0.2}, {})  # fmt: skip
QUICK_TEXTS = {"epochs": 4, "batch_size": 64}
QUICK = Size(8, CONFIGURATIONS[:1], DECAYS[1:2], QUICK_TEXTS | {"epochs": 10, "learning_rate": 0.2}, 5,
             QUICK_TEXTS, {"hidden": 2, "epochs": 3, "num_words": 9, "learning_rate": 0.02}, max_epochs=2)  # fmt: skip


def trials(data: Path, seeds: int, size: Size) -> list[TextTrial]:
    """Return the trainings on texts; those with the same word2vec follow each other, since a process caches it.

    Args:
        data: The folder of ``ml1m_movies.parquet`` and ``movie_reviews.parquet``.
        seeds: Number of runs of each training.
        size: FULL or QUICK.

    Returns:
        The trainings of doc2vec, then those of the RNN.
    """
    found, column = [], f"d{size.dim}"
    doc2vec = {"file": MOVIES, "doc2vec": {"dim": size.dim} | size.titles, "every": size.titles_every}
    found += [TextTrial(TITLES, column, "doc2vec", "doc2vec", data, (MOVIES,), doc2vec, seed) for seed in range(seeds)]
    for window, negatives in size.configurations:
        for seed in range(seeds):
            word2vec = {"dim": size.dim, "window": window, "negatives": negatives} | size.words
            rows = [(row, reads, decay) for decay in size.decays for row, reads in _rows(size.dim).items()]
            if (window, negatives) == size.configurations[0]:
                rows.append((JOINT, "own", 0.0))
            for row, reads, decay in rows:
                asked = {"word2vec": word2vec, "rnn": {"reads": reads, "weight_decay": decay} | size.rnn}
                tried = "" if row == JOINT else f"decay {decay:g}"
                column = _column(window, negatives)
                found.append(TextTrial(RNN, column, row, "review_rnn", data, (REVIEWS,), asked, seed, tried))
    return found


def _rows(dim: int) -> dict[str, str]:
    """Return {row of table A.1: input of the RNN}."""
    return {f"h_{dim}": "h", f"phi_{dim}": "phi"}


def _column(window: int, negatives: int) -> str:
    return f"ws{window}-ns{negatives}"


def table(size: Size, *, is_published: bool) -> Table:
    """Return table A.1."""
    columns = tuple(
        Column(f"#ws={window}, #ns={negatives}", _column(window, negatives), "accuracy")
        for window, negatives in size.configurations
    )
    return Table(
        RNN,
        f"Table A.1: praise or blame of a review by a bidirectional RNN over words, dimension {size.dim}: accuracy",
        columns,
        "best",
        "accuracy",
        published=published.RFF_REVIEWS if is_published else {},
        published_is="IMDB, 25 times as many reviews, read to their end" if is_published else "",
        comparable=False,
    )


def claims(size: Size) -> tuple[Claim, ...]:
    """Return the claims of table A.1 that the mean accuracy decides."""
    h, phi = _rows(size.dim)
    return tuple(
        Claim(f"published, table A.1, #ws={window}, #ns={negatives}: {phi} is above {h}", RNN,
              _column(window, negatives), (phi, "best"), (h, "best"), 0.0)
        for window, negatives in size.configurations
    )  # fmt: skip


def findings(
    recipe: Recipe, records: Mapping[str, dict[str, Any]], out: Path, data: Path, log: Path, size: Size,
    *, is_published: bool,
) -> Findings:  # fmt: skip
    """Return the sections and claims of the trainings on texts that have ended.

    Args:
        recipe: The recipe of the trials.
        records: The records by key of the trial.
        out: The folder of results.
        data: The folder of the texts.
        log: The file of task 2's rows.
        size: FULL or QUICK.
        is_published: True if the tables show the paper's figures too.

    Returns:
        Task 2 of titles, and variance over runs of titles and of the RNN's hidden representation.
    """
    dim = size.dim
    sections: list[Section] = []
    verdicts: list[Verdict] = []
    titles, behind = _runs(recipe, records, out, TITLES, "doc2vec")
    if titles:
        runs = _of_log(titles, data / MOVIES, log)
        vectors = [arrays["vectors"][-1] for arrays in runs.values()]
        of = histories(log, next(iter(runs.values()))["ids"])
        section, judged = section_of(
            vectors, of, dim, behind, out / KEPT, size.max_epochs, is_published=is_published, name="task2_titles",
            vectors="doc2vec's, of titles and genres",
        )  # fmt: skip
        sections += [section, *growth(runs, behind, name="growth_titles", title=_growth("doc2vec of movies"))[0]]
        verdicts += claims_of(judged, dim, is_published=is_published, task="task 2 of titles")
    hidden, behind = _runs(recipe, records, out, RNN, JOINT)
    if hidden:
        title = _growth("the hidden representation of training reviews (figure A.1)")
        sections += growth(hidden, behind, name="growth_hidden", title=title)[0]
    # There are no claims about the small texts.
    return Findings(tuple(sections), tuple(verdicts) if is_published else ())


def _growth(of: str) -> str:
    return f"Variance over runs, as training goes on: {of}"


def _runs(
    recipe: Recipe, records: Mapping[str, dict[str, Any]], out: Path, table: str, row: str
) -> tuple[Runs, Sequence[dict[str, Any]]]:
    """Return the kept arrays of the runs that have ended, by seed, and their records."""
    runs: Runs = {}
    behind = []
    for trial in recipe.trials:
        record = records.get(trial.key, {})
        if (trial.table, trial.row) == (table, row) and record.get("state") == "done":
            with np.load(kept_path(trial, out)) as file:
                runs[trial.seed] = {name: file[name] for name in file.files}
            behind.append(record)
    return dict(sorted(runs.items())), behind


def _of_log(runs: Runs, movies: Path, log: Path) -> Runs:
    """Return the runs with only the movies that a user took, by their ids."""
    items: Array = pq.read_table(movies, columns=["item"])["item"].to_numpy()
    taken = np.isin(items, pq.read_table(log, columns=["item"])["item"].to_numpy())
    return {
        seed: arrays | {"ids": items[taken], "vectors": arrays["vectors"][:, taken]} for seed, arrays in runs.items()
    }
