"""SIGKILL at a random step, again and again: the run goes on from its last checkpoint and ends with the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.support import forked
from tests.support.trained_runs import lead
from tests.trainer.launch.detached_runs import everything
from trainer.checkpoint.format import MANIFEST_FILE, _manifest_bytes, latest_valid
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks

STEPS_PER_EPOCH = 25


@pytest.mark.process
def test_a_run_killed_at_random_steps_ends_with_the_same_bits(make_run, small, tmp_path):
    seed = int(os.environ.get("EVENKEEL_TEST_SEED", "0"))
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Rare items: rows that are touched once an epoch and idle, decaying, across every cut.
    uri = small.write_rows(tmp_path / "rare.parquet", num_items=3000)
    settings = {"uri": uri, "checkpoint": {"every_steps": 7}}
    kept = []
    for attempt in (1, 2):
        run = make_run("killed", attempt=attempt, epochs=1000, **settings)  # none ends before it is killed
        process = forked.start(lead, run.directory, log=run.directory / "log.txt")
        deadline = time.monotonic() + 300
        before = kept[-1] if kept else 0
        while not ((found := newest_step(run.checkpoints)) is not None and found > before):
            assert process.exitcode is None, (run.directory / "log.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kept.append(latest_valid(run.checkpoints).extra["position"]["step"])
        assert kept[-1] > before

    epochs = kept[-1] // STEPS_PER_EPOCH + 3
    run = make_run("killed", attempt=3, epochs=epochs, **settings)
    assert execute(run, start_ranks) == 0
    whole = make_run("whole", epochs=epochs, **settings)
    assert execute(whole, start_ranks) == 0
    openings = [event for event in small.events(run.directory, "info") if "alpha" in event]
    assert [event["resumed_from_step"] for event in openings] == [None, *kept]
    first_told = next(event for event in small.events(run.directory, "progress") if event["attempt"] == 3)
    assert first_told["step"] > kept[-1]
    ended, expected = everything(latest_valid(run.checkpoints)), everything(latest_valid(whole.checkpoints))
    assert ended.keys() == expected.keys()
    assert [name for name in ended if not torch.equal(ended[name], expected[name])] == []
    last = ended["item.last_update_step"]
    steps = latest_valid(run.checkpoints).step
    assert bool(((last > 0) & (last < steps - 20)).any())  # rows did idle
    metrics = [(m["epoch"], m["split"], m.get("auc"), m.get("loss")) for m in small.events(whole.directory, "metric")]
    again = {(m["epoch"], m["split"]): m for m in small.events(run.directory, "metric")}
    assert [(*key, m.get("auc"), m.get("loss")) for key, m in sorted(again.items(), key=_position)] == metrics


def test_a_field_that_came_later_does_not_keep_a_run_from_its_checkpoint(make_run, trained_run, small):
    """The run began under a version whose jobs had neither; another job is another job all the same."""
    run = trained_run(epochs=1)
    file = latest_valid(run.checkpoints).path / MANIFEST_FILE
    body = json.loads(file.read_bytes())["manifest"]
    del body["extra"]["job"]["optimizer"]["schedule"], body["extra"]["job"]["kernel"]
    file.write_bytes(_manifest_bytes(body))
    assert execute(make_run(epochs=2, attempt=2), start_ranks) == 0
    opening = [event for event in small.events(run.directory, "info") if "alpha" in event][-1]
    assert opening["resumed_from_step"] == 25
    assert execute(make_run(epochs=3, attempt=3, seed=5), start_ranks) != 0
    assert "by a job with another seed" in small.events(run.directory, "error")[-1]["message"]


def _position(item) -> tuple[int, int]:
    (epoch, split), _ = item
    return epoch, ("train", "validation", "test").index(split)


def newest_step(folder: Path) -> int | None:
    """Without reading: the run is writing there at this moment."""
    names = sorted(path.name for path in folder.glob("step-*"))
    return int(names[-1].removeprefix("step-").split(".")[0]) if names else None
