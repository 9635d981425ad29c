"""The small form of the rff recipe's texts: what is run, what of it is kept, and the report."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.papers.__main__ import main
from benchmarks.papers.data.corpus import movies
from benchmarks.papers.rff import recipe, texts
from benchmarks.papers.trials.trial import TextTrial

PARTS = "titles/*,review_rnn/*"


def test_table_a_1_has_every_configuration_and_decay_of_both_rows() -> None:
    trials = texts.trials(Path("nowhere"), 2, texts.FULL)
    cells = {(one.column, one.row, one.tried) for one in trials if one.table == texts.RNN}
    assert len(cells) == len(texts.CONFIGURATIONS) * 2 * len(texts.DECAYS) + 1
    assert ("ws4-ns3", "phi_32", "decay 0.001") in cells
    # Those of one word2vec stand together: a process trains it once.
    word2vecs = [(one.seed, one.settings["word2vec"]) for one in trials if one.table == texts.RNN]
    changes = sum(one != two for one, two in pairwise(word2vecs))
    assert changes == 2 * len(texts.CONFIGURATIONS) - 1


def test_words_of_a_movie_are_those_of_its_title_and_genres(tmp_path: Path) -> None:
    path = tmp_path / "movies.parquet"
    pq.write_table(pa.table({"title": ["Toy Story (1995)", "Alien³"], "genres": ["Children's|Sci-Fi", ""]}), path)
    assert movies(path) == [["toy", "story", "1995", "children's", "sci", "fi"], ["alien³"]]
    with pytest.raises(ValueError, match="away is not there: a row for each movie"):
        movies(tmp_path / "away")


@pytest.mark.slow
def test_the_small_form_reports_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        code = main(["rff", "--quick", "--seeds", "2", "--part", PARTS, "--out", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)
    report = (tmp_path / "report.md").read_text("utf-8")
    assert code == 0, capsys.readouterr().err  # nothing is claimed of so small a form
    for said in (
        "Task 2: the next item of a user, by a two-tower GRU over vectors (doc2vec's, of titles and genres)",
        "as training goes on: doc2vec of movies",
        "as training goes on: the hidden representation of training reviews (figure A.1)",
        "Table A.1: praise or blame of a review by a bidirectional RNN",
    ):
        assert said in report
    assert "Failed" not in report
    trials = [one for one in recipe.recipe(tmp_path / "data", 2, True, rows=tmp_path / "rows").trials
              if isinstance(one, TextTrial)]  # fmt: skip
    shapes = {}
    for trial in trials:
        path = tmp_path / "kept" / f"{trial.key}.npz"
        if path.exists():
            with np.load(path) as file:
                shapes[trial.table, trial.seed] = (file["steps"].tolist(), file["vectors"].shape)
    assert shapes == {
        (table, seed): found
        for seed in (0, 1)
        for table, found in (
            ("titles", ([5, 10], (2, 250, 8))),
            ("review_rnn", ([1, 2, 3], (3, 70, 2))),
        )
    }
