"""What a warm start may change of its optimizer, by what the parent's idle rows depend on, and of its features."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.checkpoint.record import Position, TrainingRecord
from trainer.checkpoint.warm_start import check_columns, check_features, inherited_alpha
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
    monkeypatch.setattr(Optimizer, "old_names", {"momentum": "beta1"})
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


BRAND = {"uri": "brands.parquet", "on": "item", "column": "brand"}


def columns_checked(
    tmp_path: Path, learned: dict, asked: dict, there: str, *, before: str = "", model: str = "dnn"
) -> list[str]:
    """Check columns; ``there``: those of both files today, ``before``: those of the parent's rows."""
    for file in ("rows", "brands"):
        pq.write_table(pa.table({column: [1] for column in there.split()}), tmp_path / f"{file}.parquet")
    document = {"name": "rows", "uri": str(tmp_path / "rows.parquet"), "label": {"column": "click"}}
    first, then = (parse_dataset(document | {"features": features}) for features in (learned, asked))
    asking = parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": model}})
    profile = {"columns": before.split()} if before else None
    return check_columns(asking, then, record_of(asking, first), profile)


def joined(**changes: str) -> dict:
    return {"brand": {"type": "id", "join": BRAND | changes}}


def by(column: str) -> dict:
    derive = {"previous": "item", "by": column, "order": "ts", "length": 2}
    return {"h": {"type": "id_list", "derive": derive}}


@pytest.mark.parametrize(
    ("features", "part"),
    [
        (lambda column: {"brand": {"type": "id", "column": column}}, "column"),
        (lambda column: USER | {"price": {"type": "dense", "column": column}}, "column"),
        (lambda column: USER | {"v": {"type": "vector", "dim": 2, "column": column}}, "column"),
        (lambda column: {"tags": {"type": "id_list", "weights": column}}, "weights"),
        (lambda column: joined(column=column), "join"),
        (lambda column: joined(on=column), "join.on"),
        (by, "derive.by"),
    ],
)
def test_a_feature_that_reads_another_column_is_refused_and_a_renamed_one_told(tmp_path, features, part) -> None:
    learned, asked = features("brand"), features("category")
    assert columns_checked(tmp_path, learned, learned, "brand category") == []
    message = rf"the parent read column 'brand' \({part}\), the dataset reads 'category': .* a renamed column is taken"
    with pytest.raises(ValueError, match=message):
        columns_checked(tmp_path, learned, asked, "brand category")
    (note,) = columns_checked(tmp_path, learned, asked, "category", before="brand item")
    assert "reads column 'category', which takes the place of the parent's 'brand'" in note


def test_a_column_that_the_parents_rows_had_already_is_no_renamed_one(tmp_path) -> None:
    asked = {"brand": {"type": "id", "column": "category"}}
    with pytest.raises(ValueError, match=r"the parent's rows had no 'category'"):
        columns_checked(tmp_path, {"brand": {"type": "id"}}, asked, "category", before="brand category")


def test_another_file_of_a_join_is_told_and_the_next_days_is_not(tmp_path) -> None:
    (note,) = columns_checked(tmp_path, joined(), joined(uri="categories.parquet"), "brand")
    assert "categories.parquet, the parent's from " in note
    days = [joined(uri=f"brands-2026-01-{day}.parquet") for day in ("01", "02")]
    assert columns_checked(tmp_path, *days, "brand") == []


def test_columns_of_the_item_table_are_compared(tmp_path) -> None:
    document = {"name": "rows", "uri": str(tmp_path / "rows.parquet"), "label": {"column": "click"}}
    document["features"] = USER | ITEM
    pq.write_table(pa.table({"brand": [1], "category": [1]}), tmp_path / "brands.parquet")
    asking = parse_job({"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "two_tower"}})
    before, now = (
        parse_dataset(
            document | {"items": {"uri": "brands.parquet", "features": {"brand": {"type": "id", "column": column}}}}
        )
        for column in ("brand", "category")
    )
    assert check_columns(asking, before, record_of(asking, before), None) == []
    with pytest.raises(ValueError, match=r"^features\.brand: .* 'brand' \(join\), the dataset reads 'category'"):
        check_columns(asking, now, record_of(asking, before), None)


def test_columns_that_the_model_does_not_read_may_be_others(tmp_path) -> None:
    first, then = (USER | ITEM | {"brand": {"type": "id", "column": one}} for one in ("brand", "category"))
    assert columns_checked(tmp_path, first, then, "brand category", model="bpr") == []
