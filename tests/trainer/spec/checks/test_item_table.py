"""What of an item table contradicts the rest of a dataset or a job, each with the field and the remedy."""

from __future__ import annotations

import pytest

from trainer.spec import SpecError, parse_dataset, parse_job

DATASET = {
    "name": "clicks", "uri": "rows.parquet", "label": {"column": "click"},
    "features": {
        "user": {"type": "id"},
        "item": {"type": "id", "column": "product"},
        "hour": {"type": "id"},
        "age": {"type": "dense"},
    },
    "items": {"uri": "items.parquet", "features": {"brand": {"type": "id"}, "price": {"type": "dense"}}},
}  # fmt: skip
JOB = {"name": "job", "dataset": {"name": "clicks"}, "model": {"kind": "two_tower", "embedding_dim": 4}}


def items(features=None, **changes):
    own = DATASET["items"]
    return {"items": own | {"features": own["features"] | (features or {})} | changes}


def test_a_dataset_with_an_item_table():
    dataset = parse_dataset(DATASET)
    assert list(dataset.joined_features) == ["user", "item", "hour", "age", "brand"]
    assert dataset.num_item_numbers == 1
    assert parse_dataset(DATASET | items(on="product")).items.on == "product"
    # YAML reads an unquoted on as true.
    unquoted = {"uri": "items.parquet", True: "product", "features": {"brand": {}}}
    assert parse_dataset(DATASET | {"items": unquoted}).items.on == "product"
    parse_job(JOB).against(dataset)


def test_a_job_that_names_no_loss_has_one_that_publishes():
    def of_model(dataset=DATASET, **model):
        job = parse_job(JOB | {"model": JOB["model"] | model}).against(parse_dataset(dataset))
        resolved = job.model.loss, job.model.normalize, job.model.temperature, job.model.hidden
        # Stored with its defaults, the job means the same when it is read again; so does the job as it was written.
        written = parse_job(JOB | {"model": JOB["model"] | model}).model_dump(mode="json", exclude_unset=True)
        for document in (job.model_dump(mode="json"), written):
            again = parse_job(document).against(parse_dataset(dataset)).model
            assert (again.loss, again.normalize, again.temperature, again.hidden) == resolved
        return resolved

    assert of_model() == ("bce", True, 0.2, ())
    assert of_model(temperature=0.3, hidden=[8]) == ("bce", True, 0.3, (8,))
    assert of_model(temperature=1.0, normalize=False) == ("bce", False, 1.0, ())
    drawn = {"negatives": {"of": "item", "per_positive": 1}}
    for label in ({"positive": "every_row"}, drawn, {"rule": "rating >= 4"}):
        assert of_model(DATASET | {"label": label}) == ("sampled_softmax", True, 0.2, ())
    assert of_model(loss="bce") == ("bce", False, 1.0, (128, 64))
    assert of_model(loss="sampled_softmax") == ("sampled_softmax", False, 1.0, (128, 64))
    plain = {name: part for name, part in DATASET.items() if name != "items"}
    assert of_model(plain) == ("bce", False, 1.0, (128, 64))
    # A job that was stored before the default changed keeps its loss.
    stored = parse_job(JOB).model_dump(mode="json")
    assert parse_job(stored).against(parse_dataset(DATASET)).model.loss == "bce"
    with pytest.raises(ValueError, match=r"sse.label: sampled_softmax has no class labels to flip"):
        parse_job(JOB | {"sse": {"label": {"probability": 0.1}}}).against(parse_dataset(DATASET | {"label": drawn}))


def test_the_remedy_of_collapsed_vectors_fits_the_job():
    dataset = parse_dataset(DATASET)
    bce = parse_job(JOB | {"model": JOB["model"] | {"loss": "bce"}}).model
    said = bce.collapse_remedy(dataset)
    assert "items.features.price.transform: standardize" in said
    settings = "model.normalize: true, model.temperature: 0.2, model.hidden: [], model.init: {kind: hash, std: 0.5}"
    assert said.endswith(settings)
    scaled = parse_dataset(DATASET | items({"price": {"type": "dense", "transform": "standardize"}}))
    default = parse_job(JOB).against(scaled).model
    assert default.collapse_remedy(scaled) == "divide optimizer.learning_rate by three, and double epochs"
    assert default.model_copy(update={"init": None}).collapse_remedy(scaled) == "set model.init: {kind: hash, std: 0.5}"
    for kind in ("two_tower", "bpr", "dcnv2"):
        model = parse_job(JOB | {"model": {"kind": kind, "embedding_dim": 4}}).model
        plain = parse_dataset({name: part for name, part in DATASET.items() if name != "items"})
        assert ("two_tower" in model.collapse_remedy(plain)) == (kind == "dcnv2")


def test_a_dataset_without_one_is_dumped_as_before():
    plain = parse_dataset({name: part for name, part in DATASET.items() if name != "items"})
    assert "items" not in plain.model_dump(mode="json")
    assert plain.joined_features == plain.features
    model = parse_job(JOB).model.model_dump(mode="json")
    assert {"normalize", "temperature", "item_id_dropout"}.isdisjoint(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (items({"hour": {}}), "items.features.hour: the rows have a feature 'hour' too: give one of them another"),
        (
            items(on="asin"),
            "items.on: 'asin' is not the column of 'item', 'product': name a column that both",
        ),
        (items(uri="ftp://host/items.parquet"), "items.uri: ftp:// is not available yet"),
        (
            items({"kinds": {"join": {"uri": "a", "on": "item", "column": "b"}}}),
            "items.features.kinds.join: an item feature is a column of the items' file: leave it out",
        ),
        (items({"kinds": {"timestamp": "at"}}), "items.features.kinds.timestamp: an item feature is a column"),
        (
            items({"kinds": {"type": "id_list", "weights": "w"}}),
            "items.features.kinds.weights: an item feature is a column",
        ),
        (
            items({"kinds": {"missing": "error"}}),
            "items.features.kinds.missing: an item without this id has the unknown id",
        ),
        (items({"kinds": {"shares": "age"}}), "items.features.kinds.shares: no table 'age': name one of brand, hour,"),
        (items({"kinds": {"shares": "price"}}), "items.features.kinds.shares: no table 'price'"),
        ({"items": {"uri": "items.parquet", "features": {}}}, "items.features: Dictionary should have at least 1 item"),
        (items(colour="red"), "items.colour: no such field"),
        (
            {"features": {"user": {}, "item": {"type": "id_list"}}},
            "items: it needs a feature 'item' of type id that reads a column: define this feature",
        ),
        ({"features": {"user": {}}}, "items: it needs a feature 'item'"),
    ],
)
def test_what_contradicts_the_dataset(changes, message):
    with pytest.raises(SpecError) as caught:
        parse_dataset(DATASET | changes)
    assert message in str(caught.value)


def test_the_shared_table_of_a_feature_may_be_that_of_the_rows_or_of_another_feature():
    shared = parse_dataset(DATASET | items({"maker": {"shares": "brand"}, "opens": {"shares": "hour"}}))
    assert shared.items.features["maker"].shares == "brand"


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            {"model": {"kind": "dnn", "embedding_dim": 4}},
            "model.kind: dnn reads no item table, and dataset 'clicks' has one: use two_tower, or a dataset whose",
        ),
        (
            {"model": {"kind": "sasrec", "loss": "bce", "embedding_dim": 4}},
            "model.kind: sasrec reads no item table",
        ),
        (
            {"model": {"kind": "mf", "embedding_dim": 4}},
            "model.kind: mf reads no item table",
        ),
        (
            {"publish": {"collection": "items", "feature": "item", "anchor": {}}},
            "publish.anchor: with an item table vectors are a tower's outputs, not rows: leave it out",
        ),
        (
            {
                "publish": {"collection": "items", "feature": "item", "frozen_context": {}},
                "init_from": {"job": "other"},
            },
            "publish.frozen_context: with an item table vectors are a tower's outputs, not rows: leave it out",
        ),
        (
            {"model": {"kind": "two_tower", "loss": "bce"}, "tables": {"brand": {"capacity": 10}}},
            "tables.brand.capacity: ids of an item table have no dynamic rows yet: leave it out",
        ),
        ({"tables": {"prices": {}}}, "tables.prices: no such table (there are"),
        (
            {"evaluation": {"metrics": ["recall_20_full"]}},
            "leave age, hour out of the dataset, or use metrics without ranking",
        ),
    ],
)
def test_what_does_not_fit_the_item_table(job, message):
    with pytest.raises(ValueError) as caught:
        parse_job(JOB | job).against(parse_dataset(DATASET))
    assert message in str(caught.value)


@pytest.mark.parametrize("on", ["user", "uid", "product"])
def test_all_items_are_ranked_beside_features_of_the_user(on):
    age = {"type": "id", "join": {"uri": "users.parquet", "on": on, "column": "age"}}
    features = {"user": {"type": "id", "column": "uid"}, "item": {"type": "id", "column": "product"}, "age": age}
    dataset = parse_dataset(DATASET | {"features": features})
    job = parse_job(JOB | {"evaluation": {"metrics": ["recall_20_full"]}})
    if on == "product":
        with pytest.raises(ValueError, match="leave age out of the dataset"):
            job.against(dataset)
    else:
        job.against(dataset)


def test_without_a_user_that_is_what_is_said():
    age = {"type": "id", "join": {"uri": "users.parquet", "on": "user", "column": "age"}}
    dataset = parse_dataset(DATASET | {"features": {"item": {"type": "id", "column": "product"}, "age": age}})
    job = parse_job(JOB | {"evaluation": {"metrics": ["recall_20_full"]}})
    with pytest.raises(ValueError, match="two_tower needs a feature named 'user'"):
        job.against(dataset)


def test_the_dropout_of_ids_is_of_datasets_with_an_item_table():
    job = parse_job(JOB | {"model": JOB["model"] | {"item_id_dropout": 0.2}})
    job.against(parse_dataset(DATASET))
    plain = parse_dataset({name: part for name, part in DATASET.items() if name != "items"})
    with pytest.raises(ValueError, match=r"model.item_id_dropout: dataset 'clicks' has no item table"):
        job.against(plain)


@pytest.mark.parametrize(
    ("model", "field"),
    [({"temperature": 0.0}, "temperature"), ({"item_id_dropout": 1.0}, "item_id_dropout"), ({"normalize": 2}, "norm")],
)
def test_bounds(model, field):
    with pytest.raises(SpecError, match=f"model.*{field}"):
        parse_job(JOB | {"model": JOB["model"] | model})
