"""Which changes of a spec a run may go on with, from a checkpoint of its own."""

import json
from types import SimpleNamespace

import pytest

from trainer.checkpoint.format import CheckpointError
from trainer.checkpoint.record import Position, TrainingRecord
from trainer.launch.resume_check import check_same_dataset, check_same_job, identity_of
from trainer.spec import parse_dataset, parse_job


def job(**changes):
    document = {
        "name": "small", "dataset": {"name": "clicks"}, "model": {"kind": "dnn"},
        "optimizer": {"kind": "adam", "learning_rate": 0.1}, "batch_size": 32,
    }  # fmt: skip
    return parse_job(document | changes)


def checkpoint(**changes):
    of = job(**changes)
    record = TrainingRecord(
        job=identity_of(of), run_id="small", optimizer="adam", alpha=None, batch_size=of.batch_size,
        position=Position(), history=[],
    )  # fmt: skip
    return SimpleNamespace(path="step-000000000005", extra=record.to_extra())


@pytest.mark.parametrize(
    "changes", [{}, {"name": "other"}, {"epochs": 9}, {"sharding": {"item": "row_wise"}}, {"retries": 5}]
)
def test_what_does_not_change_the_training_may_change(changes):
    check_same_job(checkpoint(), job(**changes))


def test_a_checkpoint_of_something_else_is_told() -> None:
    other = SimpleNamespace(path="step-000000000005", extra={"position": {}})
    with pytest.raises(CheckpointError, match=r"^step-000000000005 has no job: it was not written by a training job$"):
        check_same_job(other, job())


def test_other_changes_are_named():
    with pytest.raises(ValueError, match="by a job with another batch_size, model: resume it with the same spec"):
        check_same_job(checkpoint(), job(batch_size=64, model={"kind": "fm"}))


def test_a_field_that_came_later_has_its_default():
    older = checkpoint()
    del older.extra["job"]["micro_batches"]
    check_same_job(older, job())
    with pytest.raises(ValueError, match="another micro_batches"):
        check_same_job(older, job(micro_batches=2))


ADAM_AR = {"optimizer": {"kind": "adam_ar", "learning_rate": 0.1}}


@pytest.mark.parametrize("alpha", ["default", "auto"])
def test_a_checkpoint_of_before_decays_at_read(alpha):
    """Versions whose default it was could leave it out, and look for alpha; what they found is in the checkpoint."""
    older = checkpoint(**ADAM_AR)
    del older.extra["job"]["optimizer"]["decay"]
    older.extra["job"]["optimizer"]["alpha"] = alpha
    check_same_job(older, job(optimizer=ADAM_AR["optimizer"] | {"decay": "at_read"}))
    with pytest.raises(ValueError, match="by a job with another optimizer"):
        check_same_job(older, job(**ADAM_AR))


DATASET = {
    "name": "clicks", "uri": "clicks.parquet", "features": {"user": {"type": "id"}, "item": {"type": "id"}},
    "label": {"column": "click"},
}  # fmt: skip


def of_dataset(changes):
    found = checkpoint()
    found.extra["dataset"] = json.dumps(parse_dataset(DATASET).model_dump(mode="json"))
    check_same_dataset(found, parse_dataset(DATASET | changes))


@pytest.mark.parametrize("changes", [{}, {"uri": "moved/clicks.parquet"}, {"max_bad_rows": 0.1}])
def test_a_run_goes_on_with_its_dataset_in_another_place(changes):
    of_dataset(changes)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"features": {"item": {"type": "id"}, "user": {"type": "id"}}}, "features"),
        ({"filter": "click < 2", "label": {"rule": "click >= 1"}}, "filter, label"),
    ],
)
def test_a_run_does_not_go_on_with_another_dataset(changes, names):
    """Its rows are prepared: a change would reach predictions and exports alone."""
    with pytest.raises(
        ValueError, match=f"^step-000000000005 was trained on a dataset with another {names}: resume it with"
    ):
        of_dataset(changes)


def test_a_checkpoint_that_does_not_say_its_dataset_may_be_of_any():
    check_same_dataset(checkpoint(), parse_dataset(DATASET))
