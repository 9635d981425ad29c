"""The compose file from nothing: a first version by an older image, its upgrade, a refresh that loses a worker.

What is seen goes on from test to test, as an operator's day does: one stack for all of them.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.containers.engine import ROOT, Engine, why_not
from tests.containers.stack import OURS, SERVICES, Stack, in_order, until

pytestmark = [
    pytest.mark.skipif(
        "EVENKEEL_TEST_CONTAINERS" not in os.environ, reason="no podman asked for: make test-containers"
    ),
    pytest.mark.containers,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(0),
]

IDS = tuple(str(item) for item in range(1, 21))
JOB = """
name: clicks
uri: /data/clicks.parquet
features: {user: {type: id}, item: {type: id}}
label: {column: click}
---
spec_version: 1
name: first
dataset: {name: clicks}
model: {kind: two_tower, embedding_dim: 4, hidden: [8]}
optimizer: {kind: adam_ar, learning_rate: 0.1, alpha: 0.003}
batch_size: 96
epochs: 3
checkpoint: {every_steps: 25}
resources: {num_workers: 2, cpus_per_worker: 1}
sharding: {item: row_wise, user: row_wise}
publish: {collection: items, feature: item, gate: {mode: "off"}}
"""
DAILY = (
    JOB.split("---\n")[1]
    .replace("name: first", "name: daily")
    .replace("dataset: {name: clicks}", "dataset: {name: clicks}\ninit_from: {collection: items, version: current}")
    .replace("feature: item,", "feature: item, align: true,")
    .replace("epochs: 3", "epochs: 12")
)


class Day(NamedTuple):
    """What the tests of a module hand on."""

    stack: Stack
    engine: Engine
    tag: str
    seen: dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    engine = Engine(tmp_path_factory.mktemp("engine"))
    engine.provide(tmp_path_factory.mktemp("bases"))
    return engine


@pytest.fixture(scope="module")
def tag(engine: Engine) -> str:
    """An image of this code: EVENKEEL_TEST_IMAGE names the tag of one that is built."""
    tag = os.environ.get("EVENKEEL_TEST_IMAGE")
    if tag is None:
        tag = "of-test-containers"
        engine.image(tag)
    assert engine.has(f"evenkeel:{tag}")
    return tag


@pytest.fixture(scope="module")
def day(engine: Engine, tag: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """The stack, started with the older image."""
    folder = tmp_path_factory.mktemp("stack")
    older, commit = engine.older_image(folder)
    stack = Stack(engine, folder, older)
    write_rows(folder / "data" / "clicks.parquet")
    for name, text in (("job", JOB), ("daily", DAILY)):
        (folder / "data" / f"{name}.yaml").write_text(text)
    try:
        for name in in_order():
            if name == "grafana" and not engine.has(SERVICES[name]["image"]):
                continue  # not in Debian: what it would be given is held by tests/service/ops/test_grafana.py
            stack.up(name, **({"ray_worker": 2} if name == "ray-worker" else {}))
        stack.key = stack.compose("exec", "-T", "api-1", "cat", "/var/lib/evenkeel/admin.key").strip()
        yield Day(stack, engine, tag, {"commit": commit})
    finally:
        stack.down()


def write_rows(path: Path, count: int = 3000) -> None:
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 60, count), (rng.random(count) ** 2 * 120).astype(np.int64)
    click = (rng.random(count) < np.array([0.05, 0.4, 0.95])[item % 3]).astype(np.int64)
    pq.write_table(pa.table({"user": user, "item": item, "click": click}), path, row_group_size=count // 4)
    path.chmod(0o644)
    path.parent.chmod(0o755)


def revision(stack: Stack) -> str:
    """The migration that the database is at."""
    (container,) = stack.containers("postgres")
    asked = ("psql", "-h", "/var/run/postgresql", "-U", "evenkeel", "-Atc", "select version_num from alembic_version")
    return stack.engine.run("podman", "exec", container, *asked).strip()


@pytest.mark.parametrize("kind", ["user", "no_compiler", "read_only"])
def test_the_image(engine: Engine, tag: str, kind: str) -> None:
    strict = ("--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--entrypoint=sh")
    script = {
        "user": 'test "$(id -u):$(id -g)" = 10001:10001',
        "no_compiler": "! command -v cc c++ gcc g++ clang tcc zig && ! python -c 'import ziglang' 2>/dev/null",
        "read_only": "! touch /opt/evenkeel/x /home/evenkeel/x 2>/dev/null && touch /tmp/x && evenkeel --version",
    }[kind]
    engine.run("podman", "run", *strict, f"evenkeel:{tag}", "-ec", script)


def test_a_first_version_by_ranks_in_two_containers(day: Day) -> None:
    stack = day.stack
    stack.evenkeel("datasets", "add", "/data/job.yaml")
    job = stack.told("submit", "/data/job.yaml")["id"]
    assert stack.published(job)["attempt"] == 1
    day.seen["revision"] = revision(stack)
    day.seen["vectors"] = stack.vectors(*IDS)
    assert {one["status"] for one in day.seen["vectors"]["items"]} == {"found"}


def test_prometheus_sees_each_process_and_has_the_rules(day: Day) -> None:
    (container,) = day.stack.containers("prometheus")

    def asked(path: str) -> Any:
        fetch = ("wget", "-q", "-O", "-", f"http://localhost:9090/api/v1/{path}")
        return json.loads(day.engine.run("podman", "exec", container, *fetch))["data"]

    def up() -> bool:
        targets = asked("targets")["activeTargets"]
        return {one["labels"]["instance"] for one in targets if one["health"] == "up"} == {f"{n}:8080" for n in OURS}

    until(up, lambda: asked("targets"))
    rules = {rule["name"] for group in asked("rules")["groups"] for rule in group["rules"]}
    written = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    assert rules == {rule["alert"] for group in written["groups"] for rule in group["rules"]}
    until(lambda: asked("query?query=evenkeel_collection_rows")["result"])


class Fetches:
    """Somebody who fetches vectors all the while, through the port of the proxy."""

    def __init__(self, stack: Stack):
        self.count, self.wrong = 0, []
        self._stack, self._ended = stack, threading.Event()
        self._thread = threading.Thread(target=self._fetch, daemon=True)

    def __enter__(self) -> Fetches:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def _fetch(self) -> None:
        while not self._ended.wait(0.1):
            self.count += 1
            try:
                self._stack.vectors(*IDS)
            except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                self.wrong.append(repr(error))


def test_an_upgrade_migrates_reads_the_store_and_is_not_noticed(day: Day) -> None:
    stack = day.stack
    stack.settings["EVENKEEL_TAG"] = day.tag
    with Fetches(stack) as fetches:
        for name in ("scheduler", "api-1", "api-2", "vectors"):
            stack.up(name)
    for name in ("ray-head", "ray-worker"):
        stack.up(name, **({"ray_worker": 2} if name == "ray-worker" else {}))
    for name in (*OURS, "ray-head", "ray-worker"):
        images = {stack.inspect(one)["ImageName"].split("/")[-1] for one in stack.containers(name)}
        assert images == {f"evenkeel:{day.tag}"}, name
    assert fetches.count > 20
    assert fetches.wrong == []
    newest = sorted(path.stem for path in (ROOT / "service/core/migrations/versions").glob("0*.py"))[-1]
    assert revision(stack) == newest.split("_")[0] != day.seen["revision"]
    assert stack.vectors(*IDS) == day.seen["vectors"]


def test_a_refresh_goes_on_without_the_worker_that_is_killed(day: Day) -> None:
    stack = day.stack
    stack.evenkeel("schedules", "add", "daily", "/data/daily.yaml", "--cron", "0 3 * * *")
    stack.evenkeel("schedules", "trigger", "daily", "--date", "2026-11-25")
    (job,) = until(lambda: [one["id"] for one in stack.told("jobs") if one["name"] == "daily"])
    stack.wait(job, lambda job: job["metrics"])
    killed = next(one for one in stack.containers("ray-worker") if ranks(day.engine, one))
    day.engine.run("podman", "kill", killed)
    done = stack.published(job)
    assert done["attempt"] == 2
    assert [one["epoch"] for one in done["metrics"] if one["split"] == "train"] == list(range(1, 13))
    assert len(stack.told("versions", "items")) == 2
    assert stack.vectors(*IDS)["version"] != day.seen["vectors"]["version"]


def ranks(engine: Engine, container: str) -> int:
    """How many ranks of runs there are in a container."""
    return engine.run("podman", "top", container, "args").count("ray::RankActor")
