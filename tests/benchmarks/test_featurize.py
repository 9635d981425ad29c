"""The benchmark of features, alignment and average at a small size: its lines, and that peers are compared first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import featurize
from benchmarks.support.harness import MIN_ITERATIONS


def test_lines(tmp_path: Path) -> None:
    plain, blocks = featurize.features(3000, MIN_ITERATIONS)
    assert (plain["case"], plain["peer"], blocks["peer"]) == ("64->128", "numpy", "numpy_blocks")
    assert plain["items_per_second"] > 0
    line = featurize.align_ema(2000, MIN_ITERATIONS)
    assert line["case"] == "align_ema 2000 x 64"
    assert 0 < line["best_seconds"] <= line["seconds"]
    line = featurize.fetch(tmp_path, 2000, MIN_ITERATIONS)
    assert line["case"] == "fetch 1000"
    assert "added_ms" in line


def test_unequal_answers_are_no_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(featurize, "plain_features", lambda h, u: np.zeros((len(h), 2 * len(u)), np.float32))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        featurize.features(3000, MIN_ITERATIONS)
