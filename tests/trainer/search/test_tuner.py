"""What ends trials early: the best third goes on, or none is ended, as the search says. No cluster is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.search.test_spec import DATASET, RATE, job_of
from trainer.search.folder import SearchFolder
from trainer.search.spec import parse_search
from trainer.search.tuner import scheduler

pytestmark = pytest.mark.slow  # Ray Tune is imported.


def decisions(folder: Path, epoch: int, figures: list[float], epochs: int = 9, **search: Any) -> list[str]:
    """What becomes of trials that report these figures after an epoch, one after the other."""
    found = SearchFolder.begin(folder, parse_search({"space": RATE} | search), job_of(epochs=epochs), DATASET)
    ends = scheduler(found)
    ends.set_search_properties(found.metric, found.mode)
    told = []
    for number, figure in enumerate(figures):
        trial = SimpleNamespace(trial_id=str(number), run_metadata=SimpleNamespace())
        ends.on_trial_add(None, trial)
        told.append(ends.on_trial_result(None, trial, {"epoch": epoch, found.metric: figure}))
    return told


@pytest.mark.parametrize(
    ("search", "epoch", "figures", "stopped"),
    [
        ({}, 1, [0.9, 0.8, 0.95, 0.7], [1, 3]),
        ({"metric": "logloss"}, 1, [0.1, 0.2, 0.05, 0.3], [1, 3]),
        ({"reduction_factor": 2}, 1, [0.9, 0.8, 0.85], [1, 2]),
        ({"grace_epochs": 3}, 1, [0.9, 0.8], []),
        ({"grace_epochs": 9}, 9, [0.9, 0.8], []),
        ({"scheduler": "none"}, 1, [0.9, 0.8], []),
    ],
    ids=["a third", "less is better", "half", "within grace", "nothing but grace", "none"],
)
def test_which_trials_end(
    search: dict[str, Any], epoch: int, figures: list[float], stopped: list[int], tmp_path: Path
) -> None:
    found = decisions(tmp_path / "search", epoch, figures, **search)
    assert [number for number, one in enumerate(found) if one == "STOP"] == stopped
