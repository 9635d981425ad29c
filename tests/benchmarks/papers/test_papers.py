"""What recipes ask for: trials are ordinary specs, named once, and every cell and claim has trials behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers.__main__ import RECIPES, main
from benchmarks.papers.trials.trial import Recipe
from trainer.spec import parse_dataset, parse_job

DATA = Path("nowhere")
ALPHAS = ("0.001", "0.0032", "0.01")
"""Those of the slides' size alone."""


@pytest.fixture(scope="module", params=[(name, quick) for name in RECIPES for quick in (False, True)], ids=str)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    name, quick = request.param
    return RECIPES[name](DATA, 2, quick)


def test_trials_are_named_once_and_hashed_apart(recipe: Recipe) -> None:
    assert len({trial.name for trial in recipe.trials}) == len(recipe.trials)
    assert len({trial.key for trial in recipe.trials}) == len(recipe.trials)
    assert {trial.seed for trial in recipe.trials} == {0, 1}


def test_tables_claims_and_published_figures_have_trials(recipe: Recipe) -> None:
    places = {(trial.table, trial.column, trial.row) for trial in recipe.trials}
    for table in recipe.tables:
        rows = {row for name, _, row in places if name == table.trials_of}
        assert rows
        for column in table.columns:
            assert any(place[:2] == (table.trials_of, column.column) for place in places), (table.name, column)
        for row, label in table.published:
            assert row in rows
            assert label in {column.label for column in table.columns}
    for claim in recipe.claims:
        assert sum(claim.decided_by(trial) for trial in recipe.trials) >= 2
        for row, _ in (claim.left, claim.right):
            assert (claim.table.partition(":")[0], claim.column, row) in places


def test_metrics_that_tables_show_are_measured(recipe: Recipe) -> None:
    for table in recipe.tables:
        for column in table.columns:
            for trial in recipe.jobs:  # what measures texts says what it measures by itself
                if (trial.table, trial.column) != (table.trials_of, column.column):
                    continue
                if column.metric.startswith("bucket_"):
                    assert "frequency_buckets" in trial.job.evaluation.metrics
                elif column.metric not in ("rmse", "loss"):  # which jobs have by themselves
                    assert column.metric in trial.job.evaluation.metrics


def test_trials_are_what_users_could_ask_for(recipe: Recipe) -> None:
    for trial in recipe.jobs:
        dataset, job = (spec.model_dump(mode="json", exclude_unset=True) for spec in (trial.dataset, trial.job))
        assert parse_dataset(dataset) == trial.dataset
        assert parse_job(job).against(trial.dataset) == trial.job


def test_a_list_names_trials_and_what_they_decide(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "adamar",
                "--list",
                "--part",
                "amazon_sports_adam/dnn/Adam,amazon_sports_adam/dnn/AdamAR/alpha 0.0001/seed-1",
            ]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    trials = [line for line in lines if not line.startswith("claim ")]
    assert trials == [
        "amazon_sports_adam/dnn/Adam/seed-0  (claim 1)",
        "amazon_sports_adam/dnn/Adam/seed-1  (claim 1)",
        "amazon_sports_adam/dnn/AdamAR/alpha 0.0001/seed-1  (claim 1, 2)",
        "amazon_sports_adam/dnn/Adam/seed-2  (claim 1)",
    ]
    assert "claim 1: DNN: AdamAR's epoch 4 is above Adam's best epoch by 0.012" in lines


def test_the_slides_size_differs_in_dimension_and_batch_alone() -> None:
    trials = {trial.name: trial for trial in RECIPES["adamar"](DATA, 1, False).jobs}
    large = [name for name in trials if name.startswith("amazon_sports_d32_")]
    more_decay = {
        f"amazon_sports_d32_{cell}/seed-0"
        for model in ("dnn", "wide_deep", "xdeepfm", "wukong")
        for cell in (
            f"adam/{model}/AdamW/decay 10",
            f"adagrad/{model}/AdagradW/decay 1",
            *(f"{one}/{model}/{one.capitalize()}AR/alpha {alpha}" for one in ("adam", "adagrad") for alpha in ALPHAS),
        )
    }
    assert len(large) == 88  # both families
    assert more_decay < set(large)
    for name in set(large) - more_decay:
        other = trials[name.replace("_d32", "")]
        assert trials[name].dataset == other.dataset
        job = trials[name].job.model_dump() | {"name": other.job.name, "batch_size": 512}
        assert trials[name].job.batch_size == 2048
        assert job["model"].pop("embedding_dim") == 32
        expected = other.job.model_dump()
        assert expected["model"].pop("embedding_dim") == 16
        assert job == expected


def test_towers_have_the_regularizers_and_batch_sizes_that_they_name() -> None:
    jobs = {trial.name: trial.job for trial in RECIPES["towers"](DATA, 1, False).jobs}
    for share in ("0%", "100%"):
        assert jobs[f"corrupted/dnn/{share}/seed-0"].regularizers.model_fields_set == set()
        assert jobs[f"corrupted/dnn/{share}, dropout .5/seed-0"].regularizers.dropout == 0.5
        assert jobs[f"corrupted/dnn/{share}, l2 1e-4/seed-0"].regularizers.l2 == 1e-4
    sizes = [jobs[f"batches/dnn/batch {size}/seed-0"].batch_size for size in (64, 512, 4096)]
    assert sizes == [64, 512, 4096]


def test_a_part_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adamar", "--list", "--part", "amazon_sports/dnn"]) == 1
    assert "has no such trial" in capsys.readouterr().err


def test_a_part_may_name_rows_with_commas() -> None:
    recipe = RECIPES["sse"](DATA, 1, False)
    both = recipe.part("douban/mf/MF, no biases,ml1m/mf/MF")
    assert [trial.name for trial in both] == ["ml1m/mf/MF/seed-0", "douban/mf/MF, no biases/seed-0"]


def test_keys_follow_specs_and_rows_but_not_where_the_rows_are(tmp_path: Path) -> None:
    for folder, size in (("a", 10), ("b", 10), ("c", 11)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "douban.parquet").write_bytes(b"x" * size)

    def key(folder: str, row: str = "MF") -> str:
        trials = RECIPES["sse"](tmp_path / folder, 1, False).trials
        return next(trial.key for trial in trials if (trial.table, trial.row) == ("douban", row))

    assert key("a") == key("b")
    assert key("a") != key("c")
    assert key("a") != key("a", "Dropout + MF")
