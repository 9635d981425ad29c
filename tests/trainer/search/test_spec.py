"""The space of a search: every value is checked against the job, and what is no hyperparameter is refused."""

from __future__ import annotations

import json

import pytest

from trainer.search.folder import SEARCH_FILE, SearchFolder, TrialResult
from trainer.search.spec import NOT_SEARCHED, check_search, load_search, parse_search
from trainer.spec import JobSpec, SpecError, load_documents, parse_dataset, parse_job
from trainer.spec.problems import InvalidFieldsError

RATE = {"optimizer.learning_rate": {"loguniform": [1e-4, 1e-2]}}
DATASET = parse_dataset(
    {"name": "rows", "uri": "rows.parquet", "features": {"user": {}, "item": {}}, "label": {"column": "click"}}
)


def job_of(**changes):
    return parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn"}, "epochs": 3} | changes)


def test_what_is_not_searched_is_a_field_of_a_job():
    assert NOT_SEARCHED.keys() <= JobSpec.model_fields.keys()


def test_kinds_with_and_without_a_decay_are_searched_together():
    """What a job leaves out is of its kind."""
    search = parse_search({"space": {"optimizer.kind": {"choice": ["adam", "adam_ar"]}}})
    for kind in ("adam", "adam_ar"):
        check_search(search, job_of(optimizer={"kind": kind}), DATASET)


def test_a_folder_of_a_version_with_another_default_is_not_gone_on_with(tmp_path):
    search = parse_search({"space": RATE})
    for kind in ("adam", "adam_ar"):
        job = job_of(optimizer={"kind": kind})
        SearchFolder.begin(tmp_path / kind, search, job, DATASET)
        SearchFolder.begin(tmp_path / kind, search, job, DATASET)
        file = tmp_path / kind / SEARCH_FILE
        document = json.loads(file.read_text())
        del document["decay"]
        file.write_text(json.dumps(document))
    SearchFolder.begin(tmp_path / "adam", search, job_of(optimizer={"kind": "adam"}), DATASET)
    with pytest.raises(SpecError, match="holds a search with another decay: name another folder"):
        SearchFolder.begin(tmp_path / "adam_ar", search, job, DATASET)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "search: space: Field required"),
        ({"space": {}}, "search: space: Dictionary should have at least 1 item"),
        ({"space": RATE, "trials": 3}, "search: trials: no such field: check the spelling"),
        ({"space": {"seed": {}}}, "space.seed: give one of choice: "),
        ({"space": {"seed": {"choice": [1], "uniform": [0, 1]}}}, "space.seed: give one of choice: "),
        ({"space": {"seed": {"choice": []}}}, "space.seed.choice: Tuple should have at least 1 item"),
        ({"space": {"a.b": {"uniform": [1, 0]}}}, "space.a.b: 1 is not below 0: give the lower end first"),
        (
            {"space": {"a.b": {"loguniform": [0, 1]}}},
            "space.a.b: loguniform needs numbers above 0: raise the lower end",
        ),
        ({"space": RATE, "scheduler": "pbt"}, "scheduler: Input should be 'asha' or 'none'"),
    ],
)
def test_a_search_that_says_nothing_is_refused(document, message):
    with pytest.raises(SpecError) as error:
        parse_search(document)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"optimizer.rate": {"choice": [1]}}, "space.optimizer.rate: with 1: optimizer.rate: no such field: check the"),
        ({"optimiser.rate": {"choice": [1]}}, "space.optimiser.rate: with 1: optimiser: no such field"),
        (
            {"batch_size": {"uniform": [10.5, 20.5]}},
            "space.batch_size: with 10.5: batch_size: Input should be a valid int",
        ),
        (
            {"batch_size": {"uniform": [128, 512]}},
            "space.batch_size: with 274.675: batch_size: Input should be a valid integer",
        ),
        ({"model.embedding_dim": {"choice": [8, 0]}}, "space.model.embedding_dim: with 0: model.embedding_dim: Input"),
        ({"seed.of": {"choice": [1]}}, "space.seed.of: with 1: seed.of: 'seed' is not a part with fields"),
        ({"optimizer.kind": {"choice": ["sgd", "lion"]}}, "space.optimizer.kind: with lion: optimizer.kind: "),
        (
            {"epochs": {"choice": [1, 2]}},
            "space.epochs: it is no hyperparameter: the scheduler compares trials epoch by",
        ),
        (
            {"evaluation.split.validation": {"choice": [0.5]}},
            "validation: it is no hyperparameter: trials compare on the",
        ),
        ({"sse.gender.probability": {"uniform": [0, 0.1]}}, "sse.gender: no such feature (there are item, user)"),
    ],
)
def test_every_value_is_checked_against_the_job(space, message):
    with pytest.raises(InvalidFieldsError) as error:
        check_search(parse_search({"space": space}), job_of(seed=1), DATASET)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("search", "changes", "message"),
    [
        (
            {},
            {"evaluation": {"split": {"validation": 0.0}}},
            "metric: trials compare on validation rows after each epoch",
        ),
        ({"metric": "ece"}, {}, "metric: the job does not measure ece: use one of auc, logloss, or name it in"),
        (
            {},
            {"evaluation": {"metrics": ["calibration"]}},
            "metric: the job's only metrics are tables, not numbers: name a number in",
        ),
        ({}, {"init_from": {"job": "abc"}}, "init_from: trials begin from initial values: leave it out of the job"),
    ],
)
def test_a_job_that_trials_cannot_compare_is_refused(search, changes, message):
    with pytest.raises(InvalidFieldsError) as error:
        check_search(parse_search({"space": RATE} | search), job_of(**changes), DATASET)
    assert message in str(error.value)


def test_trials_of_a_real_valued_label_are_compared_by_its_own_metrics(tmp_path):
    dataset = parse_dataset(
        {"name": "rows", "uri": "rows.parquet", "features": {"user": {}, "item": {}}, "label": {"value": "rating"}}
    )
    job = job_of(model={"kind": "mf", "loss": "mse"})
    for metric, watched in (({}, "rmse"), ({"metric": "mae"}, "mae")):
        search = parse_search({"space": RATE} | metric)
        check_search(search, job, dataset)
        folder = SearchFolder.begin(tmp_path / watched, search, job, dataset)
        assert (folder.metric, folder.mode) == (watched, "min")
    with pytest.raises(InvalidFieldsError, match="does not measure auc: use one of rmse, mae, or name it in"):
        check_search(parse_search({"space": RATE, "metric": "auc"}), job, dataset)


def test_a_search_that_fits_passes(tmp_path):
    (tmp_path / "search.yaml").write_text(
        "space: {model.hidden: {choice: [[8], [16, 8]]}, sse.item.probability: {uniform: [0, 0.1]}}"
    )
    search = load_search(tmp_path / "search.yaml")
    check_search(search, job_of(), DATASET)
    folder = SearchFolder.begin(tmp_path / "s", search, job_of(), DATASET)
    assert (folder.metric, folder.mode) == ("auc", "max")
    job = folder.job_with({"model.hidden": [16, 8], "sse.item.probability": 0.05})
    assert (job.model.hidden, job.sse["item"].probability) == ((16, 8), 0.05)


@pytest.mark.parametrize(("text", "message"), [("space: [", "is not YAML"), ("", "holds 0 documents")])
def test_a_file_without_a_search_is_named(tmp_path, text, message):
    (tmp_path / "search.yaml").write_text(text)
    with pytest.raises(SpecError, match=message):
        load_search(tmp_path / "search.yaml")
    with pytest.raises(SpecError, match="cannot be read"):
        load_search(tmp_path / "none.yaml")


def test_a_folder_keeps_to_its_search(tmp_path):
    search = parse_search({"space": RATE, "metric": "logloss"})
    folder = SearchFolder.begin(tmp_path / "s", search, job_of(), DATASET)
    assert SearchFolder.begin(tmp_path / "s", search, job_of(), DATASET).mode == folder.mode == "min"
    assert SearchFolder.open(tmp_path / "s").search == search
    with pytest.raises(SpecError, match="holds a search with another search and job: name another folder"):
        SearchFolder.begin(tmp_path / "s", parse_search({"space": RATE}), job_of(seed=7), DATASET)


def test_the_best_job_is_the_job_with_the_values(tmp_path):
    publish = {"collection": "items", "feature": "item"}
    job = job_of(model={"kind": "two_tower"}, publish=publish)
    folder = SearchFolder.begin(tmp_path / "s", parse_search({"space": RATE}), job, DATASET)
    assert folder.job_with({}).publish is None
    values = {"optimizer.learning_rate": 0.005}
    dataset, best = load_documents(folder.write_best(TrialResult("t", values, "done", 0.8, 2, 3)))
    assert dataset == DATASET
    assert best.optimizer.learning_rate == 0.005
    assert best.publish == job.publish
