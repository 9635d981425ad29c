"""``predict --k`` by models of users and items: lists are those that scores of all pairs give."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.publishing.test_users import MODELS, job_of, write_log
from trainer.data.errors import DataError
from trainer.inference.export import export
from trainer.inference.predict import Predictor, main, predict
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import Run, read_run, write_run
from trainer.spec import parse_dataset

pytestmark = pytest.mark.slow

KINDS = {name: MODELS[name] for name in ("bpr", "normalized bpr", "mf", "two_tower")} | {
    "lightgcn": {"kind": "lightgcn", "loss": "bpr", "layers": 2}
}
USERS, K = ["u03", "u31", "nobody"], 12


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_log(tmp_path_factory.mktemp("rows"))
    random = np.random.default_rng(2)
    # Some items of the table have no row, and one is known by its number alone.
    item = np.arange(0, 90, 2)
    looks = pa.array(random.standard_normal((len(item), 3)).tolist(), mask=item > 86)
    items = {
        "item": item,
        "brand": pa.array(item % 7, mask=item > 86),
        "weight": random.random(len(item)),
        "look": looks,
    }
    pq.write_table(pa.table(items), path.with_name("items.parquet"))
    return path


def trained(folder: Path, rows: Path, model: dict[str, Any], features: Any = (), **dataset: Any) -> Run:
    of_rows = {"user": {"type": "id"}, "item": {"type": "id"}, **dict(features)}
    document = {"name": "clicks", "uri": str(rows), "features": of_rows, "label": {"column": "click"}, "order": "day"}
    directory = write_run(
        folder / "run", run_id="run", job=job_of(model, publish=None), dataset=parse_dataset(document | dataset),
        store_url=str(folder / "store"),
    )  # fmt: skip
    run = read_run(directory)
    assert execute(run, start_ranks) == 0
    return run


def by_pairs(
    run: Run, asked: dict[str, Any], items: Any, without: Any = (), k: int = K
) -> tuple[list[int], np.ndarray]:
    """The best items for one user, from the scores of rows of this user and each item."""
    left = [item for item in items if item not in set(without)]
    table = pa.table({name: [value] * len(left) for name, value in asked.items()} | {"item": left})
    scores = Predictor(run.directory).predict(table).column(0).to_numpy()
    order = np.argsort(-scores)[:k]
    return [left[row] for row in order], scores[order]


def assert_same(found: dict[str, Any], expected: tuple[list[int], np.ndarray]) -> None:
    np.testing.assert_allclose(found["scores"], expected[1], atol=2e-5)
    assert found["items"] == expected[0]


@pytest.mark.parametrize("name", KINDS)
def test_lists_are_those_of_all_pairs(name: str, tmp_path: Path, rows: Path) -> None:
    run = trained(tmp_path, rows, KINDS[name])
    log = pq.read_table(rows)
    items = sorted({*log.slice(0, 1200)["item"].to_pylist()})  # training rows
    had = [[items[0], items[1], 10**6], [], [items[0]]]
    pq.write_table(
        pa.table({"user": USERS, "item": pa.array(had, pa.list_(pa.int64())), "note": [1, 2, 3]}), tmp_path / "u"
    )
    (tmp_path / "u").rename(tmp_path / "users.parquet")
    report = predict(run.directory, tmp_path / "users.parquet", k=K, columns=["user", "note"])
    assert (report["rows"], report["columns"], report["unknown"]) == (3, ["items", "scores"], {"user": 1})
    table = pq.read_table(tmp_path / "users.scores.parquet")
    assert table.column_names == ["user", "note", "items", "scores"]
    first, second, nobody = table.to_pylist()
    assert_same(first, by_pairs(run, {"user": "u03"}, items, had[0]))
    assert_same(second, by_pairs(run, {"user": "u31"}, items))
    assert (nobody["items"], nobody["scores"]) == ([], [])

    events = log.filter(pa.array([user in USERS for user in log["user"].to_pylist()])).drop(["day"])
    pq.write_table(events, tmp_path / "events.parquet")
    assert predict(run.directory, tmp_path / "events.parquet", k=K)["rows"] == 2
    for row in pq.read_table(tmp_path / "events.scores.parquet").to_pylist():
        seen = pq.read_table(rows, filters=[("user", "=", row["user"])])["item"].to_pylist()
        assert_same(row, by_pairs(run, {"user": row["user"]}, items, seen))

    pq.write_table(log.select(["user"]).slice(0, 700), tmp_path / "alone.parquet")
    assert predict(run.directory, tmp_path / "alone.parquet", k=3)["rows"] == 700
    lists = pq.read_table(tmp_path / "alone.scores.parquet")["items"].to_pylist()
    user = log["user"][650].as_py()
    assert lists[650] == by_pairs(run, {"user": user}, items)[0][:3]


def test_features_of_the_row_and_of_the_item_table_are_read(tmp_path: Path, rows: Path) -> None:
    features = {"day": {"type": "dense", "transform": "standardize"}}
    of_items = {
        "brand": {"type": "id"}, "weight": {"type": "dense"}, "look": {"type": "vector", "dim": 3},
    }  # fmt: skip
    model = {"kind": "two_tower", "loss": "bce", "hidden": [8]}
    run = trained(tmp_path, rows, model, features, items={"uri": "items.parquet", "on": "item", "features": of_items})
    asked = pa.table({"user": ["u03", "nobody"], "day": [3, 1400]})
    pq.write_table(asked, tmp_path / "users.parquet")
    predict(run.directory, tmp_path / "users.parquet", k=100)
    trained_items = {*pq.read_table(rows).slice(0, 1200)["item"].to_pylist()}
    items = sorted({*range(0, 88, 2), *trained_items})
    for row, one in zip(pq.read_table(tmp_path / "users.scores.parquet").to_pylist(), asked.to_pylist(), strict=True):
        assert_same(row, by_pairs(run, one, items, k=100))  # all but 88, of which only a number is known
    with pytest.raises(DataError, match=r"a user's scores depend on 'day'.*give a row for each user"):
        predict(run.directory, rows, tmp_path / "events.parquet", k=K)


def test_what_cannot_be_ranked_is_refused(tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, rows, KINDS["lightgcn"])
    with pytest.raises(DataError, match="graph of its training rows, which no export has"):
        export(run.directory, tmp_path / "export")
    assert main([str(run.directory), str(rows), "--k", "0"]) == 1
    assert "number of items to find for each user, at least 1" in capsys.readouterr().err
    shutil.rmtree(run.data)
    with pytest.raises(DataError, match="graph of its training rows, which are gone"):
        Predictor(run.directory)
