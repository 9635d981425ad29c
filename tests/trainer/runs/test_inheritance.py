"""What a job takes over from its parent by name, what is refused with the remedy, and which columns it reads."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.runs.inheritance import Inheritance, check_columns, inherit
from trainer.spec import DatasetSpec, parse_dataset, parse_job

USER, ITEM, TAGS = {"user": {"type": "id"}}, {"item": {"type": "id"}}, {"tags": {"type": "id_list"}}
TITLE = {"title": {"type": "text", "ngrams": {"buckets": 300}}}


PRICE = {"price": {"type": "dense"}}
ONE_LABEL = {"label": {"column": "click"}}


def dataset(features: dict, **changes: object) -> DatasetSpec:
    return parse_dataset({"name": "rows", "uri": "rows.parquet", "features": features} | (changes or ONE_LABEL))


def job(kind: str = "dnn", model: dict | None = None, tables: dict | None = None, **init_from: object):
    document = {"name": "job", "dataset": {"name": "rows"}, "model": {"kind": kind, "loss": "bce", **(model or {})}}
    return parse_job(document | {"init_from": {"job": "parent", **init_from}, "tables": tables or {}})


def found(learned: dict, asked: dict, model: str = "dnn", **init_from: object) -> Inheritance:
    asking = job(model, **init_from)
    return inherit(asking, dataset(asked), job(model).model_dump(mode="json"), dataset(learned))


def test_features_go_on_by_name_in_any_order() -> None:
    same = found(USER | ITEM | PRICE, PRICE | ITEM | USER)
    assert same.features == {"item": "item", "user": "user", "price": "price"}
    assert same.tables == {"item": "item", "user": "user"}
    assert (same.is_changed, same.notes) == (False, ())


def test_an_added_feature_is_told() -> None:
    more = found(USER | ITEM, USER | ITEM | TAGS | PRICE)
    assert more.added == ("tags", "price")
    assert more.silent == {"tags"}  # rows of its own; numbers are there from the first step
    assert more.keeps_scores
    (note,) = more.notes
    assert note.startswith("init_from: 'tags', 'price' added to the parent's features, and begins at zero")
    assert not found(USER | ITEM, USER | ITEM | TAGS, added="fresh").keeps_scores


def test_a_feature_that_is_gone_has_to_be_named() -> None:
    with pytest.raises(
        ValueError, match=r"^features.price: .* has no 'price': put it back, or .* {dropped: \[price\]}"
    ):
        found(USER | ITEM | PRICE, USER | ITEM)
    less = found(USER | ITEM | PRICE, USER | ITEM, dropped=["price"])
    assert less.dropped == ("price",)
    assert less.notes == ("init_from: 'price' of the parent dropped",)
    # The same spec serves the day after, whose parent has dropped it already.
    assert not found(USER | ITEM, USER | ITEM, dropped=["price"]).is_changed


def test_a_renamed_feature_goes_on_under_its_new_name() -> None:
    learned, asked = USER | ITEM | {"maker": {"type": "id"}}, USER | ITEM | {"brand": {"type": "id", "column": "maker"}}
    with pytest.raises(
        ValueError, match=r"features.maker: .*{renamed: {maker: brand}} if that is its new name, {dropped"
    ):
        found(learned, asked)
    renamed = {"maker": "brand"}
    new = found(learned, asked, renamed=renamed)
    assert new.features["brand"] == new.tables["brand"] == "maker"
    assert (new.added, new.dropped) == ((), ())
    assert not found(asked, asked, renamed=renamed).is_changed


@pytest.mark.parametrize(
    ("asked", "init_from", "message"),
    [
        (USER | ITEM, {"renamed": {"price": "cost"}}, "init_from.renamed.price: the dataset has no 'cost'"),
        (USER | ITEM | PRICE, {"renamed": {"user": "price"}}, "init_from.renamed.user: the parent read 'price' too"),
        (USER | ITEM | PRICE, {"dropped": ["price"]}, "init_from.dropped: the dataset has 'price'"),
    ],
)
def test_names_that_contradict_the_dataset_are_refused(asked: dict, init_from: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(USER | ITEM | PRICE, asked, **init_from)


@pytest.mark.parametrize(
    ("learned", "asked", "message"),
    [
        (
            TAGS | ITEM,
            {"tags": {"type": "id_list", "pooling": "sum"}} | ITEM,
            "tags: .*'tags' with pooling mean, .* sum",
        ),
        (TAGS | ITEM, {"tags": {"type": "id_list", "weights": "w"}} | ITEM, "tags: .* weights no, .* weights yes"),
        (TAGS | ITEM, {"tags": {"type": "id"}} | ITEM, "tags: .* type id_list, .* type id"),
        (TITLE | ITEM, {"title": {"type": "text", "ngrams": {"buckets": 100}}} | ITEM, "buckets=300 .* buckets=100 "),
        (PRICE | ITEM, {"price": {"type": "dense", "transform": "log1p"}} | ITEM, "price: .* transform none, .* log1p"),
        (
            ITEM | {"v": {"type": "vector", "dim": 2}},
            ITEM | {"v": {"type": "vector", "dim": 3}},
            "v: .* with dim 2, the dataset has dim 3",
        ),
        (
            USER | ITEM | {"last": {"type": "id"}},
            USER | ITEM | {"last": {"type": "id", "shares": "item"}},
            "last.shares: features share tables differently: the parent read it from table 'last'",
        ),
        (
            USER | ITEM | {"last": {"type": "id", "shares": "item"}},
            USER | ITEM | {"last": {"type": "id"}},
            "last.shares: features share tables differently: the parent read it from table 'item'",
        ),
    ],
)
def test_a_feature_that_is_read_otherwise_is_refused(learned: dict, asked: dict, message: str) -> None:
    """Rows and weights would go on with what they were not trained on, without an error."""
    with pytest.raises(ValueError, match=rf"^features\..*{message}"):
        found(learned, asked)


def test_features_that_the_model_does_not_read_may_change() -> None:
    assert not found(USER | ITEM | TAGS, TITLE | ITEM | USER, "bpr").is_changed


@pytest.mark.parametrize(
    ("kind", "feature", "why"),
    [
        ("wukong", {"tags": {"type": "id"}}, "wukong normalises all features together"),
        ("autoint", PRICE, "autoint normalises all features together"),
        ("deepfm", {"last": {"type": "id", "shares": "item"}}, "deepfm adds rows to its scores without a weight"),
    ],
)
def test_an_added_feature_that_would_change_scores_is_refused_unless_it_is_wanted(
    kind: str, feature: dict, why
) -> None:
    with pytest.raises(ValueError, match=rf"^features.*{why}.*set init_from: {{added: fresh}}"):
        found(USER | ITEM, USER | ITEM | feature, kind)
    assert found(USER | ITEM, USER | ITEM | feature, kind, added="fresh").added == tuple(feature)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"embedding_dim": 16},
            {"embedding_dim": 8},
            "model.embedding_dim: .* with 16, the job asks for 8: use 16 or more",
        ),
        (
            {"hidden": [8]},
            {"hidden": [4]},
            r"model.hidden: .*use the parent's number of layers, of these sizes or larger ones, or more",
        ),
        ({"hidden": [8, 4]}, {"hidden": [8]}, r"model.hidden: .*use the parent's number of layers, of these sizes"),
        ({"hidden": [8, 4]}, {"hidden": [8, 4, 3]}, r"model.hidden: .*at least as many units as its last, 4"),
        ({"hidden": []}, {"hidden": [8]}, r"model.hidden: .*a first layer would change the scores"),
        ({"hidden": [8], "residual": True}, {"hidden": [9], "residual": True}, r"model.hidden: .*\(residual\)"),
        ({"hidden": [8], "residual": True}, {"hidden": [8, 8], "residual": True}, r"model.hidden: .*\(residual\)"),
        (
            {"hidden": [8], "batch_norm": True},
            {"hidden": [8, 8], "batch_norm": True},
            r"model.hidden: .*\(batch_norm\)",
        ),
        ({"kind": "finalmlp", "hidden": [8]}, {"kind": "finalmlp", "hidden": [8, 8]}, "model.hidden: .*use the same"),
        (
            {"kind": "xdeepfm", "cin_layers": [5]},
            {"kind": "xdeepfm", "cin_layers": [5, 5]},
            "model.cin_layers: .*use the parent's number of layers: only after a ReLU",
        ),
    ],
)
def test_sizes_that_do_not_go_on_are_refused(before: dict, after: dict, message: str) -> None:
    rows = dataset(USER | ITEM)
    with pytest.raises(ValueError, match=rf"^{message}.*or leave init_from out$"):
        inherit(job(model=after), rows, job(model=before).model_dump(mode="json"), rows)


@pytest.mark.parametrize(
    ("kind", "model", "why"),
    [
        ("wukong", {}, "it normalises each vector"),
        ("sasrec", {}, "it normalises each vector"),
        ("hstu", {}, "it normalises each vector"),
        ("two_tower", {"normalize": True}, "normalize scales vectors"),
    ],
)
def test_longer_vectors_of_what_depends_on_their_columns_are_refused(kind: str, model: dict, why: str) -> None:
    rows = dataset(USER | ITEM)
    before = job(kind, model | {"embedding_dim": 4}).model_dump(mode="json")
    with pytest.raises(
        ValueError, match=rf"^model.embedding_dim: .*use 4, since {kind} cannot .*\({why}.*or leave init_from out"
    ):
        inherit(job(kind, model | {"embedding_dim": 8}), rows, before, rows)


def longer(kind: str, features: dict, **model: object) -> Inheritance:
    before = job(kind, {"embedding_dim": 4, **model}).model_dump(mode="json")
    return inherit(job(kind, {"embedding_dim": 8, **model}), dataset(features), before, dataset(features))


def test_columns_of_one_factor_are_drawn_where_products_of_zeros_would_never_learn() -> None:
    last = {"last": {"type": "id", "shares": "user"}}
    assert longer("dnn", ITEM | USER).drawn is None
    assert longer("mf", ITEM | USER).drawn == longer("bpr", ITEM | USER).drawn == ("user", 0)
    assert longer("item2vec", ITEM | USER).drawn == ("item", 1)
    assert longer("fm", ITEM | USER | PRICE).drawn == ("user", 0)
    assert longer("fm", ITEM | USER | last).drawn == ("item", 0)
    assert longer("dlrm", ITEM | USER).drawn == ("user", 0)
    assert longer("dlrm", ITEM | USER | PRICE).drawn is None  # the vector of numbers is
    with pytest.raises(ValueError, match=r"^model.embedding_dim: .*products of columns that all begin at zero never"):
        longer("fm", USER | last)
    with pytest.raises(ValueError, match=r"^model.embedding_dim: .*init of kind hash or normal"):
        longer("fm", ITEM | USER | PRICE, init={"kind": "zero"})


def test_longer_vectors_are_told_and_do_not_go_with_an_anchor() -> None:
    rows, publish = dataset(USER | ITEM), {"collection": "items", "feature": "item"}
    before, after = (job("bpr", {"embedding_dim": dim}).model_dump(mode="json") for dim in (4, 8))
    assert longer("bpr", USER | ITEM).notes == (
        "init_from: vectors have 8 columns, of which the first 4 are the parent's",
    )
    _, note = inherit(parse_job(after | {"publish": publish}), rows, before, rows).notes
    assert "if the served version of 'items' has 4, " in note
    assert "publish to another collection" in note
    anchored = parse_job(after | {"publish": publish | {"anchor": {"strength": 1}}})
    with pytest.raises(
        ValueError, match=r"^publish.anchor: keeps items close to what .* and the job's vectors have more"
    ):
        inherit(anchored, rows, before, rows)


def test_wukong_of_as_many_outputs_as_vectors_keeps_their_order() -> None:
    model = {"fm_vectors": 1, "linear_vectors": 1}
    parent, (first, then) = job("wukong", model), (dataset(USER | ITEM), dataset(ITEM | USER))
    assert not inherit(parent, first, parent.model_dump(mode="json"), first).is_changed
    with pytest.raises(
        ValueError, match=r"^features: wukong adds 2 vectors to 2 outputs .*read user, item, .* item, user"
    ):
        inherit(parent, then, parent.model_dump(mode="json"), first)
    wider = job("wukong", model | {"fm_vectors": 2})
    assert not inherit(wider, then, wider.model_dump(mode="json"), first).is_changed


def test_layers_may_be_wider_or_more_and_the_loss_another() -> None:
    rows, before = dataset(USER | ITEM), job(model={"hidden": [8, 4]}).model_dump(mode="json")
    for hidden in ([8, 9], [8, 4, 4], [9, 5, 7, 4]):
        assert not inherit(job(model={"hidden": hidden, "loss": "focal"}), rows, before, rows).is_changed


def test_another_kind_other_labels_and_other_types_of_rows_are_refused() -> None:
    rows, parent = dataset(USER | ITEM), job().model_dump(mode="json")
    with pytest.raises(
        ValueError, match=r"^model.kind: the parent was trained with dnn, the job asks for two_tower: use"
    ):
        inherit(job("two_tower"), rows, parent, rows)
    with pytest.raises(
        ValueError, match=r"^tables.item.dtype: the parent's table has dtype float32, the job asks for float16"
    ):
        inherit(job(tables={"item": {"dtype": "float16"}}), rows, parent, rows)
    several = [
        dataset(USER | ITEM, labels={name: {"column": name} for name in names}) for names in (("a", "b"), ("b", "a"))
    ]
    with pytest.raises(ValueError, match=r"^labels: the parent learned b, a, in this order, the dataset has a, b: use"):
        inherit(job("mmoe"), several[0], job("mmoe").model_dump(mode="json"), several[1])


def test_an_anchor_does_not_go_with_other_features() -> None:
    anchored = job().model_dump(mode="json") | {
        "model": {"kind": "two_tower"},
        "publish": {"collection": "items", "feature": "item", "anchor": {"strength": 1}},
    }  # fmt: skip
    parent = job("two_tower").model_dump(mode="json")
    inherit(parse_job(anchored), dataset(ITEM | USER), parent, dataset(USER | ITEM))
    with pytest.raises(ValueError, match=r"^publish.anchor: keeps items close to what the parent learned"):
        inherit(parse_job(anchored), dataset(USER | ITEM | PRICE), parent, dataset(USER | ITEM))


BRAND = {"uri": "brands.parquet", "on": "item", "column": "brand"}


def columns_checked(
    tmp_path: Path, learned: dict, asked: dict, there: str, *, before: str = "", model: str = "dnn"
) -> list[str]:
    """Check columns; ``there``: those of both files today, ``before``: those of the parent's rows."""
    for file in ("rows", "brands"):
        pq.write_table(pa.table({column: [1] for column in there.split()}), tmp_path / f"{file}.parquet")
    document = {"name": "rows", "uri": str(tmp_path / "rows.parquet"), "label": {"column": "click"}}
    first, then = (parse_dataset(document | {"features": features}) for features in (learned, asked))
    asking = job(model)
    matched = inherit(asking, then, asking.model_dump(mode="json"), first)
    return check_columns(asking, then, first, matched, before.split())


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
    message = (
        rf"the parent read column 'brand' \({part}\), the dataset reads 'category': .* a renamed column is accepted"
    )
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
    asking = job("two_tower")
    before, now = (
        parse_dataset(
            document | {"items": {"uri": "brands.parquet", "features": {"brand": {"type": "id", "column": column}}}}
        )
        for column in ("brand", "category")
    )
    matched = inherit(asking, now, asking.model_dump(mode="json"), before)
    assert check_columns(asking, before, before, matched) == []
    with pytest.raises(ValueError, match=r"^features\.brand: .* 'brand' \(join\), the dataset reads 'category'"):
        check_columns(asking, now, before, matched)


def test_columns_that_the_model_does_not_read_may_be_others(tmp_path) -> None:
    first, then = (USER | ITEM | {"brand": {"type": "id", "column": one}} for one in ("brand", "category"))
    assert columns_checked(tmp_path, first, then, "brand category", model="bpr") == []
