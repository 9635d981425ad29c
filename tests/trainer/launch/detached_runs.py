"""What tests of detached runs watch: their ends, their newest checkpoints, every bit of one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.format import Checkpoint
from trainer.runs import run_process
from trainer.runs.protocol import EXIT_FILE, LOG_FILE


def wait_for(condition: Callable[[], object], directory: Path, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or (directory / EXIT_FILE).exists():
            pytest.fail(f"not seen in time; the log:\n{(directory / LOG_FILE).read_text()[-6000:]}")
        time.sleep(0.02)


def wait_for_end(directory: Path, seconds: float = 300.0) -> dict:
    deadline = time.monotonic() + seconds
    while run_process.is_alive(directory):
        assert time.monotonic() < deadline, (directory / LOG_FILE).read_text()[-6000:]
        time.sleep(0.05)
    return json.loads((directory / EXIT_FILE).read_text())


def newest_step(folder: Path) -> int:
    names = sorted(path.name for path in folder.glob("step-*"))
    return int(names[-1].removeprefix("step-").split(".")[0]) if names else 0


def everything(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    found = dict(checkpoint.read_dense())
    for table in checkpoint.tables:
        weight, state = checkpoint.read_rows(table)
        found |= {f"{table}.weight": weight, **{f"{table}.{key}": value for key, value in state.items()}}
    return found
