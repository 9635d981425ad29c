"""What a warm start may change of its optimizer, by what the parent's idle rows depend on, and of its features."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from trainer.checkpoint.record import Position, TrainingRecord
from trainer.checkpoint.warm_start import check_features, inherited_alpha
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job
from trainer.spec.optimizer import Optimizer

WITH_ALPHA = {"kind": "adam_ar", "alpha": 1e-3}
RARE = [{"buckets": [1], "kind": "adamw", "weight_decay": 0.1}]
DECAYING = {"kind": "adamw", "moments": "lazy", "weight_decay": 0.1}


def job(optimizer: dict) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn"}, "optimizer": optimizer}
    )


def record_of(stored: JobSpec, dataset: DatasetSpec | None = None) -> TrainingRecord:
    return TrainingRecord(
        job=stored.model_dump(mode="json"),
        run_id="parent",
        optimizer=stored.optimizer.kind,
        alpha=None,
        batch_size=stored.batch_size,
        position=Position(),
        history=[],
        dataset=None if dataset is None else json.dumps(dataset.model_dump(mode="json")),
    )


def alpha_of(trained: dict, asked: dict, older: dict[str, str] | None = None) -> float | None:
    """``older``: names that the parent's record has for the settings."""
    stored = job(trained)
    document = stored.model_dump(mode="json")
    document["optimizer"] = {(older or {}).get(name, name): value for name, value in document["optimizer"].items()}
    record = replace(record_of(stored), job=document, alpha=trained.get("alpha"))
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


USER, ITEM, TAGS = {"user": {"type": "id"}}, {"item": {"type": "id"}}, {"tags": {"type": "id_list"}}
TITLE = {"title": {"type": "text", "ngrams": {"buckets": 300}}}


def check(learned: dict, asked: dict, model: str = "dnn") -> None:
    first, then = (
        parse_dataset({"name": "rows", "uri": "rows.parquet", "features": features, "label": {"column": "click"}})
        for features in (learned, asked)
    )
    asking = parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": model}})
    check_features(asking, then, record_of(asking, first))


@pytest.mark.parametrize(
    ("learned", "asked", "message"),
    [
        (USER | ITEM, ITEM | USER, "the parent read user, item, in this order, the dataset has item, user: use"),
        (
            USER | ITEM,
            USER | ITEM | {"last": {"type": "id", "shares": "item"}},
            r"has user, item, last \(table item\): ",
        ),
        (TAGS | ITEM, {"tags": {"type": "id_list", "pooling": "sum"}} | ITEM, r"tags \(mean\).* tags \(sum\)"),
        (TAGS | ITEM, {"tags": {"type": "id_list", "weights": "w"}} | ITEM, r"tags \(mean, weighted\)"),
        (TITLE | ITEM, {"title": {"type": "text", "ngrams": {"buckets": 100}}} | ITEM, "buckets=300 .* buckets=100 "),
    ],
)
def test_features_are_the_parents_in_their_order(learned: dict, asked: dict, message: str) -> None:
    """A tower knows a feature by its place, rows of texts know their buckets: others would be read without an error."""
    check(learned, learned)
    with pytest.raises(ValueError, match=rf"^features: .*{message}"):
        check(learned, asked)


def test_features_that_the_model_does_not_read_may_change() -> None:
    check(USER | ITEM, ITEM | USER, "bpr")
    check(USER | ITEM | TAGS, TITLE | USER | ITEM, "bpr")


def test_a_column_may_change_its_name() -> None:
    check(USER | ITEM, USER | {"item": {"type": "id", "column": "product"}})
