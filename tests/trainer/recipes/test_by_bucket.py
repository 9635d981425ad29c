"""The rows of AdamAR's ablation by bucket are the jobs that they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import row_buckets
from trainer.recipes import adamar, by_bucket
from trainer.spec.optimizer import NUM_BUCKETS
from trainer.spec.row_optimizer import row_optimizer


def optimizer(row: str, tried: str = "") -> Any:
    jobs = {trial.name: trial.job for trial in adamar.recipe(Path("nowhere"), 1).jobs}
    name = "/".join(part for part in ("epinions_by_bucket/dnn", row, tried, "seed-0") if part)
    return row_optimizer(jobs[name].optimizer, 0.001)


def test_each_row_has_the_optimizers_that_it_names() -> None:
    of = optimizer("AdamAR on 1 to 2", "decay 3")
    kinds = [type(of.optimizers[of.number_of(bucket)]).__name__ for bucket in range(6)]
    assert kinds == ["AdamW", "AdamAR", "AdamAR", "AdamW", "AdamW", "AdamW"]
    assert of.optimizers[of.number_of(3)].weight_decay == 3.0
    assert type(optimizer("AdamW", "decay 1")).__name__ == "AdamW"
    assert type(optimizer("AdamAR")).__name__ == "AdamAR"


@pytest.mark.parametrize("name", by_bucket.MEAN_OCCURRENCES)
def test_the_occurrences_are_those_of_the_training_rows(name: str, real_data: Path, tmp_path: Path) -> None:
    trials = adamar.recipe(real_data, 1, rows=tmp_path).jobs
    trial = next(one for one in trials if one.name == f"{name}_by_bucket/dnn/AdamAR/seed-0")
    data = prepare(trial.dataset, trial.job, tmp_path / "data")
    rows, occurrences = np.zeros(NUM_BUCKETS + 1), np.zeros(NUM_BUCKETS + 1)
    for table in data.tables:
        buckets = row_buckets(data, table)
        rows += np.bincount(buckets, minlength=NUM_BUCKETS + 1)
        occurrences += np.bincount(buckets, data.row_counts(table), NUM_BUCKETS + 1)
    assert by_bucket.MEAN_OCCURRENCES[name] == pytest.approx(occurrences[1:] / rows[1:], rel=0.005)


def test_proposition_1_decays_by_one_over_the_occurrences() -> None:
    decays = [one.weight_decay for one in optimizer(by_bucket.PROPOSITION_1, "decay 3").optimizers[1:]]
    occurrences = by_bucket.MEAN_OCCURRENCES["epinions"]
    assert decays == pytest.approx([3.0 * occurrences[0] / mean for mean in occurrences])
