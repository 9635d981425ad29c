"""The alpha and the optimizer of a warm start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embeddings.optim import AdamAR
from trainer.checkpoint.format import CheckpointError
from trainer.checkpoint.record import Position, TrainingRecord
from trainer.checkpoint.warm_start import inherited_alpha, trained_optimizer
from trainer.spec import JobSpec
from trainer.spec.optimizer import Optimizer

WITH_ALPHA = {"kind": "adam_ar", "alpha": 1e-3}


def job(optimizer: dict, batch_size: int = 1024) -> JobSpec:
    document = {"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn"}, "batch_size": batch_size}
    return JobSpec.model_validate(document | {"optimizer": optimizer})


def record_of(stored: JobSpec, alpha: float | None) -> TrainingRecord:
    return TrainingRecord(
        job=stored.model_dump(mode="json"),
        run_id="parent",
        optimizer=stored.optimizer.kind,
        alpha=alpha,
        batch_size=stored.batch_size,
        position=Position(),
        history=[],
    )


@pytest.mark.parametrize(
    ("asked", "batch_size", "alpha"),
    [
        (WITH_ALPHA, 1024, 1e-3),
        (WITH_ALPHA | {"alpha": "default"}, 1024, 1e-3),
        (WITH_ALPHA | {"alpha": "default", "learning_rate": 0.5}, 1024, 1e-3),
        # Another one, or steps of another size: the job's own.
        (WITH_ALPHA | {"alpha": 1e-4}, 1024, None),
        (WITH_ALPHA | {"alpha": "default"}, 512, None),
        ({"kind": "adam"}, 1024, None),
    ],
)
def test_alpha_goes_on_where_steps_and_job_leave_it(asked: dict, batch_size: int, alpha: float | None) -> None:
    assert inherited_alpha(job(asked, batch_size), record_of(job(WITH_ALPHA), 1e-3)) == alpha


def test_settings_of_older_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "old_names", {"momentum": "beta1"})
    record = record_of(job(WITH_ALPHA | {"beta1": 0.7, "decay": "at_read"}), 1e-3)
    optimizer = dict(record.job["optimizer"])
    optimizer |= {"momentum": optimizer.pop("beta1"), "alpha": "a word of another version"}
    found = trained_optimizer(replace(record, job=record.job | {"optimizer": optimizer}))
    assert found == AdamAR(learning_rate=0.001, alpha=1e-3, beta1=0.7)


@pytest.mark.parametrize("alpha", [1e-3, "auto"])
def test_rows_of_an_earlier_version_that_leaves_the_decay_out_decay_at_read(alpha: float | str) -> None:
    record = record_of(job(WITH_ALPHA), 1e-3)
    optimizer = {name: value for name, value in record.job["optimizer"].items() if name != "decay"} | {"alpha": alpha}
    found = trained_optimizer(replace(record, job=record.job | {"optimizer": optimizer}))
    assert found == AdamAR(learning_rate=0.001, alpha=1e-3)


@pytest.mark.parametrize("removed", [{"decay": "at_update"}, {"by_frequency": [{"buckets": [1], "kind": "adam"}]}])
def test_rows_of_removed_settings_are_not_gone_on_with(removed: dict) -> None:
    record = record_of(job(WITH_ALPHA), 1e-3)
    of_before = replace(record, job=record.job | {"optimizer": record.job["optimizer"] | removed})
    with pytest.raises(CheckpointError, match=rf"{next(iter(removed))}: .*removed.*leave init_from out$"):
        trained_optimizer(of_before)
