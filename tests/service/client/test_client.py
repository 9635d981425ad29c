"""The Python client against a real service, and against what is no service."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.server
import json
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load

from embeddings.rff import RandomFourierFeatures
from embeddings.vectors.item_columns import ItemColumns
from service.client import AsyncClient, Client, ProblemError, ServiceError, Unreachable, default_key, jobs
from tests.service import published, serving
from tests.service.serving import Served
from tests.support.query_towers import tower_of
from trainer.spec import parse_job

pytestmark = pytest.mark.process


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, served.key, timeout_seconds=300) as client:
        yield client


@pytest.fixture
def clicks(served: Served, client: Client) -> str:
    client.add_dataset(serving.dataset(served.data))
    return "clicks"


def test_address_and_key_come_from_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EVENKEEL_URL", served.url + "/")
    monkeypatch.setenv("EVENKEEL_HOME", str(served.home))
    monkeypatch.delenv("EVENKEEL_API_KEY", raising=False)
    with Client() as client:
        assert isinstance(client.jobs(), list)
        assert client.ready()["status"] == "ok"
    monkeypatch.setenv("EVENKEEL_API_KEY", " ek_other_key\n")
    assert default_key() == "ek_other_key"
    with Client() as client, pytest.raises(ProblemError) as caught:
        client.jobs()
    assert caught.value.status == 401
    assert "admin.key" in caught.value.remedy


def test_datasets(served: Served, client: Client):
    document = serving.dataset(served.data, "others")
    assert client.add_dataset(document)["name"] == "others"
    assert client.dataset("others")["uri"] == document["uri"]
    assert "others" in [one["name"] for one in client.datasets()]
    assert client.profile("others")["rows"] == 3
    assert client.update_dataset({**document, "max_bad_rows": 0.5})["max_bad_rows"] == 0.5
    assert client.dataset("others")["max_bad_rows"] == 0.5
    client.delete_dataset("others")
    with pytest.raises(ProblemError) as caught:
        client.dataset("others")
    assert caught.value.status == 404


def test_job_is_submitted_listed_and_cancelled(client: Client, clicks: str):
    job = client.submit(parse_job(serving.job("from-a-spec", labels={"team": "ads"})))
    assert job["state"] == "queued"
    assert client.job(job["id"])["spec"]["epochs"] == 2
    assert [one["id"] for one in client.jobs(name="from-a-spec")] == [job["id"]]
    assert [one["id"] for one in client.jobs(label="team=ads", state="queued")] == [job["id"]]
    assert client.cancel(job["id"])["state"] == "cancelled"
    assert client.cancel(job["id"])["state"] == "cancelled"
    assert client.retry(job["id"])["state"] == "queued"
    client.cancel(job["id"])
    client.delete_job(job["id"])
    with pytest.raises(ProblemError, match="no job"):
        client.job(job["id"])


def test_same_idempotency_key_is_the_same_job(client: Client, clicks: str):
    first = client.submit(serving.job(), idempotency_key="once")
    assert client.submit(serving.job(), idempotency_key="once")["id"] == first["id"]
    with pytest.raises(ProblemError) as caught:
        client.submit(serving.job("another"), idempotency_key="once")
    assert caught.value.status == 422


def _message(connection: socket.socket) -> bytes:
    """One request or answer, whole: its head, and as much as Content-Length says. Raises EOFError at the end."""
    connection.settimeout(120)
    message = b""
    while b"\r\n\r\n" not in message:
        message += _more(connection)
    head, _, body = message.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    while length and len(body) < int(length[1]):
        body += _more(connection)
    return head + b"\r\n\r\n" + body


def _more(connection: socket.socket) -> bytes:
    if not (piece := connection.recv(65536)):
        raise EOFError
    return piece


class LosesTheAnswer:
    """A proxy that closes the connection in the place of the first answer, the request having been carried out."""

    def __init__(self, url: str):
        self._target = url.removeprefix("http://").split(":")
        self.asked = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(EOFError, OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        """The requests of one connection, which the client keeps for all, until it or the lost answer ends it."""
        while True:
            request = _message(connection)
            with socket.create_connection((self._target[0], int(self._target[1]))) as onward:
                onward.sendall(request)
                answer = _message(onward)
            self.asked += 1
            if self.asked == 1:
                return
            connection.sendall(answer)

    def close(self) -> None:
        self._socket.close()


def test_what_is_sent_again_because_its_answer_was_lost_happens_once(served: Served, client: Client, clicks: str):
    proxy = LosesTheAnswer(served.url)
    try:
        with Client(proxy.url, served.key) as lossy:
            job = lossy.submit(serving.job("sent-twice"))
            assert proxy.asked == 2
            assert [one["id"] for one in client.jobs(name="sent-twice")] == [job["id"]]
            client.cancel(job["id"])
            proxy.asked = 0
            assert lossy.retry(job["id"])["state"] == "queued"  # a second retry of a queued job is a 409
            assert proxy.asked == 2
            proxy.asked = 0
            with pytest.raises(Unreachable):
                lossy.cancel(job["id"])  # no key: it is for the caller to decide
            assert proxy.asked == 1
    finally:
        proxy.close()


def test_listing_goes_through_all_pages(client: Client, clicks: str):
    ids = [client.submit(serving.job("paged"))["id"] for _ in range(55)]
    assert [one["id"] for one in client.jobs(name="paged")] == ids[::-1]
    assert [one["id"] for one in client.jobs(name="paged", limit=52)] == ids[::-1][:52]
    assert client.jobs(name="paged", limit=0) == []


def test_a_bad_spec_names_field_and_remedy(client: Client):
    with pytest.raises(ProblemError) as caught:
        client.submit(serving.job(epohcs=3))
    assert caught.value.status == 422
    assert "epohcs: no such field" in caught.value.message
    with pytest.raises(ProblemError) as caught:
        client.submit(serving.job() | {"dataset": {"name": "nowhere"}})
    assert "evenkeel datasets add" in caught.value.remedy


def test_wait_returns_the_ended_job_and_tells_of_each_change(served: Served, client: Client, clicks: str):
    job_id = client.submit(serving.job("awaited"))["id"]
    seen: list[str] = []

    def end() -> None:
        served.set_job(job_id, state="running")
        deadline = time.monotonic() + 300
        while seen[-1:] != ["running"] and time.monotonic() < deadline:
            time.sleep(0.02)
        served.set_job(job_id, state="succeeded", publication={"status": "none", "reasons": []})

    ending = threading.Thread(target=end)
    ending.start()
    job = client.wait(job_id, poll_seconds=0.05, on_update=lambda job: seen.append(job["state"]))
    ending.join()
    assert job["state"] == "succeeded"
    assert seen[-2:] == ["running", "succeeded"]


@pytest.fixture
def away_at_times(served: Served) -> Iterator[str]:
    """A proxy that answers 503 itself, in its own words, to the first request of three."""

    class Handler(http.server.BaseHTTPRequestHandler):
        asked = 0

        def do_GET(self) -> None:
            Handler.asked += 1
            if Handler.asked % 3 == 1:
                self._say(503, {}, b"<h1>503 Service Unavailable</h1>")
            else:
                found = httpx.get(served.url + self.path, headers={"Authorization": self.headers["Authorization"]})
                self._say(found.status_code, found.headers, found.content)

        def _say(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name in {"content-type", "evenkeel-next-offset"} & headers.keys():
                self.send_header(name, headers[name])
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_who_waits_for_a_job_goes_on_while_a_proxy_says_that_the_service_is_away(
    served: Served, client: Client, clicks: str, away_at_times: str, monkeypatch: pytest.MonkeyPatch
):
    job_id = client.submit(serving.job("away"))["id"]
    (served.home / "runs" / job_id).mkdir(parents=True)
    (served.home / "runs" / job_id / "log.txt").write_text("epoch 1\n")
    served.set_job(job_id, state="succeeded", released=True)
    with Client(away_at_times, served.key) as behind:
        assert behind.wait(job_id, poll_seconds=0.05)["state"] == "succeeded"
        assert "".join(behind.follow_logs(job_id, poll_seconds=0.05)) == "epoch 1\n"
        with pytest.raises(ProblemError, match="503"):
            behind.job(job_id)
        behind.job(job_id)
        behind.job(job_id)
        monkeypatch.setattr(jobs, "PATIENCE_SECONDS", 0.0)
        with pytest.raises(ProblemError, match="503"):
            behind.wait(job_id, poll_seconds=0.05)


def test_wait_gives_up_in_time(client: Client, clicks: str):
    job_id = client.submit(serving.job("never"))["id"]
    with pytest.raises(TimeoutError, match=f"{job_id} has not ended after 0.2 seconds"):
        client.wait(job_id, timeout_seconds=0.2, poll_seconds=0.05)


def test_logs_and_events(served: Served, client: Client, clicks: str):
    job_id = client.submit(serving.job("talks"))["id"]
    assert client.logs(job_id) == ("", 0)
    log = served.home / "runs" / job_id / "log.txt"
    log.parent.mkdir(parents=True)
    text = "epoch 1 ü\nepoch 2 ✓\n"
    log.write_bytes(text.encode()[:-3])
    said, offset = client.logs(job_id)
    assert said == "epoch 1 ü\nepoch 2 "
    log.write_bytes(text.encode())
    assert client.logs(job_id, offset)[0] == "✓\n"
    log.write_bytes(b"x" * (2**20 + 100))
    assert "".join(client.read_logs(job_id)) == "x" * (2**20 + 100)
    log.write_text(text)
    served.set_job(job_id, state="succeeded", released=True)
    assert "".join(client.follow_logs(job_id, poll_seconds=0.05)) == text
    events = list(client.events(job_id))
    assert events[0]["event"] == "state"
    assert events[0]["data"]["state"] == "queued"
    assert events[-1]["event"] == "log"
    assert list(client.events(job_id, events[0]["id"])) == events[1:]


@pytest.fixture
def breaks_off() -> Iterator[str]:
    """A service whose streams end in the middle, with a connection that is closed, after one event."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    event = b'id: 7\nevent: log\ndata: {"end": 3}\n\nid: 8\n'

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                _message(connection)
                connection.sendall(head + b"%x\r\n%s\r\n" % (len(event), event))

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_events_that_break_off_are_told(breaks_off: str):
    async def follow() -> None:
        async with AsyncClient(breaks_off, "k") as client:
            assert [event["id"] async for event in client.events("job_1")] == ["7"]

    with Client(breaks_off, "k") as client:
        events = client.events("job_1")
        assert next(events)["id"] == "7"
        with pytest.raises(Unreachable, match="the events broke off") as error:
            next(events)
    assert "last_event_id" in error.value.remedy
    with pytest.raises(Unreachable, match="the events broke off"):
        asyncio.run(follow())


def test_schedules(client: Client, clicks: str):
    client.add_schedule({"name": "nightly", "cron": "0 3 * * *", "timezone": "Europe/Berlin", "job": serving.job()})
    assert client.schedule("nightly")["next_fire_at"]
    assert client.change_schedule("nightly", paused=True)["next_fire_at"] is None
    fired = client.trigger("nightly", firing_date="2026-01-02")
    assert fired["firing_date"] == "2026-01-02"
    assert client.job(fired["job_id"])["schedule"] == "nightly"
    assert [one["job_id"] for one in client.firings("nightly", limit=5)] == [fired["job_id"]]
    assert [one["name"] for one in client.schedules()] == ["nightly"]
    client.delete_schedule("nightly")
    assert client.schedules() == []


def test_keys(served: Served, client: Client):
    made = client.create_key("reader", ["features:read"])
    with Client(served.url, made["key"]) as reader:
        assert isinstance(reader.collections(), list)
        with pytest.raises(ProblemError) as caught:
            reader.jobs()
        assert caught.value.status == 403
        assert "jobs:read" in caught.value.remedy
        client.revoke_key(made["id"])
        with pytest.raises(ProblemError) as caught:
            reader.collections()
        assert caught.value.status == 401
    listed = client.keys()
    assert made["id"] in [one["id"] for one in listed]


def test_versions_promotion_and_snapshot(served: Served, client: Client, tmp_path: Path):
    first, vectors = published.publish(served.settings, "books", seed=1)
    second, _ = published.publish(served.settings, "books", seed=2)
    assert [one["version"] for one in client.versions("books")] == [second, first]
    assert [one["version"] for one in client.versions("books", limit=1)] == [second]
    assert client.version("books")["version"] == second
    with pytest.raises(ProblemError) as caught:
        client.promote("books", first, "why", if_current=first)
    assert caught.value.status == 409
    client.promote("books", first, "the newer one is worse", if_current=second)
    assert client.collection("books")["current"] == first
    file = client.snapshot("books", tmp_path / "books.parquet")
    table = pq.read_table(file)
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), dtype=np.float32), vectors)
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ProblemError):
        client.snapshot("books", tmp_path / "none.parquet", "v000099")
    assert list(tmp_path.iterdir()) == [file]


def test_recommend_asks_in_blocks_of_one_version(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = np.arange(7)
    version, vectors = published.publish(served.settings, "songs", users=published.users_of(users, [10, 20]))
    whole = client.recommend("songs", users, 3)
    assert (whole["version"], [user["id"] for user in whole["users"]]) == (version, users.tolist())
    scores = published.users_of(users).vectors @ vectors.T
    assert [user["items"][0]["id"] for user in whole["users"]] == [10 * int(best + 1) for best in scores.argmax(axis=1)]
    seen = client.recommend("songs", [0], 50, exclude=np.array([30]), exclude_seen=True)["users"][0]["items"]
    assert len(seen) == 47
    assert not {10, 20, 30} & {item["id"] for item in seen}
    monkeypatch.setattr("service.client.fetch.MAX_USERS", 2)
    ask, asked = client.json, []

    def switched_meanwhile(method: str, path: str, **options: Any) -> Any:
        answer = ask(method, path, **options)
        if not asked:
            published.publish(served.settings, "songs", seed=5, users=published.users_of(users, seed=5))
        asked.append(options["json"]["users"])
        return answer

    monkeypatch.setattr(client, "json", switched_meanwhile)
    parts = client.recommend("songs", users, 3)
    assert parts["version"] == version
    for part, before in zip(parts["users"], whole["users"], strict=True):
        assert [item["id"] for item in part["items"]] == [item["id"] for item in before["items"]]
    assert asked == [[0, 1], [2, 3], [4, 5], [6]]
    assert client.recommend("songs", [], 3)["users"] == []


def test_recommend_by_features_and_histories_in_blocks(
    served: Served, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, rows = published.tower_of_items()
    version, vectors = published.publish(served.settings, "tunes", users=published.users_of([1], tower=tower))
    histories = [np.array([10 * number]) for number in range(1, 41)]
    whole = client.recommend("tunes", histories=histories, k=3, exclude_seen=True)
    assert (whole["version"], {user["id"] for user in whole["users"]}) == (version, {None})
    scores = rows[:40] @ vectors.T
    scores[np.arange(40), np.arange(40)] = -np.inf
    assert [user["items"][0]["id"] for user in whole["users"]] == [10 * int(best + 1) for best in scores.argmax(axis=1)]
    asked = []
    ask = client.json
    monkeypatch.setattr(client, "json", lambda *given, **of: asked.append(of["json"]["histories"]) or ask(*given, **of))
    monkeypatch.setattr("service.client.fetch.MAX_QUERY_VALUES", 30)
    parts = client.recommend("tunes", histories=histories, k=3, exclude_seen=True)
    for user, before in zip(parts["users"], whole["users"], strict=True):
        assert [item["id"] for item in user["items"]] == [item["id"] for item in before["items"]]
    assert [len(block) for block in asked] == [10, 10, 10, 10]
    monkeypatch.undo()
    file = client.tower("tunes", tmp_path / "tower.onnx")
    assert file.read_bytes() == tower.data
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(ValueError, match="one of users, features= and histories="):
        client.recommend("tunes")
    tower = tower_of({"country": (["de", "fr"], rows[:2])})
    published.publish(served.settings, "tunes", users=published.users_of([1], tower=tower))
    found = client.recommend("tunes", features=[{"country": "fr"}, {"country": None}], k=2)["users"]
    assert [item["id"] for item in found[0]["items"]] == [
        10 * int(row + 1) for row in np.argsort(-(vectors @ rows[1]))[:2]
    ]
    assert not found[1]["found"]
    columns = ItemColumns(np.arange(1, 51) * 10, {"brand": pa.array(np.arange(1, 51) % 4)})
    everybody = dataclasses.replace(published.users_of([1]), columns=columns)
    published.publish(served.settings, "tunes", users=everybody)
    items = client.recommend("tunes", [1], 50, filter={"brand": np.array([2])})["users"][0]["items"]
    assert sorted(item["id"] for item in items) == [10 * key for key in range(1, 51) if key % 4 == 2]


def test_vectors_as_numpy_and_as_arrow(served: Served, client: Client):
    version, vectors = published.publish(served.settings, "films", carried=(1,))
    client.add_view({"name": "films_raw", "collection": "films", "kind": "identity"})
    got = client.vectors(view="films_raw", ids=np.array([20, 11, 10, 20]))
    assert (got.version, got.view, got.dim, len(got)) == (version, "films_raw", 8, 4)
    assert got.status.tolist() == ["carried", "missing", "found", "carried"]
    assert got.found.tolist() == [True, False, True, True]
    np.testing.assert_array_equal(got.vectors[got.found], vectors[[1, 0, 1]])
    assert np.isnan(got.vectors[1]).all()
    rff = client.vectors("films", [10, 20], dtype="float16")
    assert rff.view == "films_rff"
    assert rff.vectors.dtype == np.float16
    assert client.vectors_table("films", [10, 11])["vector"].null_count == 1
    assert client.vectors("films", []).vectors.shape == (0, 16)
    for call in (lambda: client.vectors("films", [1], view="films_raw"), lambda: client.vectors(ids=[1])):
        with pytest.raises(ValueError, match="collection"):
            call()
    assert {"films_raw", "films_rff"} <= {view["name"] for view in client.views()}
    assert client.view("films_raw")["kind"] == "identity"
    best = client.neighbors("films", id=np.int64(10), k=2)["items"]
    assert len(best) == 2
    assert client.neighbors("films", vector=vectors[0], k=1, version=version)["items"][0]["id"] == 10
    with pytest.raises(ProblemError):
        client.neighbors("films", id=10, version="v000099")
    with pytest.raises(ValueError, match="needs id=, or vector="):
        client.neighbors("films")
    frequencies = load(client.layer("films_rff"))["frequencies"]
    phi = RandomFourierFeatures.from_frequencies(frequencies).transform(vectors[:1])
    np.testing.assert_allclose(client.vectors("films", [10]).vectors, phi, atol=1e-6)  # another order of summing
    client.delete_view("films_raw")
    with pytest.raises(ProblemError):
        client.view("films_raw")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_vectors_as_torch_and_as_polars(served: Served, client: Client, dtype: str):
    import polars as pl  # takes a second, of each worker that collects

    published.publish(served.settings, f"songs-{dtype}", carried=(1,))
    collection, ids = f"songs-{dtype}", [20, 11, 10, 20]
    plain = client.vectors(collection, ids, dtype=dtype)
    tensors = client.vectors(collection, torch.tensor(ids), dtype=dtype, as_="torch")
    assert tensors.vectors.dtype == getattr(torch, dtype)
    assert tensors.found.tolist() == [True, False, True, True]
    assert (tensors.version, tensors.status.tolist()) == (plain.version, plain.status.tolist())
    np.testing.assert_array_equal(tensors.vectors.numpy(), plain.vectors)
    assert tensors.vectors[tensors.found].add_(1).isfinite().all()  # its own memory, and writable
    frame = client.vectors(collection, pl.Series(ids), dtype=dtype, as_="polars")
    assert frame.columns == ["id", "status", "vector"]
    assert frame["id"].to_list() == ids
    assert frame["status"].to_list() == ["carried", "missing", "found", "carried"]
    assert frame["vector"].null_count() == 1
    np.testing.assert_array_equal(frame["vector"].drop_nulls().to_numpy(), plain.vectors[plain.found])
    with pytest.raises(ValueError, match="numpy, torch, polars"):
        client.vectors(collection, ids, as_="jax")  # type: ignore[arg-type]


def test_a_library_that_is_not_installed_is_named(served: Served, client: Client, monkeypatch: pytest.MonkeyPatch):
    published.publish(served.settings, "games")
    monkeypatch.setitem(sys.modules, "polars", None)  # what Python takes for "not to be found"
    with pytest.raises(ImportError, match="pip install polars"):
        client.vectors("games", [10], as_="polars")
    assert client.vectors("games", [10]).found.all()


def test_string_ids_of_any_kind_of_array(served: Served, client: Client):
    import polars as pl  # takes a second, of each worker that collects

    published.publish(served.settings, "words", ids=["a", "ä", "b"])
    for ids in (["ä", "zz"], np.array(["ä", "zz"]), pa.array(["ä", "zz"]), pl.Series(["ä", "zz"])):
        got = client.vectors("words", ids)
        assert got.ids.tolist() == ["ä", "zz"]
        assert got.found.tolist() == [True, False]


def test_more_ids_than_a_request_takes_are_of_one_version(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
):
    first, _ = published.publish(served.settings, "many", seed=1)
    asked: list[str] = []
    request = client.request

    def switch_after_the_first(*args: Any, **options: Any) -> Any:
        answer = request(*args, **options)
        asked.append(options["json"]["version"])
        if len(asked) == 1:
            published.publish(served.settings, "many", seed=2)
        return answer

    monkeypatch.setattr(client, "request", switch_after_the_first)
    ids = np.resize(np.arange(10, 510, 10), 20_001)
    ids[-1] = 11
    got = client.vectors("many", ids)
    assert asked == ["current", first, first]
    assert got.version == first
    np.testing.assert_array_equal(got.ids, ids)
    assert got.status[-1] == "missing"
    assert got.found[:-1].all()
    np.testing.assert_allclose(got.vectors[:50], got.vectors[10_000:10_050], atol=1e-6)  # another order of summing
    assert np.isnan(got.vectors[-1]).all()


def test_previous_comes_back_until_the_version_changes(served: Served, client: Client):
    published.publish(served.settings, "polled", seed=1)
    ids = [10, 20, 11]
    before = client.vectors("polled", ids)
    assert before.etag
    assert client.vectors("polled", ids, previous=before) is before
    assert client.vectors("polled", [20, 10, 11], previous=before) is not before
    second, _ = published.publish(served.settings, "polled", seed=2)
    after = client.vectors("polled", ids, previous=before)
    assert after.version == second
    assert client.vectors("polled", ids, previous=after) is after
    tensors = client.vectors("polled", ids, as_="torch")
    assert client.vectors("polled", ids, as_="torch", previous=tensors) is tensors


def test_what_other_ids_gave_does_not_come_back(served: Served, client: Client):
    """Where the first request is the same, and its etag says so."""
    published.publish(served.settings, "grown")
    ids = [10] * 10_000 + [20]
    before = client.vectors("grown", ids)
    assert client.vectors("grown", ids, previous=before) is before
    decimals = client.vectors("grown", [*map(str, ids)])
    assert client.vectors("grown", [*map(str, ids)], previous=decimals) is decimals
    for others in ([*ids, 30], ids[:10_000], [*ids[:10_000], 30]):
        assert client.vectors("grown", others, previous=before).ids.tolist() == others


@pytest.mark.parametrize("ids", [np.array([10, 11]), torch.tensor([10, 11]), [np.int64(10), np.int64(11)], (10, 11)])
def test_ids_of_any_kind_of_array_are_erased_and_readmitted(served: Served, client: Client, ids: Any):
    name = f"erased-{type(ids).__name__}".lower()
    published.publish(served.settings, name)
    assert client.erase(name, ids, "they asked")["rows"] == 1
    assert client.vectors(name, [10, 20]).status.tolist() == ["missing", "found"]
    assert client.readmit(name, ids, "they came back") == {"ids": 2}


@pytest.mark.parametrize("one", ["12", b"12", np.str_("12"), np.array("12"), 12, np.int64(12), torch.tensor(12)])
def test_one_id_is_not_taken_for_several(one: Any):
    """The characters of "12" are ids 1 and 2 of a collection of integers."""
    with Client("http://127.0.0.1:9", "k") as client:
        for call in (client.vectors, partial(client.erase, reason="asked"), partial(client.readmit, reason="asked")):
            with pytest.raises(TypeError, match=r"for a single id write \["):
                call("items", one)


def test_names_cannot_become_other_routes(client: Client):
    with pytest.raises(ProblemError) as caught:
        client.collection("../keys")
    assert caught.value.status in (404, 422)


# --- what is no service ----------------------------------------------------------------------------------------------


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with Client(url, "k") as client, pytest.raises(Unreachable, match="no service answers") as caught:
            client.jobs()
    assert "evenkeel serve" in caught.value.remedy


@pytest.mark.parametrize("url", ["http://[::1", "ftp://127.0.0.1", "127.0.0.1:8080"])
def test_unusable_addresses(url: str):
    with pytest.raises(Unreachable):
        with Client(url, "k") as client:
            client.jobs()


def test_key_with_characters_that_no_key_has():
    with pytest.raises(ServiceError, match="characters"):
        Client("http://127.0.0.1:1", "ek_ü")


class _Handler(http.server.BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, str, bytes]] = {}

    def do_GET(self) -> None:
        status, kind, body = next(answer for path, answer in self.answers.items() if self.path.startswith(path))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) + (100 if "snapshot" in self.path else 0)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def other_program() -> Iterator[str]:
    """Something else that speaks HTTP on the port."""
    _Handler.answers = {
        "/v1/jobs/page": (200, "text/html", b"<html>"),
        "/v1/jobs/proxy": (502, "text/html", b"<html>bad gateway"),
        "/v1/jobs/list": (400, "application/json", json.dumps([1]).encode()),
        "/v1/collections": (200, "application/octet-stream", b"cut short"),
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_what_no_header_can_hold_is_told(other_program: str, key: str):
    with Client(other_program, "k") as client, pytest.raises(ServiceError, match="cannot be written") as error:
        client.submit({}, idempotency_key=key)
    assert not isinstance(error.value, Unreachable)
    assert "idempotency keys" in error.value.remedy


def test_another_program_on_the_port(other_program: str, tmp_path: Path):
    with Client(other_program, "k") as client:
        with pytest.raises(ServiceError, match="not JSON"):
            client.job("page")
        with pytest.raises(ProblemError, match="502"):
            client.job("proxy")
        with pytest.raises(ProblemError, match="400"):
            client.job("list")
        with pytest.raises(Unreachable, match="broke off"):
            client.snapshot("items", tmp_path / "s.parquet")
    assert list(tmp_path.iterdir()) == []


def test_errors_survive_pickling():
    problem = ProblemError(422, "Invalid", "bad", [{"field": "a", "message": "b", "remedy": "c"}])
    again = pickle.loads(pickle.dumps(problem))
    assert (again.status, again.message, again.remedy) == (422, "bad\na: b", "c")
    assert pickle.loads(pickle.dumps(Unreachable("x", "y"))).remedy == "y"


def test_import_is_light():
    """The client is for other people's programs: no torch, and no numpy or Arrow before vectors are asked for."""
    heavy = "('torch', 'pyarrow', 'numpy', 'fastapi')"
    code = f"import sys, service.client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
