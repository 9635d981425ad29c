"""Jobs whose outputs cannot be calibrated are refused by name, with the remedy."""

from __future__ import annotations

import pytest

from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.evaluation import is_lower_better
from trainer.spec.problems import InvalidFieldsError


def job_of(**changes):
    fields = {"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn"}, "output_calibration": "platt"}
    return parse_job(fields | changes)


def test_a_job_that_asks_for_none_dumps_as_before():
    assert "output_calibration" not in job_of(output_calibration="none").model_dump(mode="json")
    assert job_of().model_dump(mode="json")["output_calibration"] == "platt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_calibration": "beta"}, "output_calibration: Input should be 'none', 'platt' or 'isotonic'"),
        (
            {"model": {"kind": "dnn", "loss": "poisson"}},
            "output_calibration: dnn trained by poisson gives no probabilities: use model.loss bce, or leave it out",
        ),
        ({"model": {"kind": "mf", "loss": "mse"}}, "output_calibration: mf trained by mse gives no probabilities"),
        (
            {"model": {"kind": "sasrec", "loss": "bce"}},
            "output_calibration: sasrec ranks items and gives no probabilities",
        ),
        (
            {"evaluation": {"split": {"validation": 0.0}}},
            "output_calibration: platt is fitted on validation rows, and there is no validation split: set "
            "evaluation.split.validation, or leave it out",
        ),
        ({"dataset": {"name": "rows", "one_pass": True}}, "output_calibration: outputs of jobs with dataset.one_pass"),
    ],
)
def test_refused_whatever_the_dataset(changes, message):
    with pytest.raises(SpecError) as error:
        job_of(**changes)
    assert message in str(error.value)


def test_of_several_labels_one_has_to_give_probabilities():
    counts = {"visits": {"value": "visits", "loss": "poisson"}, "price": {"value": "price"}}
    fields = {"name": "rows", "uri": "rows.parquet", "features": {"user": {}, "item": {}}}
    job = job_of(model={"kind": "mmoe"})
    with pytest.raises(
        InvalidFieldsError, match=r"none of the labels visits \(poisson\), price \(mse\) gives probabilities"
    ):
        job.against(parse_dataset(fields | {"labels": counts}))
    job.against(parse_dataset(fields | {"labels": {**counts, "click": {"column": "click"}}}))


@pytest.mark.parametrize(
    ("figure", "lower"), [("logloss_calibrated/click", True), ("ece_calibrated", True), ("auc", False)]
)
def test_less_of_a_calibrated_loss_is_better(figure, lower):
    assert is_lower_better(figure) is lower
