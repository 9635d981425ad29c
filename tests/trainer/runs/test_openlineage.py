"""What a run tells a receiver of OpenLineage over HTTP; and that no receiver can hold it up."""

from __future__ import annotations

import json
import socket
import uuid
from typing import Any

import pytest

from embeddings.store import open_store
from tests.support.receiver import Receiver, receiving
from trainer.data.batches.prepared import PreparedData
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs import openlineage
from trainer.runs.failures import Cancelled, ResourceError
from trainer.runs.lineage import ROOT, git_commit
from trainer.runs.openlineage import columns_read, dataset_name, run_id
from trainer.runs.protocol import EXIT_SUCCEEDED
from trainer.spec import parse_dataset

PATH = "/api/v1/lineage"


@pytest.fixture
def receiver(monkeypatch):
    with receiving() as server:
        monkeypatch.setenv(openlineage.URL_VARIABLE, server.url)
        yield server


def told(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(post.body) for post in list(receiver.posts.queue)]


def trains_nothing(_: object) -> None:
    """Ranks that end at once."""


def test_a_run_tells_what_it_reads_and_what_it_writes(make_run, small, tmp_path, receiver, monkeypatch):
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "shop")
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "k3y")
    rows = small.write_rows(tmp_path / "few.parquet", num_rows=300)
    run = make_run(uri=rows, epochs=1, publish={"collection": "items", "feature": "item", "gate": {"mode": "off"}})
    assert execute(run, start_ranks) == EXIT_SUCCEEDED
    posts = list(receiver.posts.queue)
    assert {(post.path, post.headers["authorization"]) for post in posts} == {(PATH, "Bearer k3y")}
    events = told(receiver)
    assert [one["eventType"] for one in events] == ["START", "RUNNING", "COMPLETE"]
    assert {one["run"]["runId"] for one in events} == {run_id(run.run_id, 1)}
    assert {(one["job"]["namespace"], one["job"]["name"]) for one in events} == {("shop", "small")}
    last = events[-1]
    assert last["run"]["facets"]["parent"]["run"]["runId"] == run_id(run.run_id)
    assert "errorMessage" not in last["run"]["facets"]
    commit = git_commit(ROOT)
    assert last["job"]["facets"].get("sourceCodeLocation", {}).get("version") == commit

    (read,) = last["inputs"]
    assert (read["namespace"], read["name"]) == ("file", str(rows))
    columns = {field["name"]: field["type"] for field in read["facets"]["schema"]["fields"]}
    assert columns == {"user": "id", "item": "id", "click": "label"}
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == 300
    fingerprint = PreparedData.open(run.data).dataset_fingerprint
    assert read["facets"]["version"]["datasetVersion"] == fingerprint
    assert "version" not in events[0]["outputs"][0]["facets"]

    (written,) = last["outputs"]
    manifest = open_store(run.store_url).collection("items").manifest()
    assert (written["namespace"], written["name"]) == ("file", f"{run.store_url}/items")
    assert written["facets"]["version"]["datasetVersion"] == manifest["version"]
    assert written["outputFacets"]["outputStatistics"]["rowCount"] == manifest["rows"]
    lineage = {
        name: [one["field"] for one in field["inputFields"]]
        for name, field in written["facets"]["columnLineage"]["fields"].items()
    }
    assert lineage == {"id": ["item"], "vector": ["user", "item", "click"]}


@pytest.mark.parametrize(
    ("stop", "kind"),
    [(ResourceError("nobody trains in this test"), "FAIL"), (Cancelled("SIGTERM"), "ABORT"), (None, "COMPLETE")],
)
def test_each_end_has_its_event(make_run, receiver, stop, kind):
    def ranks(_: object) -> None:
        if stop is not None:
            raise stop

    run = make_run()
    assert (execute(run, ranks) == EXIT_SUCCEEDED) == (kind == "COMPLETE")
    events = told(receiver)
    assert [one["eventType"] for one in events] == ["START", "RUNNING", kind]
    assert events[-1]["outputs"] == []
    message = events[-1]["run"]["facets"].get("errorMessage", {}).get("message")
    assert message == ("no_resources: nobody trains in this test" if kind == "FAIL" else None)


def test_a_run_that_ends_before_its_rows_are_read_tells_of_that(make_run, receiver, tmp_path):
    run = make_run(uri=tmp_path / "gone.parquet")
    assert execute(run, trains_nothing) != EXIT_SUCCEEDED
    start, end = told(receiver)
    assert (start["eventType"], end["eventType"]) == ("START", "FAIL")
    assert "gone.parquet" in end["run"]["facets"]["errorMessage"]["message"]
    assert "inputFacets" not in end["inputs"][0]


def test_a_receiver_that_refuses_costs_one_line(make_run, receiver, capfd):
    receiver.status = 500
    assert execute(make_run(), trains_nothing) == EXIT_SUCCEEDED
    assert len(told(receiver)) == 3
    assert capfd.readouterr().err.count("no lineage: ") == 1


def test_a_receiver_that_is_away_costs_one_line(make_run, monkeypatch, capfd):
    monkeypatch.setenv(openlineage.URL_VARIABLE, "http://127.0.0.1:1")
    assert execute(make_run(), trains_nothing) == EXIT_SUCCEEDED
    assert capfd.readouterr().err.count("no lineage: ConnectError") == 1


def test_a_receiver_that_never_answers_holds_nothing_up(make_run, monkeypatch):
    monkeypatch.setattr(openlineage, "LAST_WORDS_SECONDS", 0.01)
    monkeypatch.setattr(openlineage, "ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(openlineage.URL_VARIABLE, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert execute(make_run(), trains_nothing) == EXIT_SUCCEEDED


def test_an_event_that_cannot_be_made_holds_nothing_up(make_run, receiver, monkeypatch, capfd):
    """The version that was published is gone from the store before it is told of."""
    run = make_run(publish={"collection": "items", "feature": "item", "gate": {"mode": "off"}})
    with openlineage.telling(run) as tell:
        tell("COMPLETE", publication={"version": "v000009"})
    assert [one["eventType"] for one in told(receiver)] == ["START"]
    assert "no lineage: " in capfd.readouterr().err


@pytest.mark.parametrize("off", [{openlineage.URL_VARIABLE: ""}, {openlineage.DISABLED_VARIABLE: "true"}])
def test_nothing_is_sent_unless_asked_for(make_run, receiver, monkeypatch, off):
    for variable, value in off.items():
        monkeypatch.setenv(variable, value)
    assert execute(make_run(), trains_nothing) == EXIT_SUCCEEDED
    assert told(receiver) == []


def test_attempts_are_runs_of_their_own():
    assert run_id("j1", 1) == run_id("j1", 1) != run_id("j1", 2)
    assert uuid.UUID(run_id("j1")).version == 5


@pytest.mark.parametrize(
    ("uri", "below", "namespace", "name"),
    [
        ("file:///data/rows", "", "file", "/data/rows"),
        ("/data/store", "items", "file", "/data/store/items"),
        ("s3://bucket/day=1/", "items", "s3://bucket", "day=1/items"),
        ("redis://user:pass@host:6379/0?ssl=1", "items", "redis://host:6379", "0/items"),
    ],
)
def test_names_have_no_password(uri, below, namespace, name):
    assert dataset_name(uri, below) == {"namespace": namespace, "name": name}


def test_columns_of_each_file():
    films = {"uri": "films.csv", "on": "film", "column": "genre", "take": "all"}
    dataset = parse_dataset(
        {
            "name": "ratings",
            "uri": "/data/ratings.csv",
            "features": {
                "user": {"column": "user_id"},
                "genre": {"type": "id_list", "join": films},
                "past": {
                    "type": "id_list", "shares": "film",
                    "derive": {"previous": "film", "by": "user_id", "order": "time", "length": 5},
                },
                "film": {},
            },
            "label": {"rule": "rating >= 4"},
            "timestamp": "time",
        }
    )  # fmt: skip
    assert columns_read(dataset) == {
        "/data/ratings.csv": {"user_id": "id", "film": "key", "time": "order", "rating": "label"},
        "/data/films.csv": {"film": "key", "genre": "id_list"},
    }
    columns = {"click": {"column": "c"}, "buy": {"rule": "price > 0", "mask": "shown"}}
    several = dataset.model_copy(update={"label": None, "labels": {}, "weight": "w"}).model_dump(mode="json")
    of_rows = columns_read(parse_dataset(several | {"labels": columns}))["/data/ratings.csv"]
    assert {name: of_rows[name] for name in ("c", "price", "shown", "w")} == {
        "c": "label", "price": "label", "shown": "label mask", "w": "weight",
    }  # fmt: skip


def test_columns_are_those_of_the_file_whatever_features_are_called():
    past = {"previous": "item", "by": "user", "order": "ts", "length": 5}
    document = {
        "name": "clicks", "uri": "/data/rows.parquet",
        "features": {
            "user": {"column": "uid"}, "item": {"column": "mid", "timestamp": "listed"},
            "past": {"type": "id_list", "shares": "item", "derive": past},
            "brand": {"join": {"uri": "items.parquet", "on": "item", "column": "maker", "timestamp": "since"}},
        },
        "label": {"column": "click"}, "timestamp": "ts", "filter": "kind == 'organic' and bot != 1",
    }  # fmt: skip
    rows, items = columns_read(parse_dataset(document)).values()
    assert rows == {
        "uid": "id", "mid": "id", "listed": "time", "ts": "order", "click": "label", "kind": "filter", "bot": "filter",
    }  # fmt: skip
    assert items == {"item": "key", "maker": "id", "since": "time"}


def test_columns_of_an_item_table():
    features = {"brand": {"type": "id", "column": "maker"}, "price": {"type": "dense"}}
    dataset = parse_dataset(
        {
            "name": "clicks", "uri": "/data/rows.parquet", "features": {"user": {}, "item": {}},
            "items": {"uri": "items.parquet", "features": features}, "label": {"column": "click"},
        }
    )  # fmt: skip
    assert columns_read(dataset) == {
        "/data/rows.parquet": {"user": "id", "item": "id", "click": "label"},
        "/data/items.parquet": {"item": "key", "maker": "id", "price": "dense"},
    }
