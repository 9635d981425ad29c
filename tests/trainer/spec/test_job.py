"""Specs: what the documents show is accepted, what is wrong is named, what is not built yet is refused."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.spec import JobSpec, SpecError, load_documents, parse_dataset, parse_job, parse_rule
from trainer.spec.job import Table

DATASET: dict[str, Any] = {
    "name": "sports",
    "uri": "sports.parquet",
    "features": {
        "user": {"type": "id"},
        "item": {"type": "id"},
        "attribute": {
            "type": "id",
            "join": {"uri": "attrs.parquet", "on": "item", "column": "attrs", "take": "last"},
        },
        "history": {
            "type": "id_list",
            "derive": {"previous": "item", "by": "user", "order": "pos", "length": 5},
            "shares": "item",
            "pooling": "mean",
        },
    },
    "label": {"negatives": {"per_positive": 1, "of": "item", "distribution": "uniform", "seed": 7}},
    "order": "pos",
    "partition": "date",
}

JOB: dict[str, Any] = {
    "spec_version": 1,
    "name": "sports-dnn",
    "dataset": {"name": "sports", "window": {"start": "{firing_date}", "days": 1}},
    "init_from": {"collection": "items", "version": "current"},
    "model": {"kind": "dnn", "embedding_dim": 16, "hidden": [128, 64], "init": {"kind": "hash", "std": 0.01}},
    "optimizer": {
        "kind": "adam_ar",
        "learning_rate": 0.001,
        "alpha": "default",
        "moments": "dense",
        "decay": "at_read",
        "schedule": {"kind": "constant"},
        "clip_norm": None,
    },
    "dense_optimizer": {"kind": "adam", "learning_rate": 0.001},
    "sse": {"item": {"probability": 0.01}, "label": {"probability": 0.0}},
    "regularizers": {"dropout": 0.0},
    "kernel": "evenkeel",
    "epochs": 4,
    "batch_size": 2048,
    "seed": 1,
    "resources": {"num_workers": 2, "cpus_per_worker": 1, "gpus_per_worker": 0, "timeout_seconds": None},
    "sharding": {"item": "row_wise"},
    "evaluation": {"split": {"kind": "random", "validation": 0.1, "test": 0.1}, "metrics": ["auc", "logloss"]},
    "checkpoint": {"every_steps": 500, "keep_last": 3},
    "retries": 2,
    "labels": {"team": "ads"},
}

TRUST = {"uri": "t.parquet", "source": "a", "target": "b", "of": "user"}

PUBLISH = {
    "collection": "items",
    "feature": "item",
    "align": True,
    "ema": {"new_weight": 0.3, "reset_below_cosine": 0.65},
    "gate": {"mode": "enforce"},
    "views": [{"name": "items_rff", "kind": "rff"}],
}


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return document


def test_the_contract_s_documents_are_accepted_and_come_back_the_same() -> None:
    dataset, job = parse_dataset(DATASET), parse_job(JOB)
    assert parse_dataset(dataset.model_dump(mode="json")) == dataset
    assert parse_job(job.model_dump(mode="json")) == job
    assert job.against(dataset) is job


def test_specs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_job(JOB).epochs = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "adamw"}, "optimizer.weight_decay: without it, adamw is adam"),
        ({"kind": "adagradw"}, "without it, adagradw is adagrad"),
        ({"kind": "adam", "weight_decay": 0.1}, "adam has none: use one of adamw, adagradw"),
        ({"kind": "adagrad", "first_touch": "literal"}, "rows of adagrad do not decay"),
        ({"kind": "sgd", "eps_inside_root": True}, "sgd has no root"),
        ({"kind": "adam", "alpha": 0.5}, "alpha: adam has none: use one of adam_ar, adagrad_ar"),
        ({"kind": "sgd", "moments": "lazy"}, "moments: sgd has none: use one of adam, adamw, adam_ar"),
        ({"kind": "adagrad", "beta2": 0.5}, "beta2: adagrad has none"),
        ({"kind": "sgd", "eps": 0.5}, "eps: sgd has none: use one of adam,"),
        ({"kind": "rowwise_adagrad", "eps_inside_root": True}, "rowwise_adagrad adds eps to the root"),
        ({"kind": "rmsprop", "alpha": 0.5}, "alpha: rmsprop has none: use one of adam_ar, adagrad_ar, rmsprop_ar"),
        ({"kind": "rmsprop_ar", "beta1": 0.5}, "beta1: rmsprop_ar has none: use one of adam, "),
        ({"kind": "rmsprop", "decay": "by_epoch"}, "decay: rmsprop has none"),
        ({"kind": "rmsprop", "first_touch": "literal"}, "rows of rmsprop do not decay"),
        ({"kind": "rowwise_adam", "weight_decay": 0.1}, "rowwise_adam has none: use one of adamw, adagradw"),
        ({"kind": "rowwise_adam", "alpha": 0.5}, "alpha: rowwise_adam has none"),
        ({"kind": "rmsprop", "momentum": 0.9}, "momentum: no such field"),
        ({"clip_norm": 0.0}, "greater than 0"),
        ({"clip_row_norm": -1.0}, "greater than 0"),
        ({"schedule": {"kind": "linear_warmup"}}, "kind linear_warmup needs warmup_steps"),
        ({"schedule": {"kind": "cosine"}}, "kind cosine needs decay_steps"),
        ({"schedule": {"kind": "step", "gamma": 0.5}}, "kind step needs every_steps"),
        ({"schedule": {"warmup_steps": 5}}, "kind constant has no warmup_steps"),
        ({"schedule": {"kind": "cosine", "decay_steps": 5, "gamma": 0.5}}, "kind cosine has no gamma"),
        ({"schedule": {"kind": "cosine", "decay_steps": 5, "start_factor": 0.5}}, "start_factor .* set warmup_steps"),
        ({"schedule": {"kind": "cosine", "decay_steps": 0}}, "greater than or equal to 1"),
    ],
)
def test_an_optimizer_that_contradicts_itself_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_job(JOB | {"optimizer": settings})


RULE = {"buckets": [1], "kind": "adamw", "weight_decay": 0.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"by_frequency": [RULE]},
            "optimizer.by_frequency: it was removed: .*: leave it out, and train again from the start",
        ),
        (
            {"decay": "at_update"},
            "optimizer.decay: at_update was removed: .*: use by_epoch or at_read, and train again from the start",
        ),
        ({"alpha": "auto"}, "optimizer.alpha: auto was removed: .*: use default, or a number"),
    ],
)
def test_settings_that_were_removed_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_job(JOB | {"optimizer": settings})


def of_decay(optimizer: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    job = {"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn"}, **changes}
    return job if optimizer is None else job | {"optimizer": optimizer}


ONE_PASS = {"dataset": {"name": "rows", "one_pass": True}}


@pytest.mark.parametrize(
    ("optimizer", "changes", "decay"),
    [
        (None, {}, "by_epoch"),
        (None, {"epochs": 4}, "by_epoch"),
        ({"kind": "adagrad_ar", "alpha": 0.1}, {}, "by_epoch"),
        ({"kind": "rmsprop_ar"}, {}, "by_epoch"),
        ({"decay": "at_read"}, {"epochs": 4}, "at_read"),
        ({"alpha": 0.1}, ONE_PASS, "at_read"),
        (None, {"regularizers": {"meda": True}}, "at_read"),
        ({"kind": "adam"}, {}, "at_read"),
    ],
)
def test_a_job_holds_the_decay_that_it_comes_to(optimizer: Any, changes: dict[str, Any], decay: str) -> None:
    job = parse_job(of_decay(optimizer, **changes))
    document = job.model_dump(mode="json")
    assert job.optimizer.decay == document["optimizer"]["decay"] == decay
    assert parse_job(document) == job
    assert pickle.loads(pickle.dumps(job)).optimizer.decay == decay
    # What is left out is left out of a document that is to be changed: another kind may have another default.
    changed = job.model_dump(mode="json", exclude_unset=True)
    assert ("decay" in changed.get("optimizer", {})) == ("decay" in (optimizer or {}))


def test_a_stored_job_that_leaves_the_decay_out_keeps_what_was_the_default() -> None:
    document = of_decay({"kind": "adam_ar", "alpha": "auto"})
    stored = parse_job(document, stored=True).optimizer
    assert (stored.decay, stored.alpha) == ("at_read", "default")
    assert parse_job(of_decay(None), stored=True).optimizer.decay == "at_read"
    with pytest.raises(SpecError, match="by_frequency: it was removed"):
        parse_job(of_decay({"by_frequency": [RULE]}), stored=True)


@pytest.mark.parametrize("sharding", ["column_wise", "grid"])
def test_rows_are_not_clipped_where_ranks_have_parts_of_them(sharding: str) -> None:
    job = changed(changed(JOB, "sharding", {"item": sharding}), "optimizer.clip_row_norm", 1.0)
    with pytest.raises(SpecError, match=f"sharding.item: .* {sharding} may split: use table_wise"):
        parse_job(job)
    parse_job(changed(job, "resources.num_workers", 1))


def test_more_micro_batches_than_samples_are_refused() -> None:
    with pytest.raises(SpecError, match="micro_batches: a batch of 8 cannot be cut into 9 parts"):
        parse_job(JOB | {"batch_size": 8, "micro_batches": 9})


def test_batch_normalisation_of_single_rows_is_refused() -> None:
    normalised = JOB | {"model": {"kind": "dnn", "batch_norm": True}}
    with pytest.raises(SpecError, match="micro_batches: batch_norm turns a part of one row into 0"):
        parse_job(normalised | {"batch_size": 8, "micro_batches": 5})
    with pytest.raises(SpecError, match="batch_size: batch_norm turns a part"):
        parse_job(normalised | {"batch_size": 1})
    parse_job(normalised | {"batch_size": 8, "micro_batches": 4})


@pytest.mark.parametrize(("kind", "beta2"), [("rmsprop", 0.99), ("rmsprop_ar", 0.99), ("rowwise_adam", 0.999)])
def test_beta2_is_that_of_its_kind_unless_it_is_given(kind: str, beta2: float) -> None:
    job = parse_job(JOB | {"optimizer": {"kind": kind}})
    assert job.optimizer.beta2 == beta2
    assert parse_job(job.model_dump(mode="json")) == job
    assert parse_job(JOB | {"optimizer": {"kind": kind, "beta2": 0.95}}).optimizer.beta2 == 0.95


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_fbgemm_takes_its_own_optimizers(kind: str) -> None:
    job = parse_job(changed(changed(JOB, "kernel", "fbgemm"), "optimizer.kind", kind))
    assert (job.kernel, job.optimizer.kind) == ("fbgemm", kind)


@pytest.mark.parametrize(
    ("kernel", "kind", "sharding", "message"),
    [
        ("fbgemm", "adam_ar", {}, "kernel: fbgemm has no fused adam_ar .* use kernel evenkeel, or optimizer.kind sgd"),
        ("fbgemm", "adam", {}, "kernel: fbgemm has no fused adam on CPU"),
        ("fbgemm", "rmsprop", {}, "kernel: fbgemm has no fused rmsprop on CPU"),
        ("fbgemm", "rowwise_adam", {}, "kernel: fbgemm has no fused rowwise_adam on CPU"),
        ("evenkeel", "rowwise_adam", {"item": "grid"}, "rowwise_adam takes the mean .* grid .* optimizer.kind adam$"),
        (
            "fbgemm",
            "rowwise_adagrad",
            {"item": "column_wise"},
            "sharding.item: rowwise_adagrad takes the mean .* column_wise may split",
        ),
    ],
)
def test_what_a_kernel_has_no_form_of_is_refused_with_the_remedy(kernel, kind, sharding, message) -> None:
    document = changed(changed(JOB, "kernel", kernel), "optimizer.kind", kind)
    with pytest.raises(SpecError, match=message):
        parse_job({**document, "sharding": sharding})


@pytest.mark.parametrize(
    ("kernel", "kind", "message"),
    [
        ("fbgemm", "adagrad", "tables.user: FBGEMM trains float32 rows and state on CPU"),
        ("evenkeel", "adam", "tables.user.state_dtype: float16 cannot hold the squares that adam keeps"),
    ],
)
def test_types_of_tables_that_the_job_does_not_name_are_checked_too(kernel, kind, message, monkeypatch) -> None:
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    dataset = parse_dataset({"name": "log", "uri": "rows.parquet", "features": features, "label": {"column": "click"}})
    document = {"name": "j", "dataset": {"name": "log"}, "kernel": kernel, "optimizer": {"kind": kind}}
    document |= {"model": {"kind": "dnn"}, "tables": {"item": {"dtype": "float32"}}}
    document |= {"evaluation": {"split": {"validation": 0, "test": 0}}}
    parse_job(document).against(dataset)
    narrow = Table(state_dtype="float16")
    monkeypatch.setattr(JobSpec, "table", lambda job, name: job.tables.get(name, narrow))
    with pytest.raises(ValueError, match=message):
        parse_job(document).against(dataset)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "dnn", "embedding_dim": 8}, None),
        ({"kind": "dnn", "embedding_dim": 6}, "table 'item' has 6 columns, .* use an embedding_dim that makes it one"),
        ({"kind": "mf", "embedding_dim": 8}, "table 'item' has 9 columns, .* multiples of 4: use an embedding_dim"),
        (
            {"kind": "bpr", "loss": "bpr", "embedding_dim": 8},
            "table 'item' has 9 columns, .* multiples of 4: use kernel evenkeel",
        ),
    ],
)
def test_columns_that_fbgemm_does_not_take_on_a_gpu_are_refused_before_a_run(model, message) -> None:
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    if model["kind"] == "dnn":
        features["price"] = {"type": "dense"}
    dataset = parse_dataset({"name": "log", "uri": "rows.parquet", "features": features, "label": {"column": "click"}})
    document = {"name": "j", "dataset": {"name": "log"}, "kernel": "fbgemm", "model": model}
    document |= {"optimizer": {"kind": "adagrad"}, "evaluation": {"split": {"validation": 0, "test": 0}}}
    parse_job(document).against(dataset)
    on_gpu = parse_job(document | {"resources": {"gpus_per_worker": 1}})
    if message is None:
        on_gpu.against(dataset)
    else:
        with pytest.raises(ValueError, match=message):
            on_gpu.against(dataset)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("uri", "gs://bucket/rows"),
        ("features.attribute.join.uri", "gs://bucket/attributes.parquet"),
        ("label.negatives.distribution", "in_batch"),
        ("graphs", {"trust": {**TRUST, "uri": "gs://bucket/t.parquet"}}),
    ],
)
def test_dataset_parts_not_built_yet_are_refused_by_name(path: str, value: Any) -> None:
    with pytest.raises(SpecError, match=r"not available yet|before there are batches") as caught:
        parse_dataset(changed(DATASET, path, value))
    assert path.split(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("epoch", 3, "did you mean epochs"),
        ("optimizer.lr", 0.1, "check the spelling"),
        ("name", "Sports DNN", "pattern"),
        ("epochs", 0, "greater than or equal to 1"),
        ("seed", -1, "greater than or equal to 0"),
        ("seed", 2**32, "less than"),
        ("optimizer.learning_rate", float("nan"), "finite"),
        ("optimizer.alpha", 0.0, "greater than 0"),
        ("evaluation.split", {"kind": "random", "validation": 0.5, "test": 0.5}, "no row is left"),
        ("dataset.window.start", "yesterday", "YYYY-MM-DD"),
        ("init_from", {"collection": "items", "job": "j1"}, "collection"),
        ("spec_version", 2, "1"),
        ("model", {"kind": "bpr", "loss": "bpr", "hidden": [32]}, "bpr has no hidden layers"),
        ("model", {"kind": "sasrec", "loss": "bce", "hidden": [32]}, "sasrec has no hidden layers"),
        ("model", {"kind": "dnn", "window": 5}, "model.window: dnn has none: use item2vec, or leave it out"),
        (
            "model",
            {"kind": "bpr", "loss": "bpr", "negatives": 5},
            "model.negatives: bpr has none: use item2vec or sasrec or gru4rec",
        ),
        ("model", {"kind": "sasrec", "loss": "bce", "gru_layers": 2}, "model.gru_layers: sasrec has none: use gru4rec"),
        ("model", {"kind": "gru4rec", "loss": "bce", "heads": 2}, "model.heads: gru4rec has none: use sasrec"),
        ("model", {"kind": "gru4rec", "loss": "bce", "init": {"kind": "zero"}}, "zero gives gru4rec no gradient"),
        (
            "model",
            {"kind": "item2vec", "loss": "sampled_softmax"},
            "model.loss: item2vec has no sampled_softmax: leave it out",
        ),
        (
            "model",
            {"kind": "sasrec", "loss": "bce", "embedding_dim": 6, "heads": 4},
            "4 heads do not divide embedding_dim 6",
        ),
        (
            "evaluation.metrics",
            ["auc", "ndcg_10"],
            "dnn has no ndcg_10, because it cannot rank all items for a user: use auc, logloss, gauc",
        ),
        ("sse.item", {"rho": 5}, "sse.item.rho: .* name the graph, or leave rho out"),
        ("sse.item", {"rho": 0.5, "graph": "trust"}, "greater than or equal to 1"),
        ("sse.label", {"graph": "trust"}, "sse.label.graph: labels have no graph"),
        ("sse.label", {"include_unknown": True}, "sse.label.include_unknown: class labels have no unknown id"),
        ("sse.item", {"walk": {"restart": 0.5}}, "sse.item.walk: a walk needs a graph and no rho"),
        ("sse.item", {"walk": {"restart": 0.5}, "graph": "trust", "rho": 2}, "sse.item.walk: a walk needs"),
        ("sse.item", {"walk": {"restart": 0}, "graph": "trust"}, "greater than or equal to 0.01"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        parse_job(changed(JOB, path, value))
    assert path.split(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("features.history.shares", "itm", "no feature 'itm'"),
        ("features.history.shares", None, "needs shares: item"),
        ("features.history.derive.min_length", 6, "min_length 6 leaves every row out, .* at most 5 values"),
        ("label.negatives.of", "thing", "no feature 'thing'"),
        ("label", {"negatives": {"per_positive": 1, "of": "history"}}, "negatives.of: 'history' is a list, and single"),
        ("label", {"column": "click", "rule": "rating >= 4"}, "exactly one"),
        ("label", {"rule": "rating >= __import__('os')"}, "COLUMN COMPARISON NUMBER"),
        ("timestamp", "ts", "not both"),
        ("features", {}, "at least 1"),
        ("graphs", {"trust": {**TRUST, "of": "usr"}}, "graphs.trust.of: no feature 'usr'"),
    ],
)
def test_what_is_wrong_in_a_dataset_is_named(path: str, value: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_dataset(changed(DATASET, path, value))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("sse.itme", {"probability": 0.1}, "sse.itme: no such feature"),
        ("sharding.history", "row_wise", "sharding.history: no such table"),
        ("dataset.name", "other", "the dataset is 'sports'"),
        ("sse.user", {"graph": "trust"}, "sse.user.graph: dataset 'sports' has no graph 'trust' \\(there are none\\)"),
    ],
)
def test_what_does_not_fit_the_dataset_is_named(path: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_job(changed(JOB, path, value)).against(parse_dataset(DATASET))


def test_graphs_are_of_the_table_that_the_feature_reads() -> None:
    dataset = parse_dataset(changed(DATASET, "graphs", {"alike": {**TRUST, "of": "history"}}))
    for feature in ("item", "history"):
        job = parse_job(changed(JOB, "sse", {feature: {"graph": "alike", "rho": 20}}))
        assert job.against(dataset).sse[feature].rho == 20
    with pytest.raises(
        ValueError, match=r"sse.user.graph: graph 'alike' belongs to table 'item', .* reads table 'user'"
    ):
        parse_job(changed(JOB, "sse", {"user": {"graph": "alike"}})).against(dataset)


def test_bpr_has_its_items_under_one_name() -> None:
    """They are both what it reads and what it is trained to prefer."""
    job = {key: value for key, value in JOB.items() if key not in ("sse", "model")} | {
        "model": {"kind": "bpr", "loss": "bpr"}
    }
    for sse in ({"item": {}}, {"label": {}}, {"item": {"probability": 0}, "label": {}}, {"item": {}, "user": {}}):
        parse_job({**job, "sse": sse})
    with pytest.raises(SpecError, match=r"sse.label.probability: .* give sse.item or sse.label, not both"):
        parse_job({**job, "sse": {"item": {}, "label": {}}})


def test_publishing_models_fit_or_say_why() -> None:
    dataset = changed(DATASET, "label", {"rule": "rating >= 4"})
    del dataset["features"]["attribute"]
    job = changed(changed(JOB, "model.kind", "two_tower"), "publish", PUBLISH)
    assert parse_job(job).against(parse_dataset(dataset)).publish is not None
    with pytest.raises(ValueError, match="no such feature 'thing'"):
        parse_job(changed(job, "publish.feature", "thing")).against(parse_dataset(dataset))
    del dataset["features"]["user"]
    with pytest.raises(ValueError, match="needs a feature named 'user'"):
        parse_job(job).against(parse_dataset(dataset))


def test_published_views_may_be_materialized() -> None:
    job = changed(changed(JOB, "model", {"kind": "bpr", "loss": "bpr", "embedding_dim": 16}), "publish", PUBLISH)
    job["publish"]["views"][0]["materialized"] = True
    job.pop("sse", None)
    publish = parse_job(job).publish
    assert publish is not None
    assert publish.views[0].materialized


def test_models_of_sequences_need_an_order_and_rank() -> None:
    dataset = changed(DATASET, "label", {"rule": "rating >= 4"})
    for kind, init in (("item2vec", 0.1), ("sasrec", 0.02), ("gru4rec", 0.1)):
        job = changed(
            changed(changed(JOB, "model", {"kind": kind}), "publish", PUBLISH), "sse", {"item": {}, "label": {}}
        )
        job["regularizers"] = {"dropout": 0.0 if kind == "item2vec" else 0.2}
        parsed = parse_job(job).against(parse_dataset(dataset))
        assert (parsed.model.effective_init.kind, parsed.model.effective_init.std) == ("hash", init)
        parse_job(changed(job, "evaluation.metrics", ["ndcg_10", "hit_rate_10_full"]))
        with pytest.raises(SpecError, match=f"{kind} ranks and has no logloss"):
            parse_job(changed(job, "evaluation.metrics", ["logloss"]))
        unordered = {key: value for key, value in dataset.items() if key != "order"}
        with pytest.raises(ValueError, match=f"model.kind: {kind} needs order or timestamp"):
            parse_job(changed(job, "evaluation.split", {"kind": "random"})).against(parse_dataset(unordered))


def test_an_unquoted_off_is_off(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "{name: x, dataset: {name: d}, model: {kind: bpr}, publish: {collection: c, feature: item, gate: {mode: off}}}"
    )
    _, job = load_documents(path)
    assert job is not None
    assert job.publish is not None
    assert job.publish.gate.mode == "off"


def test_an_unquoted_on_is_on(tmp_path: Path) -> None:
    path = tmp_path / "dataset.yaml"
    path.write_text(
        "name: d\nuri: rows.parquet\nlabel: {column: click}\n"
        "features: {item: {}, shelf: {join: {uri: shelves.parquet, on: item, column: shelf}}}\n"
    )
    dataset, _ = load_documents(path)
    assert dataset is not None
    assert dataset.features["shelf"].join is not None
    assert dataset.features["shelf"].join.on == "item"


@given(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True),
    st.sampled_from([">=", "<=", "==", "!=", ">", "<"]),
    st.integers(-1000, 1000),
)
def test_rules_parse(column: str, comparison: str, number: int) -> None:
    assert parse_rule(f" {column} {comparison} {number} ") == (column, comparison, float(number))


def test_a_file_may_hold_a_dataset_and_a_job(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "both.yaml"
    path.write_text(yaml.safe_dump_all([DATASET, JOB]))
    dataset, job = load_documents(path)
    assert dataset == parse_dataset(DATASET)
    assert job == parse_job(JOB)


@pytest.mark.parametrize(
    ("text", "says"), [("", "is empty"), ("a: [", "is not YAML"), ("- 1", "mapping"), ("name: x\nmodel: 3", "model")]
)
def test_bad_files_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=says) as caught:
        load_documents(path)
    assert "bad.yaml" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        load_documents(tmp_path / "absent.yaml")


@pytest.mark.process
def test_specs_load_without_torch() -> None:
    code = "import sys, trainer.spec, trainer.runs.events, trainer.spec.checks.supported; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("model", "field", "message"),
    [
        ({"kind": "dnn", "embedding_dim": 0}, "model.embedding_dim", "greater than or equal to 1"),
        ({"kind": "dcnv2", "structure": "crossed"}, "model.structure", "'stacked' or 'parallel'"),
        ({"kind": "dnn", "hiden": [8]}, "model.hiden", "did you mean hidden"),
        ({"kind": "ncf"}, "model.kind", "use one of fm, dnn"),
        ({"embedding_dim": 8}, "model.kind", "Field required"),
    ],
)
def test_errors_of_a_model_name_the_field_as_it_is_written(model, field, message):
    with pytest.raises(SpecError) as caught:
        parse_job({**JOB, "model": model})
    (problem,) = caught.value.problems
    assert problem.field == field
    assert message in f"{problem.message}: {problem.remedy}"


@pytest.mark.parametrize("metric", ["recall_7", "ndcg_100_full", "mrr_full", "hit_rate_999"])
def test_rankings_are_measured_at_any_k(metric):
    found = parse_job({**JOB, "model": {"kind": "mf"}, "evaluation": {"metrics": [metric]}})
    assert found.evaluation.metrics == (metric,)


@pytest.mark.parametrize("metric", ["recall_0", "recall_1000", "recall", "ndcg_05", "auc_10", "AUC"])
def test_a_metric_that_there_is_not_is_refused_with_those_that_there_are(metric):
    with pytest.raises(SpecError, match=r"evaluation\.metrics\.0: no such metric: use one of auc, logloss, .*recall_K"):
        parse_job({**JOB, "evaluation": {"metrics": [metric]}})


def test_a_kept_spec_with_the_fields_of_all_kinds_is_read_and_those_that_are_set_are_refused():
    older = {"window": 3, "negatives": None, "length": 50, "blocks": 2, "heads": 1, "loss": "bce"}
    kept = parse_job({**JOB, "model": {**JOB["model"], **older}})
    assert kept == parse_job(JOB)
    assert "window" not in kept.model_dump()["model"]
    with pytest.raises(SpecError, match=r"model\.window: dnn has none: use item2vec, or leave it out"):
        parse_job({**JOB, "model": {**JOB["model"], **older, "window": 5}})
    with pytest.raises(SpecError, match=r"model\.hidden: mf has no hidden layers: leave it out"):
        parse_job({**JOB, "model": {"kind": "mf", "hidden": [8]}})
    assert parse_job({**JOB, "model": {"kind": "mf", "hidden": []}}).model.num_hidden == 0


# --- held versions ---------------------------------------------------------------------------------------------------

HELD_IN: dict[str, Any] = {"collection": "items", "feature": "item"}
PUBLISHING = {**JOB, "model": {"kind": "bpr", "loss": "bpr"}, "sse": {}, "regularizers": {}}


def gate(**settings: Any) -> dict[str, Any]:
    return {"publish": {**HELD_IN, "gate": settings}}


def start(publish: dict[str, Any] | None = HELD_IN, **settings: Any) -> dict[str, Any]:
    return {"init_from": {"held": "go_on", **settings}, "publish": publish}


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        (gate(when_stuck="promote"), "publish.gate.when_stuck", "new_generation"),
        (gate(limits={"cosine": 0.5}), "publish.gate.limits", "no metric of the gate"),
        (gate(limits={"cosine_mean[typo]": 0.5}), "publish.gate.limits", "write cosine_mean"),
        (gate(limits={"canary_drop[genre": 0.5}), "publish.gate.limits", "write canary_drop"),
        (gate(limits={"norm_shift[0-9]": 0.5}), "publish.gate.limits", "write norm_shift"),
        (gate(limits={"model_metric[country=DE]": 0.5}), "publish.gate.limits", "write model_metric"),
        (gate(limits={"finite": 0.5}), "publish.gate.limits", "never served"),
        (gate(limits={"cosine_mean": "NaN"}), "publish.gate.limits.cosine_mean", "finite number"),
        (gate(max_held=0), "publish.gate.max_held", "greater than or equal to 1"),
        (start(job="job_1"), "init_from", "current version of a collection"),
        (start(collection="items", version="v000001"), "init_from", "leave job and version out"),
        (start(None, collection="items"), "init_from.held", "no collection"),
        (start({**HELD_IN, "collection": "films"}, collection="items"), "init_from.held", "'films'"),
    ],
)
def test_what_of_held_versions_makes_no_sense_is_refused(changes: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job({**PUBLISHING, **changes})
    assert any(one.field == field and said in f"{one.message} {one.remedy}" for one in refused.value.problems), (
        refused.value.problems
    )


def test_what_ends_a_row_of_held_versions_is_read_and_no_hash_changes_without_it() -> None:
    gate = {"max_held": 2, "when_stuck": "hold", "limits": {"model_gain[all]": -0.01, "model_metric[newest]": 0.6}}
    job = parse_job(
        {**PUBLISHING, "init_from": {"collection": "items", "held": "go_on"}, "publish": {**HELD_IN, "gate": gate}}
    )
    assert job.publish is not None
    assert (job.publish.gate.max_held, job.publish.gate.when_stuck) == (2, "hold")
    assert job.publish.gate.limits == gate["limits"]
    plain = parse_job({**PUBLISHING, "publish": HELD_IN}).model_dump(mode="json")
    assert plain["publish"]["gate"] == {"mode": "enforce"}
    assert "held" not in plain["init_from"]


@pytest.mark.parametrize(
    ("settings", "goes_on"),
    [
        ({"collection": "items"}, True),
        ({"collection": "items", "version": "current"}, True),
        ({"collection": "items", "held": "go_on"}, True),
        ({"collection": "items", "held": "skip"}, False),
        ({"collection": "items", "version": "v000001"}, False),
        ({"collection": "films"}, False),
        ({"job": "job_1"}, False),
    ],
)
def test_a_job_that_refreshes_a_collection_goes_on_from_its_held_versions(
    settings: dict[str, Any], goes_on: bool
) -> None:
    init_from = parse_job({**PUBLISHING, "init_from": settings, "publish": HELD_IN}).init_from
    assert init_from is not None
    assert init_from.goes_on("items") == goes_on
    assert init_from.goes_on(None) == (goes_on and "held" in settings)


@pytest.mark.parametrize(
    "metric", ["turn_p999", "kernel_rms", "norm_moved", "norm_outside", "cosine_low_traffic", "cosine_mean[10-99]"]
)
def test_a_limit_of_what_the_gate_does_not_measure_is_passed_over_with_a_warning(metric: str) -> None:
    with pytest.warns(FutureWarning, match=re.escape(f"the gate does not measure {metric}")):
        job = parse_job({**PUBLISHING, **gate(limits={metric: 0.5, "cosine_low": 0.1})})
    assert job.publish is not None
    assert job.publish.gate.limits == {"cosine_low": 0.1}


CTR = {"user": {"type": "id"}, "item": {"type": "id"}, "cat": {"type": "id"}, "price": {"type": "dense"}}


def of_rows(model: dict[str, Any], **fields: Any) -> None:
    dataset = {
        "name": "rows", "uri": "rows.parquet", "features": CTR, "label": {"column": "click"}, "order": "at",
        "graphs": {"near": {**TRUST, "of": "cat"}},
    }  # fmt: skip
    parse_job({"name": "job", "dataset": {"name": "rows"}, "model": model, **fields}).against(parse_dataset(dataset))


SASREC = {"kind": "sasrec", "loss": "bce"}
LAPLACIAN = {"laplacian": {"feature": "cat", "graph": "near"}}


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        ({"kind": "dnn"}, {"sse": {"price": {}}}, "sse.price: dnn looks up no rows of 'price'"),
        ({"kind": "mf"}, {"sse": {"cat": {}}}, "sse.cat: mf looks up no rows of 'cat'"),
        ({"kind": "item2vec"}, {"sse": {"user": {}}}, "sse.user: item2vec looks up no rows of 'user'"),
        (
            {"kind": "mf"},
            {"regularizers": LAPLACIAN},
            "feature: mf looks up no rows of 'cat': use user or item",
        ),
        ({"kind": "dnn"}, {"tables": {"price": {"dtype": "float16"}}}, "tables.price: no such table .*cat, item, user"),
        (SASREC, {"tables": {"user": {"dtype": "float16"}}}, r"tables.user: no such table \(there are item\)"),
        (SASREC, {"sharding": {"user": "row_wise"}}, r"sharding.user: no such table \(there are item\)"),
    ],
)
def test_settings_of_rows_that_the_model_does_not_read_are_refused(model: Any, fields: Any, says: str) -> None:
    """They would have no effect."""
    of_rows(model)
    with pytest.raises(ValueError, match=says):
        of_rows(model, **fields)


def test_swaps_of_probability_0_may_be_of_any_feature() -> None:
    of_rows({"kind": "mf"}, sse={"cat": {"probability": 0.0}})


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ({"kind": "adam", "beta1": 0.9, "beta2": 0.8}, "optimizer: moments 'dense' needs beta1 < beta2"),
        ({"kind": "adam", "beta1": 0.9985}, "beta1 0.9985 with beta2 0.999: momentum lives for 82790 idle"),
        ({"kind": "adagradw", "learning_rate": 1.0, "weight_decay": 1.5}, "must stay below 1, not 1.5"),
        ({"kind": "adamw", "learning_rate": 0.5, "weight_decay": 0.5}, "takes more from a row in a step than"),
    ],
)
def test_settings_of_the_optimizer_that_do_not_go_together_are_refused(optimizer: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        of_rows({"kind": "dnn"}, optimizer=optimizer)
    mended = {"beta1": 0.9, "beta2": 0.999} if "beta1" in optimizer else {"learning_rate": 0.001}
    of_rows({"kind": "dnn"}, optimizer=optimizer | mended)
