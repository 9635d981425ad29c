"""Defaults of a job that names a kind of model and no loss: what it leaves out comes from the kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.models.registry import MODELS
from trainer.spec.problems import InvalidFieldsError

WITH_DEFAULTS = [kind for kind, spec in MODELS.items() if spec.job_defaults]


def job_of(kind: str, model: dict[str, Any] | None = None, **changes: Any) -> Any:
    document = {"name": "j", "dataset": {"name": "log"}, "model": {"kind": kind, **(model or {})}}
    return parse_job(document | changes)


@pytest.mark.parametrize("kind", WITH_DEFAULTS)
def test_a_job_of_a_kind_alone_is_the_job_that_says_it_all(kind: str) -> None:
    job, defaults = job_of(kind), MODELS[kind].job_defaults
    said = {"name": "j", "dataset": {"name": "log"}, **defaults, "model": {"kind": kind, **defaults["model"]}}
    assert job == parse_job(said)
    assert job.epochs > 1
    assert job.early_stopping is not None
    assert job.model.loss == defaults["model"]["loss"]


@pytest.mark.parametrize("kind", WITH_DEFAULTS)
def test_a_job_that_was_written_again_is_the_same(kind: str) -> None:
    plain = {"loss": MODELS[kind].losses[0]}
    for job in (job_of(kind), job_of(kind, plain), job_of(kind, {"temperature": 1.0, "normalize": False})):
        assert parse_job(job.model_dump(mode="json")) == job


@pytest.mark.parametrize("kind", WITH_DEFAULTS)
def test_a_job_that_names_a_loss_gets_only_optimizers_and_only_of_sequences(kind: str) -> None:
    job, defaults = job_of(kind, {"loss": "bce"}), MODELS[kind].job_defaults
    found = job.optimizer.kind, job.optimizer.learning_rate, job.dense_optimizer.learning_rate
    if job.model.reads_sequences:
        assert found == ("adam", *(defaults[name]["learning_rate"] for name in ("optimizer", "dense_optimizer")))
    else:
        assert found == ("adam_ar", 0.001, 0.001)
    assert (job.epochs, job.regularizers.early_stopping, job.model.normalize) == (1, None, False)
    stored = parse_job({"name": "j", "dataset": {"name": "log"}, "model": {"kind": kind}}, stored=True)
    assert (stored.model, stored.epochs, stored.regularizers) == (job.model, 1, job.regularizers)
    assert stored.optimizer.kind == "adam_ar"


def test_what_a_job_gives_stands() -> None:
    job = job_of(
        "sasrec", {"temperature": 0.2}, epochs=3, optimizer={"kind": "adam_ar"}, regularizers={"dropout": 0.0},
        dense_optimizer={"learning_rate": 0.5}, evaluation={"split": {"kind": "time"}},
    )  # fmt: skip
    assert (job.model.temperature, job.model.normalize, job.epochs) == (0.2, True, 3)
    assert job.optimizer == parse_job({**DNN, "optimizer": {"kind": "adam_ar"}}).optimizer, "no default of adam"
    assert (job.dense_optimizer.kind, job.dense_optimizer.learning_rate) == ("adam", 0.5)
    assert (job.regularizers.dropout, job.regularizers.early_stopping is None) == (0.0, False)
    assert job.evaluation.split.kind == "time"


@pytest.mark.parametrize(("column", "kind"), [(2, "sasrec"), (3, "bpr"), (4, "lightgcn"), (5, "two_tower")])
def test_the_page_of_models_has_them(column: int, kind: str) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/models.md").read_text("utf-8")
    table = page.split("## Defaults of retrieval kinds")[1].split("## Published")[0]
    cells = {row[1].strip(): row[column] for line in table.splitlines() if len(row := line.split("|")) > 3}
    defaults = MODELS[kind].job_defaults or MODELS[kind].defaults_of_pairs
    model = defaults["model"]

    def short(number: float) -> str:
        return f"{number:g}".removeprefix("0")

    assert cells["`embedding_dim`"].strip().startswith(str(model["embedding_dim"]))
    assert ("`hidden: []`" in cells["`embedding_dim`"]) == (model.get("hidden") == ())
    assert cells["`temperature`"].strip().startswith(short(model.get("temperature", 1)))
    assert ("length" in model) == ("`length`" in cells["`temperature`"])
    assert f"{model.get('length', '')}" in cells["`temperature`"]
    assert cells["`init`: hash, std"].strip() == (short(model["init"]["std"]) if "init" in model else "")
    assert model["loss"] in cells["loss"]
    assert cells["Adam, dense moments"].strip().startswith(short(defaults["optimizer"]["learning_rate"]))
    assert f"at most {defaults['epochs']}" in cells["`epochs`"]
    assert f"patience {defaults['regularizers']['early_stopping']['patience']}" in cells["`epochs`"]
    assert cells["`batch_size`, `dropout`"].strip().startswith(f"{defaults['batch_size']:,} ")
    assert short(defaults["regularizers"].get("dropout", 0)) in cells["`batch_size`, `dropout`"]
    if kind == "sasrec":
        hstu = MODELS["hstu"].job_defaults
        assert f"hstu {short(hstu['optimizer']['learning_rate'])}" in cells["Adam, dense moments"]
        assert f"hstu {short(hstu['regularizers']['dropout'])}" in cells["`batch_size`, `dropout`"]


def log_of(**changes: Any) -> Any:
    features, label = {"user": {"type": "id"}, "item": {"type": "id"}}, {"positive": "every_row"}
    return parse_dataset({"name": "log", "uri": "log.parquet", "features": features, "label": label} | changes)


def test_two_towers_of_positive_pairs_take_theirs_from_the_kind() -> None:
    defaults = MODELS["two_tower"].defaults_of_pairs
    job = job_of("two_tower", {"temperature": 0.3}, epochs=7, optimizer={"learning_rate": 0.5}).against(log_of())
    model = {"kind": "two_tower", **defaults["model"], "temperature": 0.3}
    optimizer = {**defaults["optimizer"], "learning_rate": 0.5}
    said = {"name": "j", "dataset": {"name": "log"}, **defaults, "model": model, "epochs": 7, "optimizer": optimizer}
    assert job == parse_job(said)
    assert job.against(log_of()) == parse_job(job.model_dump(mode="json")) == job
    with pytest.raises(InvalidFieldsError, match=r"^sse.label: sampled_softmax has no class labels"):
        job_of("two_tower", sse={"label": {"probability": 0.1}}).against(log_of())


@pytest.mark.parametrize(
    ("model", "job", "dataset"),
    [
        ({"loss": "sampled_softmax"}, {}, {}),
        ({}, {"dataset": {"name": "log", "one_pass": True}, "optimizer": {"kind": "sgd"}}, {}),
        ({}, {}, {"label": {"column": "click"}}),
        ({}, {}, {"features": {"user": {"type": "id"}, "item": {"type": "id"}, "hour": {"type": "id"}}}),
    ],
    ids=["a loss", "one pass", "labels", "another feature"],
)
def test_other_two_towers_get_none(model: dict[str, Any], job: dict[str, Any], dataset: dict[str, Any]) -> None:
    found = job_of("two_tower", model, **job)
    assert found.model.defaults_with(found, log_of(**dataset)) == {}


def test_a_table_of_items_with_biases_is_the_items_own() -> None:
    features = {"user": {"type": "id"}, "last": {"type": "id"}, "item": {"type": "id", "shares": "last"}}
    for normalize in (False, True):
        job = job_of("two_tower", {"loss": "sampled_softmax", "normalize": normalize})
        if normalize:
            with pytest.raises(InvalidFieldsError, match=r"^features.item.shares: .* that of 'last' has none"):
                job.against(log_of(features=features))
        else:
            job.against(log_of(features=features))


DNN = {"name": "j", "dataset": {"name": "log"}, "model": {"kind": "dnn"}}


def test_without_validation_rows_nothing_is_watched() -> None:
    split = {"kind": "time", "validation": 0.0}
    job = job_of("bpr", evaluation={"split": split, "metrics": ["recall_20_full"]}, regularizers={"l2": 0.1})
    assert job.regularizers.early_stopping is None
    assert job_of("bpr", evaluation={"split": {"kind": "time"}}).regularizers.early_stopping is not None


def test_a_job_in_one_pass_gets_none() -> None:
    job = job_of("bpr", dataset={"name": "log", "one_pass": True}, optimizer={"kind": "sgd"})
    assert (job.epochs, job.model.normalize) == (1, False)


@pytest.mark.parametrize("value", [None, 5, "off"])
@pytest.mark.parametrize("part", ["model", "regularizers", "evaluation", "optimizer"])
def test_a_part_that_is_no_mapping_is_named(part: str, value: Any) -> None:
    document = {"name": "j", "dataset": {"name": "log"}, "model": {"kind": "bpr"}}
    document |= {"evaluation": {"split": {"kind": "time", "validation": 0.0}}, part: value}
    with pytest.raises(SpecError, match=part):
        parse_job(document)
