"""The rows of the ablation are the jobs that they say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.by_frequency import METHODS, settings
from trainer.spec import Optimizer, parse_job
from trainer.spec.row_optimizer import row_optimizer

OCCURRENCES = [2.0, 4.0, 8.0, 16.0, 32.0]


def optimizer(method: str) -> Any:
    changes = Optimizer().model_copy(update=settings(method, 0.001, 0.8, OCCURRENCES))
    document = {"name": "job", "dataset": {"name": "rows"}, "model": {"kind": "dnn"}}
    job = parse_job({**document, "optimizer": changes.model_dump(mode="json", exclude_defaults=True)})
    return row_optimizer(job.optimizer, 0.001)


def by_bucket(method: str) -> list[str]:
    found = optimizer(method)
    return [type(found.optimizers[found.number_of(bucket)]).__name__ for bucket in range(1, 6)]


def test_each_row_has_the_optimizers_that_it_names() -> None:
    assert METHODS[:5] == ("AdamW", "AR 1..1", "AR 1..2", "AR 1..3", "AR 1..4")
    assert by_bucket("AR 1..2") == ["AdamAR", "AdamAR", "AdamW", "AdamW", "AdamW"]
    assert [type(optimizer(method)).__name__ for method in ("AdamW", "AdamAR")] == ["AdamW", "AdamAR"]


def test_proposition_1_decays_by_one_over_the_occurrences() -> None:
    decays = [one.weight_decay for one in optimizer("proposition 1").optimizers[1:]]
    assert decays == pytest.approx([0.8, 0.4, 0.2, 0.1, 0.05])
