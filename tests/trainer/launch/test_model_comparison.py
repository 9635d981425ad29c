"""A refresh's model beside the served version's: on rows that neither was trained on, on any number of ranks."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embeddings.refresh.model_comparison import ModelComparison
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.publishing.publish import comparison_of
from trainer.runs.directory import read_run

pytestmark = pytest.mark.slow

PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "report", "calibrate": "off"}}
SETTINGS = {"publish": PUBLISH, "epochs": 2, "sse": {}}


def clicks(path, seed, **changes):
    """Rows of one day: two users in three, of whom each has a taste for items of one of three kinds."""
    rng = np.random.default_rng(seed)
    num_rows = changes.get("num_rows", 6000)
    user, item = rng.integers(0, 150, num_rows), (rng.random(num_rows) ** 1.5 * 90).astype(np.int64)
    likes = (user + item) % 3 == 0
    click = (rng.random(num_rows) < np.where(likes, 0.8, 0.1)).astype(np.int64)
    if changes.get("shuffled"):
        click = rng.permutation(click)
    columns = {"user": user, "item": item, "click": click, "day": np.full(num_rows, seed), "hour": rng.random(num_rows)}
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def refresh(make_run, tmp_path):
    def run(name, seed, parent=None, warm=True, start=start_ranks, **changes):
        shuffled = changes.pop("shuffled", False)
        settings = SETTINGS | {"uri": clicks(tmp_path / f"{name}.parquet", seed, shuffled=shuffled)} | changes
        if parent is not None:
            settings |= {"parent_version": "v000001", "served_checkpoint": str(parent.checkpoints)}
            settings |= {"init_checkpoint": str(parent.checkpoints)} if warm else {}
        made = make_run(name, **settings)
        assert execute(made, start) == 0, (made.directory / "events.jsonl").read_text()[-2000:]
        return made

    return run


def told(run):
    events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["type"] == "comparison"]


def test_first(refresh):
    first = refresh("first", 1)
    assert comparison_of(first) == ModelComparison(None, (), "no version is served yet")
    second = refresh("second", 2, first)
    print(comparison_of(second), told(second))
    third = refresh("third", 3, first, warm=False)
    print(comparison_of(third), told(third))
    fourth = refresh("fourth", 4, first, shuffled=True, epochs=4)
    print(comparison_of(fourth), told(fourth))
