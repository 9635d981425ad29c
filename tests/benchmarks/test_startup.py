"""The parts that benchmarks.startup reads from a run's events: they add up, and each is what it is called."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from benchmarks.startup import parts_of

SUBMITTED = 1_800_000_000.0


def write_events(directory: Path, told: list[tuple[float, dict[str, object]]]) -> None:
    lines = []
    for seconds, fields in told:
        time = datetime.datetime.fromtimestamp(SUBMITTED + seconds, datetime.UTC)
        lines.append(json.dumps({"time": time.isoformat().replace("+00:00", "Z"), "attempt": 1, **fields}))
    (directory / "events.jsonl").write_text("\n".join(lines) + "\n")


def test_parts_of_a_run_add_up(tmp_path: Path) -> None:
    phase = {"type": "phase"}
    write_events(
        tmp_path,
        [
            (1.0, {"type": "state", "state": "starting"}),
            (3.0, phase | {"name": "prepare", "seconds": 2.0}),
            (4.5, phase | {"name": "build", "seconds": 0.5}),
            (5.0, {"type": "progress", "step": 1}),
            (8.0, phase | {"name": "evaluation", "seconds": 0.75}),
            (9.0, {"type": "progress", "step": 50}),
            (9.5, phase | {"name": "evaluation", "seconds": 0.25}),
            (9.75, phase | {"name": "checkpoint", "seconds": 0.25}),
            (11.0, phase | {"name": "publish", "seconds": 1.0}),
            (11.5, {"type": "state", "state": "succeeded"}),
        ],
    )
    found = parts_of(tmp_path, SUBMITTED, SUBMITTED + 12.0)
    assert found["submit_to_first_step_seconds"] == 5.0
    assert found["last_step_to_published_seconds"] == 3.0
    assert found["total_seconds"] == 12.0
    assert found["parts"] == {
        "queue": 0.0, "process": 1.0, "prepare": 2.0, "cluster": 0.0, "workers": 1.0, "build": 0.5, "first step": 0.5,
        "evaluation": 1.0, "checkpoint": 0.25, "publish": 1.0, "end": 0.5, "training": 4.25,
    }  # fmt: skip
    assert sum(found["parts"].values()) == pytest.approx(found["total_seconds"])
