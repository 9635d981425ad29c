"""Users that are published with the items: served scores are those that ``predict`` computes from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from embeddings.store import open_store
from embeddings.vectors.item_vectors import FOUND
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import Run, read_run, write_run
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.problems import InvalidFieldsError

pytestmark = pytest.mark.slow

NUM_USERS, NUM_ITEMS = 60, 80
PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}, "users": {"feature": "user"}}
SEQUENCES = ("sasrec", "gru4rec", "hstu")
MODELS: dict[str, dict[str, Any]] = {
    "bpr": {"kind": "bpr", "loss": "bpr", "temperature": 0.5},
    "normalized bpr": {"kind": "bpr", "normalize": True, "temperature": 0.2, "loss": "sampled_softmax"},
    "mf": {"kind": "mf", "loss": "mse"},
    "mf of products": {"kind": "mf", "biases": False},
    "two_tower": {"kind": "two_tower", "hidden": [8], "temperature": 0.7},
    "normalized two_tower": {
        "kind": "two_tower",
        "hidden": [8],
        "normalize": True,
        "temperature": 0.3,
        "loss": "sampled_softmax",
    },
    "sasrec": {"kind": "sasrec", "loss": "bce", "length": 6, "blocks": 1, "temperature": 0.5},
    "normalized gru4rec": {"kind": "gru4rec", "length": 6, "normalize": True, "share_negatives": True},
    "hstu": {"kind": "hstu", "loss": "bce", "length": 6, "blocks": 1},
}


def write_log(folder: Path, seed: int = 0) -> Path:
    """user, item, day, click; and a file that joins a country on the user. Users are text, items integers."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    user, item = random.integers(0, NUM_USERS, 1500), (random.random(1500) ** 1.5 * NUM_ITEMS).astype(np.int64)
    click = (random.random(1500) < np.where((user + item) % 3 == 0, 0.9, 0.4)).astype(np.int64)
    names = [f"u{number:02d}" for number in user]
    columns = {"user": names, "item": item, "click": click, "day": np.arange(1500)}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    everybody = [f"u{number:02d}" for number in range(NUM_USERS)]
    pq.write_table(pa.table({"user": everybody, "country": np.arange(NUM_USERS) % 5}), folder / "users.parquet")
    return folder / "rows.parquet"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("rows"))


def dataset_of(rows: Path, joined: bool = False) -> Any:
    features: dict[str, Any] = {"user": {"type": "id"}, "item": {"type": "id"}}
    if joined:
        join = {"uri": str(rows.with_name("users.parquet")), "on": "user", "column": "country"}
        features["country"] = {"type": "id", "join": join}
    return parse_dataset(
        {"name": "clicks", "uri": str(rows), "features": features, "label": {"column": "click"}, "order": "day"}
    )


def job_of(model: dict[str, Any], **changes: Any) -> Any:
    document = {
        "name": "users", "dataset": {"name": "clicks"}, "model": {"embedding_dim": 4, **model}, "epochs": 1,
        "optimizer": {"kind": "adam", "learning_rate": 0.02}, "dense_optimizer": {"kind": "adam"},
        "batch_size": 96, "resources": {"num_workers": 1}, "publish": PUBLISH,
        "evaluation": {"split": {"kind": "time"}},
    }  # fmt: skip
    return parse_job(document | changes)


def trained(folder: Path, name: str, rows: Path, model: dict[str, Any], *, joined: bool = False, **options: Any) -> Run:
    places = {key: options.pop(key) for key in ("init_checkpoint", "parent_version") if key in options}
    dataset = options.pop("dataset", None) or dataset_of(rows, joined)
    directory = write_run(
        folder / name, run_id=name, job=job_of(model, **options), dataset=dataset,
        store_url=str(folder / "store"), **places,
    )  # fmt: skip
    run = read_run(directory)
    assert execute(run, start_ranks) == 0
    return run


def served(run: Run, user: str, **options: Any) -> tuple[list[int], np.ndarray]:
    found = open_store(run.store_url).collection("items").recommender().top([user], NUM_ITEMS, **options)
    assert found.found.all()
    return found.items[0], np.array(found.scores[0])


def assert_scores_of_rows(run: Run, user: str) -> None:
    items, scores = served(run, user)
    assert len(items) > 50
    assert (np.diff(scores) <= 0).all()
    columns: dict[str, Any] = {"user": [user] * len(items), "item": items}
    predicted = Predictor(run.directory).predict(pa.table(columns))
    reader = open_store(run.store_url).collection("items").open()
    # A carried item has the vector of an earlier training.
    found = reader.lookup(items)[0] == FOUND
    np.testing.assert_allclose(scores[found], predicted.column(0).to_numpy()[found], atol=2e-5)


def history_of(run: Run, user: str) -> list[int]:
    """The items of a user's rows in the training split, of sequences the positive rows alone, in their order."""
    table = pq.read_table(run.dataset.uri, filters=[("user", "=", user)])
    # The training split of a split by time: the first 80 % of the rows.
    table = table.filter(pc.less(table["day"], 1200))
    if run.job.model.reads_sequences:
        table = table.filter(pc.equal(table["click"], 1))
    items: list[int] = table.column("item").to_pylist()
    return items


def assert_next_items(run: Run, user: str) -> None:
    """``predict`` finds the items from the user's history in the training split."""
    history = history_of(run, user)
    assert len(history) > 6
    items, scores = served(run, user, exclude_seen=True)
    assert not set(items) & set(history)
    table = pa.table({"user": [user], "item": pa.array([history], pa.list_(pa.int64()))})
    predicted = Predictor(run.directory, k=NUM_ITEMS).predict(table)
    assert predicted.column("items")[0].as_py() == items
    np.testing.assert_allclose(scores, predicted.column("scores")[0].as_py(), atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_served_scores_are_the_models_own(name: str, tmp_path: Path, rows: Path) -> None:
    """After a second training from other initial values too, turned onto the first's, whose items are averaged."""
    model, is_sequence = MODELS[name], any(kind in name for kind in SEQUENCES)
    first = trained(tmp_path, "first", rows, model)
    second = trained(tmp_path, "second", rows, model, seed=7, parent_version="v000001")
    manifest = open_store(second.store_url).collection("items").manifest()
    assert (manifest["version"], manifest["alignment"]["kind"]) == ("v000002", "procrustes")
    assert manifest["users"] | {"rows": 0, "tower": None} == {
        "feature": "user", "id_type": "string", "rows": 0, "unit_items": "normalized" in name, "tower": None
    }  # fmt: skip
    assert manifest["users"]["rows"] > 50
    for user in ("u07", "u31"):
        if is_sequence:
            assert_next_items(second, user)
        else:
            assert_scores_of_rows(second, user)
    assert first.run_id != second.run_id


def test_users_with_joined_features(tmp_path: Path, rows: Path) -> None:
    run = trained(tmp_path, "joined", rows, MODELS["two_tower"], joined=True)
    assert_scores_of_rows(run, "u07")
    had = history_of(run, "u07")
    left_out = set(served(run, "u07")[0]) - set(served(run, "u07", exclude_seen=True)[0])
    assert left_out == set(had)
    assert len(left_out) > 5


def test_outputs_of_an_item_tower_have_biases(tmp_path: Path, rows: Path) -> None:
    """Every item of the table has a bias; an item without a row has the bias of unknown ids."""
    pq.write_table(pa.table({"item": np.arange(90), "brand": np.arange(90) % 7}), tmp_path / "items.parquet")
    items = {"uri": str(tmp_path / "items.parquet"), "features": {"brand": {"type": "id"}}}
    dataset = parse_dataset({**dataset_of(rows).model_dump(mode="json", exclude_unset=True), "items": items})
    run = trained(tmp_path, "run", rows, MODELS["normalized two_tower"], dataset=dataset)
    biases = open_store(run.store_url).collection("items").open().items().biases
    assert biases is not None
    assert len(np.unique(biases)) > 50
    assert_scores_of_rows(run, "u07")


def test_users_of_earlier_runs_are_published(tmp_path: Path, rows: Path) -> None:
    first = trained(tmp_path, "first", rows, MODELS["bpr"])
    fewer = tmp_path / "fewer.parquet"
    pq.write_table(pq.read_table(rows, filters=[("user", "<", "u30")]), fewer)
    second = trained(
        tmp_path, "second", fewer, MODELS["bpr"], parent_version="v000001", init_checkpoint=str(first.checkpoints),
        init_from={"job": "first"},
    )  # fmt: skip
    assert_scores_of_rows(second, "u07")
    assert_scores_of_rows(second, "u31")


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ({"kind": "item2vec"}, {}, "scores of item2vec are no products"),
        ({"kind": "dnn"}, {}, "use one of two_tower, bpr, mf, sasrec, gru4rec, hstu"),
        ({"kind": "mf"}, {"publish": PUBLISH | {"users": {"feature": "item"}}}, "users are the feature 'user'"),
        (
            {"kind": "two_tower"},
            {"dataset": {"name": "clicks", "one_pass": True}},
            "a one-pass job keeps no rows of its users",
        ),
    ],
)
def test_jobs_without_users_are_refused(model: dict[str, Any], changes: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        job_of(model, **changes)


def test_features_that_change_between_rows_are_refused(rows: Path) -> None:
    dataset = dataset_of(rows)
    features = {**dataset.model_dump(mode="json", exclude_unset=True)["features"], "day": {"type": "dense"}}
    other = parse_dataset({**dataset.model_dump(mode="json", exclude_unset=True), "features": features})
    with pytest.raises(InvalidFieldsError, match="a user's vector depends on 'day'"):
        job_of(MODELS["two_tower"]).against(other)
