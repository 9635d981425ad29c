"""A small click log with a pattern to learn, and jobs on it that train in a second."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.pool import RankFailure
from tests.support.trained_runs import TrainedRuns
from tests.support.warm_pool import WarmPoolOfTests
from trainer.launch.driver import RanksFailed
from trainer.launch.worker import train_rank
from trainer.runs.directory import Run, read_run, write_run
from trainer.runs.warm_pool import WarmPool
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job

NUM_ITEMS = 120


def write_rows(path: Path, *, num_rows: int = 3000, seed: int = 0, num_items: int = NUM_ITEMS) -> Path:
    """user, item, click: items are bad, fair or good (number modulo 3), for one user in four the other way round."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 60, num_rows), (rng.random(num_rows) ** 2 * num_items).astype(np.int64)
    quality = np.where(user % 4 == 0, 2 - item % 3, item % 3)
    click = (rng.random(num_rows) < np.array([0.05, 0.4, 0.95])[quality]).astype(np.int64)
    pq.write_table(pa.table({"user": user, "item": item, "click": click}), path)
    return path


FEATURES: dict[str, Any] = {"user": {"type": "id"}, "item": {"type": "id"}}


def small_dataset(path: Path, features: dict[str, Any] = FEATURES) -> DatasetSpec:
    return parse_dataset({"name": "clicks", "uri": str(path), "features": features, "label": {"column": "click"}})


def small_job(**changes: Any) -> JobSpec:
    """25 steps an epoch of 96 examples, with AdamAR and SSE."""
    document: dict[str, Any] = {
        "name": "small",
        "dataset": {"name": "clicks"},
        "model": {"kind": "two_tower", "embedding_dim": 4, "hidden": [8]},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.1, "alpha": 0.003},
        "dense_optimizer": {"kind": "adam", "learning_rate": 0.02},
        "sse": {"item": {"probability": 0.05}},
        "epochs": 2,
        "batch_size": 96,
        "checkpoint": {"every_steps": 10},
        "resources": {"num_workers": 1},
    }
    return parse_job(document | changes)


def metrics_of(directory: Path, split: str) -> list[dict[str, Any]]:
    return [event for event in events_of(directory, "metric") if event["split"] == split]


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


@contextlib.contextmanager
def meanwhile(condition: Callable[[], Any], action: Callable[[], None]) -> Iterator[None]:
    """Does ``action`` once, in another thread, as soon as ``condition`` holds while the body runs.

    The thread ends with the body: it never acts on what a later test does. Raises what it raised, and fails if the body
    ended before the condition held.
    """
    ended, problems = threading.Event(), []

    def watch() -> None:
        try:
            while not condition():
                if ended.wait(0.02):
                    problems.append(AssertionError("the body ended before the condition held"))
                    return
            action()
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=watch, name="meanwhile")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if problems:
        raise problems[0]


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """The functions above, for tests that take them as a fixture."""
    return SimpleNamespace(
        write_rows=write_rows,
        dataset=small_dataset,
        job=small_job,
        metrics=metrics_of,
        events=events_of,
        meanwhile=meanwhile,
    )


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "clicks.parquet")


@pytest.fixture
def make_run(tmp_path: Path, rows: Path) -> Callable[..., Run]:
    """``make_run(name, job fields ..., uri=..., features=..., init_checkpoint=...)``: a run, ready to be led."""

    def make(name: str = "run", **changes: Any) -> Run:
        places = {
            key: changes.pop(key)
            for key in (
                "init_checkpoint",
                "served_checkpoint",
                "parent_version",
                "attempt",
                "ray_address",
                "lease",
                "storage",
                "workers",
            )
            if key in changes
        }
        dataset = small_dataset(changes.pop("uri", rows), changes.pop("features", FEATURES))
        directory = write_run(
            tmp_path / name,
            run_id=name,
            job=small_job(**changes),
            dataset=dataset,
            store_url=str(tmp_path / "store"),
            **places,
        )
        return read_run(directory)

    return make


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> TrainedRuns:
    """``trained_runs.finish(run)``: a run just written, trained; once a session for all that are alike."""
    return TrainedRuns(tmp_path_factory.mktemp("trained-runs"))


@pytest.fixture
def trained_run(make_run: Callable[..., Run], trained_runs: TrainedRuns) -> Callable[..., Run]:
    """``make_run``, finished."""
    return lambda name="run", **changes: trained_runs.finish(make_run(name, **changes))


@pytest.fixture(scope="session")
def pooled_ranks(ranks: Callable[[int], Any]) -> Callable[[Run], None]:
    """trainer.launch.on_host.start_ranks, but for processes of its own: the ranks are those of the session's pool."""

    def start(run: Run) -> None:
        try:
            ranks(run.job.resources.num_workers).run(train_rank, str(run.directory))
        except RankFailure as error:
            raise RanksFailed(str(error)) from error

    return start


@pytest.fixture(scope="session")
def warm_pool() -> Iterator[WarmPool]:
    """The process that runs are forked from: its imports are paid for once."""
    found = WarmPoolOfTests()
    yield found
    found.close()
