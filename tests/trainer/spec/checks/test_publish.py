"""What is published, of which feature, by which model: what is refused is named, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.spec import JobSpec, SpecError, parse_dataset, parse_job
from trainer.spec.problems import InvalidFieldsError

FEATURES = {
    "user": {"type": "id"},
    "item": {"type": "id"},
    "tags": {"type": "id_list"},
    "title": {"type": "text"},
    "price": {"type": "dense"},
}
DATASET = parse_dataset({"name": "log", "uri": "rows.parquet", "features": FEATURES, "label": {"column": "click"}})
HASH = {"kind": "hash", "std": 0.1}


def job_of(model: dict[str, Any], feature: str = "item", **publish: Any) -> JobSpec:
    document = {"name": "j", "dataset": {"name": "log"}, "optimizer": {"kind": "adam"}, "model": model}
    return parse_job(document | {"publish": {"collection": "items", "feature": feature} | publish})


@pytest.mark.parametrize("kind", ["dcnv2", "wide_deep", "mmoe"])
@pytest.mark.parametrize("init", [None, {"kind": "zero"}, {"kind": "normal"}])
def test_vectors_that_the_loss_leaves_open_need_initial_values_that_do_not(kind: str, init: Any) -> None:
    with pytest.raises(SpecError, match=rf"model.init: the loss of {kind} .*: set model.init to \{{kind: hash"):
        job_of({"kind": kind} | ({} if init is None else {"init": init}))


def test_exponential_vectors_are_not_stored() -> None:
    view = {"name": "near", "kind": "exponential", "dim": 32}
    assert job_of({"kind": "bpr", "loss": "bpr"}, views=[view])
    with pytest.raises(SpecError, match=r"publish.views.0.materialized: vectors of kind exponential .* at fetch"):
        job_of({"kind": "bpr", "loss": "bpr"}, views=[view | {"materialized": True}])


@pytest.mark.parametrize("feature", ["item", "tags"])
def test_a_click_model_publishes_any_feature_of_ids(feature: str) -> None:
    for model in ({"kind": "dcnv2", "init": HASH}, {"kind": "fm"}):
        assert job_of(model, feature).against(DATASET).publish is not None


@pytest.mark.parametrize("feature", ["title", "price"])
def test_what_has_no_ids_is_not_published(feature: str) -> None:
    with pytest.raises(
        InvalidFieldsError, match=f"publish.feature: '{feature}' has no ids .*: name a feature that has ids"
    ):
        job_of({"kind": "dcnv2", "init": HASH}, feature).against(DATASET)


@pytest.mark.parametrize("kind", ["two_tower", "mf", "item2vec"])
def test_models_of_items_publish_items_alone(kind: str) -> None:
    with pytest.raises(InvalidFieldsError, match=f"publish.feature: {kind} publishes 'item'"):
        job_of({"kind": kind}, "tags").against(DATASET)


def test_a_wait_for_sinks_needs_some() -> None:
    assert job_of({"kind": "bpr"}, sinks=["lake"], sink_wait_seconds=60).publish is not None
    for sinks in (None, []):
        with pytest.raises(SpecError, match=r"publish.sink_wait_seconds: the job names no sink: name some"):
            job_of({"kind": "bpr"}, sinks=sinks, sink_wait_seconds=60)
