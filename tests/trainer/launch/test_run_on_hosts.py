"""A run whose driver and ranks are on hosts that share no directory: nodes of a real Ray cluster, each with its own
cache, and an S3 server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from embeddings.store import open_store
from tests.contracts import store_servers
from tests.support.ray_cluster import Cluster
from tests.trainer.launch.detached_runs import everything, wait_for, wait_for_end
from trainer.checkpoint.select import pick
from trainer.launch.driver import execute
from trainer.runs import run_process
from trainer.runs.protocol import EXIT_CANCELLED, EXIT_FILE, LOG_FILE
from trainer.storage.folders import Folders
from trainer.storage.storage_registry import open_storage

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

# Each takes a whole node.
TWO = {"num_workers": 2, "cpus_per_worker": 2}
SETTINGS = {
    "checkpoint": {"every_steps": 20},
    "resources": TWO,
    "sharding": {"item": "row_wise", "user": "table_wise"},
    "publish": {"collection": "items", "feature": "item", "gate": {"mode": "off"}},
    "regularizers": {"early_stopping": {"keep": "last", "patience": 1000}},
}


@pytest.fixture
def hosts(two_ray_nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The shared cluster and an S3 server; the driver has a cache of its own too."""
    for name, value in two_ray_nodes.environment.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "driver-cache"))
    with store_servers.s3_server("runs", two_ray_nodes.s3_port):
        yield two_ray_nodes


def start(run, cluster: Cluster, warm_pool) -> None:
    (run.directory / EXIT_FILE).unlink(missing_ok=True)
    secret = {name: value for name, value in cluster.environment.items() if name.startswith("RAY_AUTH")}
    run_process.launch(run.directory, env={"OMP_NUM_THREADS": "1", **secret}, warm_pool=warm_pool)


def log_of(run) -> str:
    return (run.directory / LOG_FILE).read_text()[-6000:]


def test_a_run_trains_stops_goes_on_elsewhere_and_publishes(make_run, small, hosts, warm_pool, pooled_ranks) -> None:
    place = {"ray_address": f"127.0.0.1:{hosts.port}", "storage": "s3://runs/of/run"}
    run = make_run("first", epochs=1000, **place, **SETTINGS)
    start(run, hosts, warm_pool)
    checkpoints = Folders(open_storage(place["storage"]), "checkpoints")
    (run.directory / "events.jsonl").touch()
    wait_for(lambda: small.events(run.directory, "metric") and checkpoints.names(), run.directory)
    assert run_process.terminate(run.directory, grace_seconds=200) is True, log_of(run)
    assert json.loads((run.directory / EXIT_FILE).read_text())["code"] == EXIT_CANCELLED, log_of(run)
    assert "epoch 1 " in log_of(run), "what rank 0 says elsewhere is in the run's log"
    assert not run.checkpoints.exists(), "the driver has none of it"
    for cache in hosts.caches[1:]:
        ranks = cache / "runs" / run.run_id / "ranks"
        assert (ranks / "data").is_dir()
        assert not list((ranks / "checkpoints").glob("step-*"))

    stopped = pick(make_run("look", **place, **SETTINGS))[0].extra["position"]["step"]
    epochs = stopped // 25 + 2
    run = make_run("second", attempt=2, epochs=epochs, **place, **SETTINGS)
    start(run, hosts, warm_pool)
    ended = wait_for_end(run.directory)
    assert ended["code"] == 0, log_of(run)
    openings = [event for event in small.events(run.directory, "info") if "alpha" in event]
    assert [event["resumed_from_step"] for event in openings] == [stopped]
    assert all(count > 0 for count in openings[0]["rows_per_rank"]["item"])
    assert [event["epoch"] for event in small.metrics(run.directory, "train")] == list(
        range(stopped // 25 + 1, epochs + 1)
    )
    assert open_store(run.store_url).collection("items").current() is not None

    whole = make_run("whole", epochs=epochs, **SETTINGS | {"publish": None})
    assert execute(whole, pooled_ranks) == 0
    found, expected = everything(pick(run)[0]), everything(pick(whole)[0])
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []

    # What goes wrong on another host is told: one rank does.
    run = make_run(
        "wrong",
        **place | {"storage": "s3://runs/of/wrong"},
        **SETTINGS | {"resources": {"num_workers": 1}, "sharding": {}},
        optimizer={"kind": "sgd", "learning_rate": 1e38},
    )
    start(run, hosts, warm_pool)
    assert wait_for_end(run.directory)["error"]["code"] == "non_finite", log_of(run)
