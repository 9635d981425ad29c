"""Real training jobs of a real service: what its gate publishes and holds, and jobs whose store is in Redis or in
object storage."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.client import Client
from tests.contracts import store_servers
from tests.service import serving
from tests.service.serving import Served
from trainer.runs.run_process import terminate
from trainer.storage.storage_registry import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.end_to_end, pytest.mark.timeout(1800)]

USERS, ITEMS, ROWS = 300, 150, 30_000
WAIT_SECONDS = 900.0


def likes(data: Path) -> dict[str, Any]:
    """A dataset of users who like what their taste says, as its file and manifest; movies have one of three kinds."""
    rng = np.random.default_rng(0)
    item_taste = np.repeat(np.eye(3, 4), ITEMS // 3, axis=0) + 0.3 * rng.standard_normal((ITEMS, 4))
    taste = 1.5 * rng.standard_normal((USERS, 4)) @ item_taste.T
    user, item = rng.integers(0, USERS, ROWS), rng.integers(0, ITEMS, ROWS)
    like = rng.random(ROWS) < 1 / (1 + np.exp(-taste[user, item]))
    pq.write_table(pa.table({"user": user, "item": item, "click": like.astype("int8")}), data / "likes.parquet")
    kinds = pa.table({"id": np.arange(ITEMS), "label": np.repeat(["a", "b", "c"], ITEMS // 3)})
    pq.write_table(kinds, data / "kinds.parquet")
    return {
        "name": "likes",
        "uri": str(data / "likes.parquet"),
        "features": {"user": {}, "item": {}},
        "label": {"column": "click"},
    }


def job(name: str, seed: int, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "dataset": {"name": "likes"},
        "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 8, "init": {"kind": "hash", "std": 0.1}},
        "optimizer": {"kind": "adamw", "learning_rate": 0.01, "weight_decay": 0.2},
        "epochs": 20,
        "batch_size": 512,
        "seed": seed,
        "publish": {"collection": "things", "feature": "item"},
        **fields,
    }


def refresh(seed: int) -> dict[str, Any]:
    """What a schedule would submit: an epoch from what is served."""
    return job("refresh", seed, epochs=1, init_from={"collection": "things", "version": "current"})


def finished(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    ended = client.wait(client.submit(body)["id"], timeout_seconds=WAIT_SECONDS)
    assert ended["state"] == "succeeded", ended["error"]
    return ended


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A service that trains. The parameter: where its store is, the home itself where there is none."""
    store = request.getfixturevalue(request.param) if hasattr(request, "param") else {}
    with serving.serving(tmp_path, "all", **store) as served:
        with Client(served.url, served.key) as client:
            client.add_dataset(likes(served.data))
        yield served
    for run in (tmp_path / "home" / "runs").glob("job_*"):
        terminate(run, 0)


@pytest.fixture
def in_redis(tmp_path: Path) -> Iterator[dict[str, str]]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with store_servers.redis_server(folder) as server:
        yield {"EVENKEEL_STORE_URL": f"{server.url}?cache={tmp_path / 'cache'}&prefix=jobs:"}


@pytest.fixture
def in_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    for name, value in store_servers.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with store_servers.s3_server() as address:
        url = f"s3://vectors/jobs?endpoint_override={address}&scheme=http&cache={tmp_path / 'cache'}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        runs = {"EVENKEEL_RUN_STORAGE": "s3://vectors/runs", "EVENKEEL_CACHE": str(tmp_path / "cache-of-runs")}
        monkeypatch.setenv("EVENKEEL_RUN_STORAGE", runs["EVENKEEL_RUN_STORAGE"])
        yield {"EVENKEEL_STORE_URL": url, "AWS_ENDPOINT_URL": f"http://{address}", **runs, **store_servers.CREDENTIALS}


def command(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [serving.EVENKEEL, *arguments], env=served.environment(), capture_output=True, text=True, check=False
    )


def test_an_honest_refresh_is_published_and_a_broken_one_held(served: Served) -> None:
    with Client(served.url, served.key) as client:
        finished(client, job("first", 0))
        said = command(served, "canaries", "add", "things", "kind", str(served.data / "kinds.parquet"))
        assert said.returncode == 0, said.stderr
        honest = finished(client, refresh(7))["publication"]
        assert honest["status"] == "published", honest["reasons"]
        manifest = client.version("things")
        assert (manifest["version"], manifest["canaries"]) == (honest["version"], ["kind"])

        # Of another start, hardly trained: a refresh that consumers would notice.
        broken = finished(client, job("broken", 8, epochs=1))["publication"]
        assert broken["status"] == "held"
        assert "cosine_mean" in {check["metric"] for check in broken["gate"] if check["verdict"] == "fail"}
        assert client.version("things")["version"] == honest["version"]


@pytest.mark.parametrize("served", ["in_redis", "in_s3"], indirect=True)
def test_a_job_publishes_to_a_store_elsewhere_and_refreshes_from_it(served: Served) -> None:
    with Client(served.url, served.key) as client:
        earliest = finished(client, job("first", 0, epochs=5))
        first = earliest["publication"]
        again = finished(client, refresh(1))["publication"]
        assert [first["status"], again["status"]] == ["published", "published"], again["reasons"]
        assert client.version("things")["parent"] == first["version"]
        for name, version in (("current", again["version"]), (first["version"], first["version"])):
            assert client.version("things", name)["version"] == version
        got = client.vectors("things", list(range(ITEMS)))
        assert got.version == again["version"]
        assert np.isfinite(got.vectors).all()
        assert set(got.status.tolist()) == {"found"}
        if (runs := os.environ.get("EVENKEEL_RUN_STORAGE")) is not None:
            held = {one.name.partition("/")[0] for one in open_storage(runs).list("")}
            ran = {one["id"] for one in client.jobs()}
            assert held == ran
            client.delete_job(earliest["id"])  # its processes are long gone; those of the last may just be ending
            assert {one.name.partition("/")[0] for one in open_storage(runs).list("")} == ran - {earliest["id"]}
    assert not (served.home / "store").exists(), "nothing of it is kept at home"
