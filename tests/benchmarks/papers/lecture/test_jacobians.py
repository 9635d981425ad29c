"""Jacobians of towers by depth, against those of autograd; initial towers; labels that are corrupted in part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.papers.data import documents
from benchmarks.papers.lecture.corrupted_labels import corrupted, part
from benchmarks.papers.lecture.depth import by_depth
from benchmarks.papers.lecture.jacobians import LARGE, hidden_layers, jacobian_norms, scale_weights, with_moments_of
from trainer.checkpoint.format import latest_valid
from trainer.generalization.subject import Subject
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.models.layers.mlp import HiddenLayer, tower
from trainer.runs.directory import read_run

KINDS = {
    "plain": {},
    "batch_norm": {"batch_norm": True},
    "residual": {"residual": True},
    "both": {"residual": True, "batch_norm": True},
}


def made(kind: str, depth: int = 4, width: int = 5) -> torch.nn.Module:
    return tower([3, *[width] * depth, 1], seed=2, dtype=torch.float64, **KINDS[kind]).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_norms_are_those_of_autograd(kind: str) -> None:
    one, inputs = made(kind), torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with_moments_of(one, inputs)
    hidden = hidden_layers(one)
    found = jacobian_norms(one, inputs)
    assert len(found) == len(hidden) == 4
    first = hidden[0](inputs).detach()
    for layer in range(1, 5):
        upper = torch.nn.Sequential(*hidden[1:layer])
        squares = [torch.autograd.functional.jacobian(upper, row[None]).square().sum().item() / 5 for row in first]
        assert found[layer - 1] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-9)
    assert found[0] == pytest.approx(1.0)


def test_plain_towers_lose_the_signal_with_depth_and_shortcuts_do_not() -> None:
    inputs = torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert jacobian_norms(made("plain", 16, 32), inputs)[-1] < 1e-4
    assert 0.5 < jacobian_norms(made("residual", 16, 32), inputs)[-1] < 10


def test_large_weights_make_a_plain_tower_explode_and_leave_normalised_layers_alone() -> None:
    inputs = torch.randn(64, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    large = made("plain", 16, 32)
    scale_weights(large, LARGE)
    assert jacobian_norms(large, inputs)[-1] > 100
    norms = []
    for factor in (1.0, LARGE):
        normed = made("batch_norm", 16, 32)
        scale_weights(normed, factor)
        with_moments_of(normed, inputs)
        norms.append(jacobian_norms(normed, inputs)[-1])
    # But for its floor beside the variance, and biases, which do not grow.
    assert norms[1] == pytest.approx(norms[0], rel=0.5)


def test_normalisation_takes_the_moments_of_the_rows_layer_by_layer() -> None:
    one, inputs = made("batch_norm"), torch.randn(50, 3, dtype=torch.float64)
    with_moments_of(one, inputs)
    x = inputs
    for layer in one:
        if isinstance(layer, HiddenLayer):
            normed = layer.norm(layer.linear(x))
            assert normed.mean(dim=0).abs().max() < 1e-12
            assert normed.var(dim=0).sub(1).abs().max() < 1e-3
            x = layer(x)


def test_the_initial_tower_is_that_of_a_training_that_hardly_moved(make_run) -> None:
    run = make_run(
        "still", model={"kind": "dnn", "embedding_dim": 4, "hidden": [8, 8, 8], "residual": True}, epochs=1,
        optimizer={"kind": "sgd", "learning_rate": 1e-9}, dense_optimizer={"learning_rate": 1e-9},
    )  # fmt: skip
    assert execute(read_run(run.directory), start_ranks) == 0
    checkpoint = latest_valid(run.checkpoints)
    assert checkpoint is not None
    found = by_depth(Subject(run, checkpoint))
    assert len(found["initial"]) == len(found["large"]) == 3
    assert found["large"][-1] > 2 * found["initial"][-1]
    assert found["trained"] == pytest.approx(found["initial"], rel=1e-5)
    for what in ("cosine", "difference"):
        assert len(found[f"initial {what}"]) == 2
        assert found[f"trained {what}"] == pytest.approx(found[f"initial {what}"], rel=1e-4)
    assert min(found["initial difference"]) > 1e-9


def test_labels_are_permuted_among_a_share_of_the_rows_that_train(rows: Path, tmp_path: Path) -> None:
    whole = documents.dataset("clicks", rows, {"column": "click"})
    part(whole, tmp_path / "part.parquet", 2000)
    of = documents.dataset("clicks", tmp_path / "part.parquet", {"column": "click"})
    corrupted(of, tmp_path / "half.parquet", 0.5)
    before, after = pq.read_table(tmp_path / "part.parquet"), pq.read_table(tmp_path / "half.parquet")
    assert len(before) == 2000
    tests = before["is_test"].to_numpy()
    assert 100 < tests.sum() < 300
    assert after.drop_columns("click").equals(before.drop_columns("click"))
    old, new = before["click"].to_numpy(), after["click"].to_numpy()
    assert (old == new)[tests].all()
    assert old.sum() == new.sum()
    # Of half the rows, those change that get a label of the other class.
    share = old[~tests].mean()
    assert (old != new)[~tests].mean() == pytest.approx(0.5 * 2 * share * (1 - share), abs=0.05)
    written = (tmp_path / "half.parquet").stat().st_mtime_ns
    corrupted(of, tmp_path / "half.parquet", 0.5)
    assert (tmp_path / "half.parquet").stat().st_mtime_ns == written
