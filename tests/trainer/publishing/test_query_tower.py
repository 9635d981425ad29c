"""The published query tower: its vectors give the model's own scores, after a refresh that was rotated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import FOUND
from tests.trainer.publishing.test_users import MODELS, NUM_ITEMS, dataset_of, history_of, trained, write_log
from trainer.inference.predict import Predictor
from trainer.publishing import query_tower
from trainer.runs.directory import Run
from trainer.spec import parse_dataset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("rows"))


def refreshed(folder: Path, rows: Path, name: str, **options: Any) -> tuple[Run, Collection]:
    """A second training from other initial values, turned onto the first's, whose items are averaged."""
    trained(folder, "first", rows, MODELS[name], **options)
    run = trained(folder, "second", rows, MODELS[name], seed=7, parent_version="v000001", **options)
    collection = open_store(run.store_url).collection("items")
    manifest = collection.manifest()
    assert (manifest["version"], manifest["alignment"]["kind"]) == ("v000002", "procrustes")
    assert np.abs(collection.rotation() - np.eye(4)).max() > 0.05
    return run, collection


def onnx_scores(collection: Collection, given: dict[str, Any]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Ids of found items, their scores by onnxruntime and numpy alone, [queries, items], and the mask of known queries.

    By the formula of the guide: <q, n_i z_i> + b_i + o.
    """
    recommender = collection.recommender()
    session = onnxruntime.InferenceSession(recommender.tower.to_pybytes(), providers=["CPUExecutionProvider"])
    vectors, offsets, known = session.run(["vector", "offset", "known"], given)
    reader = recommender.reader
    scored = reader.vectors if recommender.users.scored is None else recommender.users.scored
    items = np.asarray(scored) * (1.0 if recommender.users.unit_items else reader.norms[:, None])
    biases = reader.items().biases
    scores = vectors @ items.T + offsets[:, None] + (0.0 if biases is None else biases)
    # A carried item has the vector of an earlier training.
    found = reader.statuses == FOUND
    return reader.ids.filter(pa.array(found)).to_pylist(), scores[:, found], known


@pytest.mark.parametrize("name", ["two_tower", "normalized two_tower"])
def test_features_score_as_the_model_does(name: str, tmp_path: Path, rows: Path) -> None:
    run, collection = refreshed(tmp_path, rows, name, joined=True)
    assert collection.manifest()["users"]["tower"] == {
        "of": "features",
        "inputs": {"user": {"ids": "string", "list": False}, "country": {"ids": "int64", "list": False}},
    }
    users, countries = ["u07", "u31", "nobody", "nobody"], [7 % 5, 4, 2, 99]
    given = {"user": np.array(users, object), "country": np.array(countries)}
    items, scores, known = onnx_scores(collection, given)
    assert known.tolist() == [True, True, True, False]
    columns: dict[str, Any] = {"user": ["u07"] * len(items), "item": items}
    own = Predictor(run.directory).predict(pa.table(columns)).column(0).to_numpy()
    np.testing.assert_allclose(scores[0], own, atol=1e-4)
    found = collection.recommender().top(
        features=[dict(zip(given, one, strict=True)) for one in zip(users, countries, strict=True)], k=NUM_ITEMS
    )
    assert found.found.tolist() == known.tolist()
    for row in (0, 1, 2):
        answer = dict(zip(found.items[row], found.scores[row], strict=True))
        np.testing.assert_allclose([answer[item] for item in items], scores[row], atol=1e-4)
    assert found.items[3] == []
    assert collection.recommender().top(["u07"], NUM_ITEMS).items[0] == found.items[0]
    country_alone, nothing = collection.recommender().top(features=[{"country": 2}, {}], k=5).items
    assert (country_alone, nothing) == (found.items[2][:5], [])


def test_lists_of_features_are_pooled(tmp_path: Path, rows: Path) -> None:
    tags = [[number % 5, 5 + number % 3] if number % 4 else [] for number in range(60)]
    everybody = [f"u{number:02d}" for number in range(60)]
    pq.write_table(
        pa.table({"user": everybody, "tags": pa.array(tags, pa.list_(pa.int64()))}), tmp_path / "tags.parquet"
    )
    document = dataset_of(rows).model_dump(mode="json", exclude_unset=True)
    join = {"uri": str(tmp_path / "tags.parquet"), "on": "user", "column": "tags", "take": "all"}
    for pooling in ("sum", "mean"):
        document["features"]["tags"] = {"type": "id_list", "join": join, "pooling": pooling}
        run = trained(tmp_path / pooling, "run", rows, MODELS["two_tower"], dataset=parse_dataset(document))
        collection = open_store(run.store_url).collection("items")
        for user in ("u07", "u08"):
            queries = [{"user": user, "tags": tags[int(user[1:])]}, {"user": "u01", "tags": [0, 1, 2]}]
            found = collection.recommender().top(features=queries, k=NUM_ITEMS)
            columns: dict[str, Any] = {"user": [user] * len(found.items[0]), "item": found.items[0]}
            own = Predictor(run.directory).predict(pa.table(columns)).column(0).to_numpy()
            is_found = collection.open().lookup(found.items[0])[0] == FOUND
            np.testing.assert_allclose(np.array(found.scores[0])[is_found], own[is_found], atol=1e-4)


@pytest.mark.parametrize("name", ["sasrec", "normalized gru4rec", "hstu"])
def test_histories_score_as_the_model_does(name: str, tmp_path: Path, rows: Path) -> None:
    run, collection = refreshed(tmp_path, rows, name)
    assert collection.manifest()["users"]["tower"] == {
        "of": "histories", "inputs": {"item": {"ids": "int64", "list": True}},
    }  # fmt: skip
    histories = [[3], history_of(run, "u07"), [5, 10**9, 9], [10**9], []]
    assert len(histories[1]) > 6
    found = collection.recommender().top(histories=histories, k=NUM_ITEMS, exclude_seen=True)
    assert found.found.tolist() == [True, True, True, False, False]
    table = pa.table({"user": ["x"] * 5, "item": pa.array(histories, pa.list_(pa.int64()))})
    predicted = Predictor(run.directory, k=NUM_ITEMS).predict(table)
    for row in range(5):
        assert predicted.column("items")[row].as_py() == found.items[row]
        np.testing.assert_allclose(found.scores[row], predicted.column("scores")[row].as_py(), atol=1e-4)
    padded = np.zeros((1, 6), np.int64)
    padded[0, :1] = histories[0]
    items, scores, _ = onnx_scores(collection, {"item": padded, "item__lengths": np.array([1])})
    answer = dict(zip(found.items[0], found.scores[0], strict=True))
    np.testing.assert_allclose(
        [answer[item] for item in items if item != 3], scores[0][np.array(items) != 3], atol=1e-4
    )
    # The history that a published user's vector read.
    own = collection.recommender().top(["u07"], NUM_ITEMS, exclude_seen=True)
    assert own.items[0] == found.items[1]


def test_a_tower_that_cannot_be_is_left_out(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "bpr", rows, MODELS["bpr"])
    assert "tower" not in open_store(run.store_url).collection("items").manifest()["users"]
    monkeypatch.setattr(query_tower, "MAX_BYTES", 1000)
    run = trained(tmp_path / "large", "sasrec", rows, MODELS["sasrec"])
    assert "tower" not in open_store(run.store_url).collection("items").manifest()["users"]
    assert "no query tower is published: its tables have" in capsys.readouterr().out


def test_columns_of_the_item_table_are_published(tmp_path: Path, rows: Path) -> None:
    item = np.arange(0, 90, 2)[::-1]
    kinds = pa.array([[f"k{one % 3}", f"k{one % 5}"] for one in item])
    items = {"item": item, "make": pa.array(item % 7, mask=item == 4), "kinds": kinds, "weight": item / 100}
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    document = dataset_of(rows).model_dump(mode="json", exclude_unset=True)
    features = {"brand": {"type": "id", "column": "make"}, "kinds": {"type": "id_list"}, "weight": {"type": "dense"}}
    document["items"] = {"uri": str(tmp_path / "items.parquet"), "features": features}
    run = trained(tmp_path, "run", rows, MODELS["two_tower"], dataset=parse_dataset(document))
    collection = open_store(run.store_url).collection("items")
    assert collection.manifest()["users"]["columns"] == {
        "brand": {"ids": "int64", "list": False}, "kinds": {"ids": "string", "list": True},
    }  # fmt: skip
    everything = collection.recommender().top(["u07"], 200).items[0]
    found = collection.recommender().top(["u07"], 200, filter={"brand": [3, 4], "kinds": ["k1"]}).items[0]
    expected = [
        one for one in everything if one % 2 == 0 and one % 7 in (3, 4) and 1 in (one % 3, one % 5) and one != 4
    ]
    assert found == expected
    assert len(expected) > 2
