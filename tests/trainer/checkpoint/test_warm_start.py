"""Which settings of its optimizer a warm start may change, by what the parent's idle rows depend on."""

from __future__ import annotations

import pytest

from trainer.checkpoint.record import Position, TrainingRecord
from trainer.checkpoint.warm_start import inherited_alpha
from trainer.spec import JobSpec
from trainer.spec.optimizer import Optimizer

WITH_ALPHA = {"kind": "adam_ar", "alpha": 1e-3}
RARE = [{"buckets": [1], "kind": "adamw", "weight_decay": 0.1}]
DECAYING = {"kind": "adamw", "moments": "lazy", "weight_decay": 0.1}


def job(optimizer: dict) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn"}, "optimizer": optimizer}
    )


def alpha_of(trained: dict, asked: dict, older: dict[str, str] | None = None) -> float | None:
    """``older``: names that the parent's record has for the settings."""
    stored = job(trained)
    document = stored.model_dump(mode="json")
    document["optimizer"] = {(older or {}).get(name, name): value for name, value in document["optimizer"].items()}
    record = TrainingRecord(
        job=document,
        run_id="parent",
        optimizer=stored.optimizer.kind,
        alpha=trained.get("alpha"),
        batch_size=stored.batch_size,
        position=Position(),
        history=[],
    )
    return inherited_alpha(job(asked), record)


@pytest.mark.parametrize(
    ("trained", "change", "field"),
    [
        (WITH_ALPHA, {"learning_rate": 0.1}, "learning_rate"),
        (WITH_ALPHA, {"moments": "lazy"}, "moments"),
        (WITH_ALPHA, {"first_touch": "literal"}, "first_touch"),
        (WITH_ALPHA, {"decay": "at_update"}, "decay"),
        (WITH_ALPHA, {"beta1": 0.0}, "beta1"),
        (WITH_ALPHA, {"schedule": {"kind": "cosine", "decay_steps": 9}}, "schedule"),
        (WITH_ALPHA, {"alpha": 1e-4}, "alpha"),
        (WITH_ALPHA, {"by_frequency": RARE}, "by_frequency"),
        (WITH_ALPHA | {"by_frequency": RARE}, {"by_frequency": []}, "by_frequency"),
        (WITH_ALPHA | {"by_frequency": RARE}, {"learning_rate": 0.1}, "learning_rate"),
        (DECAYING, {"weight_decay": 0.2}, "weight_decay"),
        (DECAYING, {"learning_rate": 0.1}, "learning_rate"),
        (DECAYING, {"kind": "adam", "weight_decay": 0.0}, "kind"),
    ],
)
def test_a_setting_that_idle_rows_depend_on_is_the_parents(trained: dict, change: dict, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^optimizer\.{field}: .*leave init_from out$"):
        alpha_of(trained, trained | change)


@pytest.mark.parametrize(
    ("trained", "change"),
    [
        (WITH_ALPHA, {}),
        (WITH_ALPHA, {"alpha": "default"}),
        (WITH_ALPHA, {"clip_row_norm": 1.0}),
        (WITH_ALPHA | {"by_frequency": RARE}, {"clip_row_norm": 1.0}),
        (WITH_ALPHA | {"moments": "lazy"}, {"learning_rate": 0.1, "beta1": 0.5}),
        (DECAYING, {"beta2": 0.9}),
    ],
)
def test_another_may_change(trained: dict, change: dict) -> None:
    assert alpha_of(trained, trained | change) == trained.get("alpha")


def test_a_setting_with_a_newer_name_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "renamed", {"momentum": "beta1"})
    assert alpha_of(WITH_ALPHA, WITH_ALPHA, {"beta1": "momentum"}) == WITH_ALPHA["alpha"]
    with pytest.raises(ValueError, match=r"^optimizer\.beta1: "):
        alpha_of(WITH_ALPHA, WITH_ALPHA | {"beta1": 0.0}, {"beta1": "momentum"})
