"""Columns of the drawn item: every kind of feature that describes it comes from its own rows, what does not stays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.columns.jagged import Jagged
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.spec import SpecError

SPLIT = {"kind": "time", "validation": 0.1, "test": 0.2}
NEGATIVES = {"negatives": {"per_positive": 2, "of": "item"}}
FEATURES = {
    "user": {"type": "id"},
    "item": {"type": "id"},
    "brand": {"type": "id"},
    "tags": {"type": "id_list", "weights": "tag_weights"},
    "title": {"type": "text", "ngrams": {"words": [1, 1], "buckets": 4096}},
    "price": {"type": "dense"},
    "image": {"type": "vector", "dim": 2, "mode": "as_given"},
    "land": {"type": "id", "join": {"uri": "brands.parquet", "on": "brand", "column": "land"}},
    "readers": {
        "type": "id_list", "shares": "user",
        "derive": {"previous": "user", "by": "item", "order": "ts", "length": 3},
    },
    "country": {"type": "id"},
    "age": {"type": "dense"},
    "hour": {"type": "id"},
}  # fmt: skip


def shop(num_rows: int = 1500, seed: int = 0) -> pa.Table:
    """Clicks of anybody on anything: what the item determines, what the user does, and the hour."""
    draw = np.random.default_rng(seed)
    user, item, ts = draw.integers(0, 60, num_rows), draw.integers(0, 40, num_rows), draw.permutation(num_rows)
    return pa.table(
        {
            "user": user, "item": item, "ts": ts, "brand": [f"b{one % 11}" for one in item],
            "tags": [[one, one + 100] for one in item.tolist()],
            "tag_weights": [[1.0, one + 1.0] for one in item.tolist()],
            "title": [f"title{one}" for one in item], "price": item * 10.0 + draw.random(num_rows),
            "image": [[float(one), -float(one)] for one in item], "country": user % 5, "age": 20.0 + user,
            "hour": draw.integers(0, 24, num_rows),
        }
    )  # fmt: skip


@pytest.fixture
def brands(tmp_path):
    lands = {"brand": [f"b{number}" for number in range(11)], "land": [f"l{number}" for number in range(11)]}
    pq.write_table(pa.table(lands), tmp_path / "brands.parquet")


def lists_of(data, split, name):
    column = data.column(split, next(key for key in data.keys if key.name == name))
    assert isinstance(column, Jagged)
    return [column.values[begin:end].tolist() for begin, end in zip(column.offsets, column.offsets[1:], strict=False)]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_negative_has_the_columns_of_its_own_item(split, dataset_spec, job_spec, tmp_path, brands):
    table = shop()
    said: list[str] = []
    dataset = dataset_spec(table, features=FEATURES, label=NEGATIVES, timestamp="ts")
    data = prepare(dataset, job_spec(evaluation={"split": SPLIT}), tmp_path / "data", log=said.append)
    (line,) = [line for line in said if "from rows of the drawn item" in line]
    names = ("brand", "image", "land", "price", "tags", "title")
    assert [part.split()[0] for part in line.partition(": ")[2].split(", ")] == list(names)
    keys = {key.name: key for key in data.keys}

    def raw(name):
        ids = data.vocabulary(keys[name].table).to_pylist()
        return [ids[row - 2] if row >= 2 else None for row in np.asarray(data.column(split, keys[name])).tolist()]

    items, users = raw("item"), raw("user")
    tags, tag_ids = lists_of(data, split, "tags"), data.vocabulary("tags").to_pylist()
    titles = lists_of(data, split, "title")
    title_of: dict[int, list[int]] = {}
    weights = np.asarray(data.weights(split, keys["tags"])).reshape(-1, 2)
    numbers = np.asarray(data.numbers(split))
    images = np.asarray(data.row_vectors(split, data.vectors[0]))
    by_row = zip(items, users, raw("brand"), raw("land"), raw("country"), strict=True)
    for number, (item, user, brand, land, country) in enumerate(by_row):
        assert brand == f"b{item % 11}"
        assert land == f"l{item % 11}"
        assert [tag_ids[row - 2] for row in tags[number]] == [item, item + 100]
        # Weights of a mean are scaled to a mean of 1.
        assert weights[number] == pytest.approx(np.array([1.0, item + 1.0]) * 2 / (item + 2.0), rel=1e-6)
        assert title_of.setdefault(item, titles[number]) == titles[number]
        assert int(numbers[number][0] // 10) == item
        assert images[number].tolist() == [item, -item]
        assert country == user % 5
        assert numbers[number][1] == 20 + user
    # The hour and the user's columns are the positive's.
    hours = raw("hour")
    assert hours[::3] == hours[1::3] == hours[2::3]
    assert users[::3] == users[1::3] == users[2::3]


def test_a_history_by_the_item_is_the_drawn_items_at_the_rows_time(dataset_spec, job_spec, tmp_path, brands):
    table = shop()
    dataset = dataset_spec(table, features=FEATURES, label=NEGATIVES, timestamp="ts")
    data = prepare(dataset, job_spec(evaluation={"split": SPLIT}), tmp_path / "data")
    clicks = sorted(zip(*(table[name].to_pylist() for name in ("ts", "item", "user")), strict=True))
    keys = {key.name: key for key in data.keys}
    users, items = (data.vocabulary(name).to_pylist() for name in ("user", "item"))
    item = [items[row - 2] for row in np.asarray(data.column("train", keys["item"])).tolist()]
    readers = lists_of(data, "train", "readers")
    train = [
        (time, one) for time, one in zip(table["ts"].to_pylist(), table["item"].to_pylist(), strict=True) if time < 1050
    ]
    assert item[::3] == [one for _, one in train]
    for number, (drawn, of) in enumerate(zip(item, readers, strict=True)):
        time = train[number // 3][0]
        before = [user for at, one, user in clicks if one == drawn and at < time][-3:]
        assert [users[row - 2] for row in of] == before


def test_rows_of_the_future_stand_for_no_item_of_training(dataset_spec, job_spec, tmp_path):
    """A price that changes: a negative has the last one that its item had by the row's time."""
    num_rows = 600
    draw = np.random.default_rng(1)
    item, ts = draw.integers(0, 20, num_rows), np.arange(num_rows)
    table = pa.table({"user": draw.integers(0, 200, num_rows), "item": item, "ts": ts, "price": item * 1000.0 + ts})
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "price": {"type": "dense"}}
    dataset = dataset_spec(table, features=features, label=NEGATIVES, timestamp="ts")
    data = prepare(dataset, job_spec(evaluation={"split": SPLIT}), tmp_path / "data")
    prices = np.asarray(data.numbers("train")).reshape(-1, 3)
    times = prices[:, 0] % 1000
    known = [{one: ts[(item == one) & (ts <= time)] for one in range(20)} for time in times[:400]]
    for number, of in enumerate(known):
        for price in prices[number, 1:]:
            one, time = int(price // 1000), int(price % 1000)
            first = int(ts[item == one][0])
            assert time == (int(of[one][-1]) if len(of[one]) else first)


def test_what_the_rows_leave_open_the_dataset_says(dataset_spec, job_spec, tmp_path):
    draw = np.random.default_rng(2)
    table = shop()
    # Half of the rows have the item's shelf, the others any.
    shelf = np.where(draw.random(len(table)) < 0.7, np.asarray(table["item"]) % 10, draw.integers(0, 10, len(table)))
    table = table.append_column("shelf", pa.array(shelf))
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "shelf": {"type": "id"}}
    job = job_spec(evaluation={"split": SPLIT})

    def prepared(**negatives):
        label = {"negatives": NEGATIVES["negatives"] | negatives}
        data = prepare(dataset_spec(table, features=features, label=label, timestamp="ts"), job, tmp_path / "data")
        key = next(key for key in data.keys if key.name == "shelf")
        return np.asarray(data.column("train", key)).reshape(-1, 3)

    with pytest.raises(
        DataError, match=r"'shelf' \(kappa 0\.[45].*item_features: \[shelf\].*Leave out features that do not"
    ):
        prepared()
    kept, own = prepared(item_features=[]), prepared(item_features=["shelf"])
    assert (kept[:, :1] == kept).all()
    assert (own[:, :1] != own).mean() > 0.5
    for names, says in ((["shelves"], "no feature 'shelves'"), (["item"], "the drawn item itself")):
        with pytest.raises(SpecError, match=says):
            prepared(item_features=names)


@pytest.mark.parametrize(
    ("values", "feature", "is_items"),
    [
        (lambda item, draw: [draw.permutation([one % 10, 10 + one % 7]) for one in item], {"type": "id_list"}, True),
        (lambda item, draw: [draw.permutation(one * 3 + np.arange(8))[:3] for one in item], {"type": "id_list"}, None),
        (lambda item, draw: [f"title{one} w{draw.integers(30)}" for one in item], {"type": "text"}, None),
        (lambda item, draw: item * 8 + draw.integers(0, 8, len(item)), {"type": "id"}, None),
        (lambda item, draw: ["yes" if one % 2 else None for one in item], {"type": "id"}, True),
        (lambda item, draw: [[1] if one % 2 else [] for one in item], {"type": "id_list"}, True),
        (lambda item, draw: np.where(item % 2, 1.0, np.nan), {"type": "dense"}, True),
        (
            lambda item, draw: [[one % 2 * 2.0 - 1, one // 2 % 2 * 2.0 - 1, draw.normal() * 30] for one in item],
            {"type": "vector", "dim": 3, "mode": "as_given"},
            True,
        ),
        (lambda item, draw: draw.random(len(item)) < 0.01, {"type": "id"}, False),
    ],
    ids=[
        "lists in any order", "parts of lists", "texts that end anyhow", "variants", "ids or nulls", "lists or none",
        "numbers or nulls", "vectors with noise", "a rare flag",
    ],
)  # fmt: skip
def test_columns_that_describe_the_item_in_part(values, feature, is_items, dataset_spec, job_spec, tmp_path):
    """What the item determines is its own, what it only has to do with is asked for, what it has not stays."""
    table, draw = shop(6000), np.random.default_rng(3)
    column = list(values(np.asarray(table["item"]), draw))
    column = pa.array([one.tolist() if isinstance(one, np.ndarray) else one for one in column], from_pandas=True)
    table = table.select(["user", "item", "ts"]).append_column("x", column)
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "x": feature}
    dataset, said = dataset_spec(table, features=features, label=NEGATIVES, timestamp="ts"), []
    job = job_spec(evaluation={"split": SPLIT})
    if is_items is None:
        with pytest.raises(DataError, match=r"'x' \(kappa .*item_features: \[x\]"):
            prepare(dataset, job, tmp_path / "data", log=said.append)
        return
    prepare(dataset, job, tmp_path / "data", log=said.append)
    assert any("from rows of the drawn item: x (" in line for line in said) == is_items


def test_weights_alone_may_describe_the_item(dataset_spec, job_spec, tmp_path):
    table = shop(3000).select(["user", "item", "ts"]).append_column("x", pa.array([[1, 2]] * 3000))
    weights = pa.array([[one % 2 * 5.0, one // 2 % 2 * 5.0] for one in table["item"].to_pylist()])
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "x": {"type": "id_list", "weights": "w"}}
    dataset = dataset_spec(table.append_column("w", weights), features=features, label=NEGATIVES, timestamp="ts")
    said = []
    prepare(dataset, job_spec(evaluation={"split": SPLIT}), tmp_path / "data", log=said.append)
    assert [line for line in said if "from rows of the drawn item: x (1.00)" in line]


def test_an_item_feature_beside_drawn_brands_is_asked_for(dataset_spec, job_spec, tmp_path, brands):
    """A drawn brand beside the clicked item would say that it is drawn."""
    features = {name: FEATURES[name] for name in ("user", "item", "brand")}
    label = {"negatives": {"per_positive": 2, "of": "brand"}}
    with pytest.raises(DataError, match=r"'item' \(kappa .*of the item 1.00"):
        prepare(dataset_spec(shop(3000), features=features, label=label), job_spec(), tmp_path / "data")


def test_what_few_rows_have_in_common_by_chance_is_no_reason_to_ask(dataset_spec, job_spec, tmp_path):
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "x": {"type": "id"}}
    for seed in range(12):
        draw = np.random.default_rng(seed)
        table = shop(300, seed).select(["user", "ts"]).append_column("item", pa.array(draw.integers(0, 200, 300)))
        table = table.append_column("x", pa.array(draw.random(300) < 0.05))
        dataset = dataset_spec(table, features=features, label=NEGATIVES, timestamp="ts")
        said = []
        prepare(dataset, job_spec(evaluation={"split": SPLIT}), tmp_path / f"data{seed}", log=said.append)
        assert not [line for line in said if "from rows of the drawn item" in line]
