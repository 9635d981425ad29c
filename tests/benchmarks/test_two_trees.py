"""Two checkouts in turns: each process times its own tree, and a folder that is none is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import two_trees

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_trees, "SIZE", {"dim": 4, "num_rows": 50, "num_ids": 8, "num_steps": 2})


@pytest.mark.process
def test_one_tree_twice_is_timed_by_both_processes() -> None:
    before, after, ratio = two_trees.compare(ROOT, ROOT, "step/adam_ar", rounds=2, calls=2)
    assert before > 0.0
    assert after > 0.0
    assert 0.01 < ratio < 100.0


@pytest.mark.process
def test_a_folder_that_is_no_checkout_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=f"the process of {tmp_path} ended"):
        two_trees.Tree(tmp_path, "lookup/sgd")
    assert f"{tmp_path} is no checkout" in capfd.readouterr().err
