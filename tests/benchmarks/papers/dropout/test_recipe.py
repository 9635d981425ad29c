"""Recipe ``dropout``: a fifth of the training rows with the same held-out rows; strengths chosen on validation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.papers.data import documents
from benchmarks.papers.dropout import recipe as dropout
from benchmarks.papers.dropout.training_share import write_training_share
from benchmarks.papers.pages.figures import Figures
from benchmarks.papers.trials.trial import Trial
from tests.trainer.conftest import write_rows
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.generalization.label_randomization import at
from trainer.spec import DatasetSpec


def prepared(of: DatasetSpec, folder: Path) -> PreparedData:
    job = documents.job("share", of, model={"kind": "dnn", "embedding_dim": 4}, evaluation=documents.RANDOM)
    return prepare(of, job, folder)


def test_a_share_of_the_training_rows_goes_with_the_same_held_out_rows(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet")
    of, path = documents.dataset("clicks", rows, {"column": "click"}), tmp_path / "fifth.parquet"
    job = documents.job("share", of, model={"kind": "dnn", "embedding_dim": 4}, evaluation=documents.RANDOM)
    write_training_share(of, job.evaluation.split, path, 0.2)
    whole, fifth = prepared(of, tmp_path / "whole"), prepared(at(of, path), tmp_path / "fifth")
    for split in ("validation", "test"):
        assert whole.num_examples[split] > 100
        assert fifth.labels(split).tolist() == whole.labels(split).tolist()
    # Four standard deviations of a share of as many draws.
    share = fifth.num_examples["train"] / whole.num_examples["train"]
    assert share == pytest.approx(0.2, abs=4 * (0.2 * 0.8 / whole.num_examples["train"]) ** 0.5)
    before, after = (Counter(map(tuple, pq.read_table(p).to_pandas().to_numpy().tolist())) for p in (rows, path))
    assert after <= before
    written = path.stat().st_mtime_ns
    write_training_share(of, job.evaluation.split, path, 0.2)
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize("name", ["epinions", "ml1m"])
def test_fifths_differ_from_the_whole_in_their_rows_alone(name: str) -> None:
    trials = {trial.name: trial for trial in dropout.recipe(Path("nowhere"), 1, rows=Path("rows")).jobs}
    for row in dropout.SIZED:
        whole, fifth = (trials[f"{name}/{column}/{row}/seed-0"] for column in ("dnn", dropout.FIFTH))
        assert (whole.dataset.uri, fifth.dataset.uri) == (f"nowhere/{name}.parquet", f"rows/{name}_fifth.parquet")
        assert fifth.job.model_copy(update={"name": whole.job.name}) == whole.job


def test_the_strength_is_chosen_on_validation_never_on_test() -> None:
    recipe = dropout.recipe(Path("nowhere"), 1)
    table = next(one for one in recipe.tables if one.name == dropout.STRENGTHS)
    asked = [trial for trial in recipe.jobs if (trial.table, trial.row) == (dropout.STRENGTHS, "R~")]
    default = dropout.RATE / (1 - dropout.RATE)
    strengths = [trial.job.regularizers.dropout_method.explicit_strength for trial in asked]
    assert strengths == pytest.approx([factor * default for factor in dropout.FACTORS])
    # The best on test is the worst on validation.
    figures = [0.40, 0.30, 0.35, 0.45, 0.50]
    records = {trial.key: record(trial, one, 1.0 - one) for trial, one in zip(asked, figures, strict=True)}
    cells = [Figures(recipe, records).cell(table, column, "R~") for column in table.columns]
    assert [cell and (cell.tried, cell.mean) for cell in cells] == [
        ("lambda_1 times 0.25", (0.30,)), ("lambda_1 times 0.25", (0.70,)),
    ]  # fmt: skip


def test_of_dropout_itself_the_rate_is_tuned() -> None:
    jobs = dropout.recipe(Path("nowhere"), 1).jobs
    asked = [trial for trial in jobs if (trial.table, trial.row) == (dropout.STRENGTHS, dropout.PLAIN)]
    assert [trial.job.regularizers.dropout for trial in asked] == list(dropout.RATES)
    assert all(trial.job.regularizers.dropout_layers == "both" for trial in asked)


def test_l2_is_of_rows_and_of_dense_weights() -> None:
    trial = next(one for one in dropout.recipe(Path("nowhere"), 1).jobs if one.row == dropout.L2)
    assert trial.job.regularizers.l2 == dropout.L2_STRENGTHS[0]
    assert trial.job.dense_optimizer.weight_decay == 2 * dropout.L2_STRENGTHS[0]
    assert trial.job.regularizers.dropout == 0.0


def record(trial: Trial, validation: float, test: float) -> dict[str, object]:
    metrics = [
        {"epoch": 1, "split": "validation", "logloss": validation}, {"epoch": 1, "split": "test", "logloss": test},
    ]  # fmt: skip
    return {"key": trial.key, "state": "done", "metrics": metrics}
