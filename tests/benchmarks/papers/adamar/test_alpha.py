"""Recipe ``alpha``: half-lives to alphas and back, and what its findings say of figures that are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.adamar import alpha
from benchmarks.papers.trials.trial import Trial
from trainer.distributed.build import DEFAULT_HALF_LIFE, default_alpha


@pytest.mark.parametrize("half_life", alpha.HALF_LIVES)
def test_an_idle_row_has_half_its_norm_after_the_half_life(half_life: float) -> None:
    """The product of the decays themselves, which the recipe's formula approximates for small alpha."""
    steps_per_epoch = 740
    decay = alpha.alpha_of(half_life, steps_per_epoch * 512, 512)
    idle = round(half_life * steps_per_epoch)
    norm = math.prod(1.0 - decay * i for i in range(idle + 1))
    assert norm == pytest.approx(0.5, abs=0.02)


def test_the_default_is_the_half_life_that_the_recipe_judges() -> None:
    assert DEFAULT_HALF_LIFE in alpha.HALF_LIVES
    assert default_alpha(602) == pytest.approx(alpha.alpha_of(DEFAULT_HALF_LIFE, 616_029, 1024), rel=0.02)


def test_the_default_alpha_goes_with_the_square_of_the_batch_size() -> None:
    assert default_alpha(100) == pytest.approx(16 * default_alpha(400))


def test_findings_take_the_best_half_life_of_each_case_and_what_one_for_all_costs() -> None:
    recipe = alpha.recipe(Path("nowhere"), 1, True)
    figures = {
        "quick, batch 128": {"Adam": 0.60, "half-life 0.05": 0.63, "half-life 0.3": 0.66, "half-life 0.8": 0.64},
        "quick, batch 512": {"Adam": 0.60, "half-life 0.05": 0.61, "half-life 0.3": 0.62, "half-life 0.8": 0.63},
    }
    records = {trial.key: _record(trial, figures[trial.column][trial.row]) for trial in recipe.trials}
    found = alpha.findings(recipe, records, Path())
    each, everywhere = found.sections
    assert each.lines == (
        ("quick, batch 128", "0.3", "0.6600", "0.0000", "+0.0600"),
        ("quick, batch 512", "0.8", "0.6300", "0.0100", "+0.0200"),
    )
    assert everywhere.lines == (
        ("0.05", "0.0250", "0.0300"),
        ("0.3", "0.0050", "0.0100"),
        ("0.8", "0.0100", "0.0200"),
    )
    assert [verdict for verdict, _, _ in found.claims] == ["holds", "does not hold"]


def test_a_case_of_which_a_half_life_is_missing_is_not_judged() -> None:
    recipe = alpha.recipe(Path("nowhere"), 1, True)
    records = {trial.key: _record(trial, 0.6) for trial in recipe.trials}
    gone = next(trial for trial in recipe.trials if trial.row == "half-life 0.05")
    found = alpha.findings(recipe, {key: one for key, one in records.items() if key != gone.key}, Path())
    assert [line[0] for line in found.sections[0].lines] == ["quick, batch 512"]
    assert len(found.claims) == 1


def _record(trial: Trial, auc: float) -> dict[str, Any]:
    """The last epoch's figures; the ones before are lower on validation."""
    metrics = [
        {"epoch": epoch, "split": split, "auc": auc - 0.01 * (4 - epoch) - (0.1 if split == "test" else 0.0)}
        for epoch in (1, 2, 3, 4)
        for split in ("validation", "test")
    ]
    return {"key": trial.key, "name": trial.name, "state": "done", "metrics": metrics, "alpha": None, "error": None}
