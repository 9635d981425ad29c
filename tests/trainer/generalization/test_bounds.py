"""Bounds on the gap: formulas, the distance that parameters went, labels by fair coins, measures of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import softplus

from benchmarks.papers.data import documents
from trainer.checkpoint.format import latest_valid
from trainer.generalization import bounds
from trainer.generalization.label_randomization import coins
from trainer.generalization.measures import last_layer, measures, random_fit
from trainer.generalization.parameters import Point
from trainer.generalization.subject import Subject
from trainer.launch.driver import execute
from trainer.launch.on_host import start_ranks
from trainer.runs.directory import Run, read_run


def test_the_loss_is_the_probability_of_the_wrong_label() -> None:
    right = np.array([0.9, 0.5, 0.2])
    assert bounds.wrong(-np.log(right)) == pytest.approx(np.mean(1 - right))
    # sigma f with f = 2 p - 1: of the right label's probability p, whatever the label.
    assert bounds.fit_of_signs(-np.log(right)) == pytest.approx(np.mean(2 * right - 1))
    assert bounds.fit_of_signs(np.full(7, math.log(2))) == pytest.approx(0.0)


def test_the_gaps_are_those_of_the_lecture() -> None:
    """Section 3 with R of the loss, half of that of f; section 4, delta shared by as many as were tried."""
    assert bounds.rademacher_bound(0.1, 1000, 0.05) == pytest.approx(2 * 0.05 + 3 * math.sqrt(math.log(20) / 1000))
    whole = math.sqrt((12.0 + math.log(1000 / 0.05)) / (2 * 999))
    assert bounds.pac_bayes_gap(12.0, 1000, 0.05) == pytest.approx(whole)
    assert bounds.massart_bound(3, 500, bits=2) == pytest.approx(math.sqrt(2 * math.log(2.0 ** (2 * 3)) / 500))
    assert bounds.pac_bayes_gap(12.0, 1000, 0.05, tried=4) == bounds.pac_bayes_gap(12.0, 1000, 0.0125)


def test_pac_bayes_of_a_line_is_the_best_sigma_with_the_loss_of_quadrature() -> None:
    """One weight, logits w x: E_Q of the loss is an integral over one Gaussian."""
    x, weight = torch.linspace(-2, 3, 50, dtype=torch.float64), torch.tensor([1.5], dtype=torch.float64)
    weight.requires_grad_()
    sign = torch.where(torch.arange(50) % 3 == 0, -1.0, 1.0).double()

    def losses() -> torch.Tensor:
        return softplus(-sign * weight * x)

    point = Point({"w": weight}, lambda: losses().mean())
    found = bounds.pac_bayes(point, losses, 2.25, 500, num_draws=400)
    assert weight.item() == 1.5
    nodes, by = np.polynomial.hermite_e.hermegauss(60)

    def expected(sigma: float) -> float:
        logits = (sign * x).numpy()[:, None] * (1.5 + sigma * nodes)
        return float((1 / (1 + np.exp(logits)) @ by).mean() / by.sum())

    def bound(sigma: float) -> float:
        tried = len(bounds.SIGMAS)
        return expected(sigma) + math.sqrt((2.25 / (2 * sigma**2) + math.log(500 * tried / 0.05)) / (2 * 499))

    assert found.sigma == min(bounds.SIGMAS, key=bound)
    assert found.loss == pytest.approx(expected(found.sigma), abs=0.02)
    assert found.divergence == pytest.approx(2.25 / (2 * found.sigma**2))
    assert found.bound == pytest.approx(bound(found.sigma), abs=0.02)


def test_coins_are_fair_and_all_else_stays(rows: Path, tmp_path: Path) -> None:
    of = documents.dataset("clicks", rows, {"column": "click"})
    coins(of, tmp_path / "coins.parquet")
    before, after = pq.read_table(rows), pq.read_table(tmp_path / "coins.parquet")
    assert after.schema == before.schema
    assert after.drop_columns("click").equals(before.drop_columns("click"))
    tossed = after["click"].to_numpy()
    assert set(tossed) == {0, 1}
    # Four standard deviations of 3000 coins.
    assert abs(tossed.mean() - 0.5) < 4 * 0.5 / math.sqrt(3000)
    assert abs(np.corrcoef(tossed, before["click"].to_numpy())[0, 1]) < 4 / math.sqrt(3000)
    written = (tmp_path / "coins.parquet").stat().st_mtime_ns
    coins(of, tmp_path / "coins.parquet")
    assert (tmp_path / "coins.parquet").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="every row has the same label"):
        coins(documents.dataset("clicks", rows, {"rule": "click >= 0"}), tmp_path / "none.parquet")


def subject_of(run: Run) -> Subject:
    assert execute(read_run(run.directory), start_ranks) == 0
    checkpoint = latest_valid(run.checkpoints)
    assert checkpoint is not None
    return Subject(run, checkpoint)


RANDOM = {"split": {"kind": "random", "validation": 0.1, "test": 0.1}}


def test_the_distance_is_from_the_initial_values_of_rows_and_dense_weights(make_run: Callable[..., Run]) -> None:
    """A training that hardly moves is near where it began, though its rows are long; one from zeros went their length
    and that of its tower."""
    still = subject_of(
        make_run(
            "still",
            model={"kind": "dnn", "embedding_dim": 4, "hidden": [8], "init": {"kind": "hash", "std": 0.3}},
            optimizer={"kind": "sgd", "learning_rate": 1e-9},
            dense_optimizer={"learning_rate": 1e-9},
            epochs=1,
        )
    )
    length = sum(float(still.read.tables.weight(table).square().sum()) for table in still.data.tables)
    assert length > 10
    assert still.squared_distance < 1e-9
    moved = subject_of(
        make_run(
            "moved",
            model={"kind": "dnn", "embedding_dim": 4, "hidden": [8], "init": {"kind": "zero"}},
            dense_optimizer={"learning_rate": 1e-9},
            epochs=1,
        )
    )
    length = sum(float(moved.read.tables.weight(table).square().sum()) for table in moved.data.tables)
    assert moved.squared_distance == pytest.approx(length, rel=1e-6)


@pytest.mark.slow
def test_measures_have_bounds_of_classifiers_alone(make_run: Callable[..., Run]) -> None:
    model = {"kind": "dnn", "embedding_dim": 4, "hidden": [8]}
    subject = subject_of(make_run("dnn", model=model, epochs=1, evaluation=RANDOM))
    found = json.loads(json.dumps(measures(subject)))["bounds"]
    train, test = subject.split_losses("train"), subject.split_losses("test")
    assert found["rows"] == len(train)
    assert found["train"] == pytest.approx(np.mean(1 - np.exp(-train)))
    assert found["test"] == pytest.approx(np.mean(1 - np.exp(-test)))
    assert found["pac_bayes"]["bound"] == pytest.approx(found["pac_bayes"]["loss"] + found["pac_bayes"]["gap"])
    assert found["pac_bayes"]["bound"] > found["test"]
    numbers = sum(len(subject.data.vocabulary(name)) + 2 for name in ("user", "item")) * 4 + (8 * 8 + 8) + (8 + 1)
    assert found["massart"] == pytest.approx(bounds.massart_bound(numbers, len(train)))
    # Two ids a row, two layers: Li and Lyu's preliminaries.
    of = {name: float(one.detach().norm()) for name, one in subject.model.dense_parameters() if one.ndim == 2}
    rows = [float(subject.read.tables.weight(name)[2:].norm()) for name in ("user", "item")]
    spread = math.sqrt(2 * math.log(2) * 2) + 1
    expected = math.prod(of.values()) * math.hypot(*rows) * spread * math.sqrt(2 * len(train)) / len(train)
    assert len(of) == 2
    assert found["norm_bound"] == pytest.approx(expected, rel=1e-6)
    # Theorem 4.1: of the last layer, over every training row.
    assert (found["mu"], found["nu"]) == pytest.approx(bounds.derivatives(train))
    last = last_layer(subject)
    assert last is not None
    inputs = []
    handle = last.register_forward_hook(lambda module, given, output: inputs.append(given[0].norm(dim=1).max().item()))
    subject.split_losses("train")
    handle.remove()
    linear = found["linear"]
    assert linear["largest_input"] == pytest.approx(math.hypot(max(inputs), 1.0))
    assert linear["norm"] == pytest.approx(math.hypot(float(last.weight.detach().norm()), float(last.bias.detach())))
    expected = bounds.linear_bound(train, linear["norm"], linear["largest_input"])
    assert (linear["terms"], linear["bound"]) == (pytest.approx(expected.terms), pytest.approx(expected.bound))
    assert linear["vacuous"] == expected.is_vacuous
    assert random_fit(subject) == {"rows": len(train), "fit": pytest.approx(np.mean(2 * np.exp(-train) - 1))}
    focal = subject_of(make_run("focal", model=model | {"loss": "focal"}, epochs=1, evaluation=RANDOM))
    assert "bounds" not in measures(focal)
