"""The benchmark compares what it says: the peer is torch's own Adam from the same start, and FAIL is told when due."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import one_epoch
from benchmarks.one_epoch import Replayed, Result, choose_alpha, conditions, main, run, table
from benchmarks.support.baselines import TorchModel
from benchmarks.support.gathered import gather_table
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.launch.in_process import read_spec
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import use_threads
from trainer.spec import parse_dataset, parse_job
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer


@pytest.fixture(scope="module", autouse=True)
def group():
    use_threads(1)
    with single_rank_group():
        yield


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 60, 3000), (rng.random(3000) ** 2 * 200).astype(np.int64)
    click = (rng.random(3000) < np.array([0.05, 0.4, 0.95])[item % 3]).astype(np.int64)
    pq.write_table(
        pa.table({"user": user, "item": item, "click": click, "past": [[i, 3] for i in item]}), folder / "rows.parquet"
    )
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "past": {"type": "id_list", "shares": "item"}}
    dataset = {
        "name": "clicks",
        "uri": str(folder / "rows.parquet"),
        "features": features,
        "label": {"column": "click"},
    }
    job = parse_job(
        {
            "name": "small",
            "dataset": {"name": "clicks"},
            "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8], "init": {"kind": "normal", "std": 0.1}},
            "optimizer": {"kind": "adam", "learning_rate": 0.01},
            "epochs": 2,
            "batch_size": 100,
        }
    )
    return job, prepare(parse_dataset(dataset), job, folder / "data")


def train(job, data, model) -> list[float]:
    trainer = Trainer(job, data, model, dense_optimizer(job, model))
    trainer.train()
    return [metric["auc"] for metric in trainer.history if metric["split"] == "test"]


def test_the_peer_is_torchs_adam_from_the_same_start(task):
    """Shared tables and mean pooling included. float32 sums differ in their order, so 48 steps agree to 1e-4."""
    job, data = task
    ours = build(job, data, alpha=None)
    theirs = TorchModel.like(job, data, ours, frozen_std=None)
    for (name, mine), (_, other) in zip(ours.dense_parameters(), theirs.dense_parameters(), strict=True):
        assert torch.equal(mine, other), name
    start = {name: gather_table(ours, name).rows for name in ours.tables}
    assert all(torch.equal(start[name], theirs.tables[name].detach()) for name in start)
    first, second = train(job, data, ours), train(job, data, theirs)
    assert first == pytest.approx(second, abs=2e-3)
    assert first[-1] > 0.6
    for name in start:
        moved = gather_table(ours, name).rows
        assert float((moved - start[name]).abs().max()) > 0.05
        torch.testing.assert_close(moved, theirs.tables[name].detach(), rtol=0, atol=1e-4)


def test_frozen_embeddings_stay(task):
    job, data = task
    model = TorchModel.like(job, data, build(job, data, alpha=None), frozen_std=1.0)
    before = {name: rows.detach().clone() for name, rows in model.tables.items()}
    assert float(before["item"].std()) == pytest.approx(1.0, abs=0.1)
    train(job, data, model)
    assert all(torch.equal(before[name], rows) for name, rows in model.tables.items())


@pytest.mark.parametrize("method", one_epoch.METHODS)
def test_every_method_runs(task, method):
    result = run(*task, method, 0.001 if method == "adam_ar" else None)
    assert len(result.test) == len(result.validation) == 2
    assert all(0.3 < auc < 1 for auc in result.test)


def test_alpha_is_the_top_of_the_hill_on_validation(task, monkeypatch):
    tried = []

    def scored(job, data, method, alpha):
        tried.append(alpha)
        return Result(method, 0, alpha, validation=[0.0, -abs(np.log10(alpha) + 1.0)], test=[9.0, alpha])

    monkeypatch.setattr(one_epoch, "run", scored)
    assert choose_alpha(*task, lambda fields: None) == pytest.approx(0.1)
    assert len(tried) == len(set(tried))
    half_decades = np.log10(tried) * 2
    np.testing.assert_allclose(half_decades, np.round(half_decades), atol=1e-9)


EPINIONS = {
    "adam": [0.747, 0.731, 0.725, 0.720],
    "adam_lazy": [0.735, 0.721, 0.710, 0.698],
    "adam_ar": [0.740, 0.742, 0.738, 0.734],
    "by_epoch": [0.747, 0.746, 0.746, 0.746],
    "torch_adam": [0.747, 0.732, 0.724, 0.718],
    "frozen": [0.60, 0.60, 0.60, 0.61],
}
SPORTS = {"adam": [0.66, 0.747, 0.753, 0.748], "adam_ar": [0.664, 0.759, 0.773, 0.776]}


@pytest.mark.parametrize(
    ("dataset", "change", "failing"),
    [
        ("epinions", {}, set()),
        ("epinions", {"adam": [0.747, 0.746, 0.746, 0.745]}, {"i.", "iii.", "iv."}),
        ("epinions", {"adam_ar": [0.75, 0.74, 0.74, 0.739]}, {"ii."}),
        ("epinions", {"adam_ar": [0.720, 0.729, 0.729, 0.729]}, {"iii."}),
        ("epinions", {"torch_adam": [0.747, 0.732, 0.724, 0.7144]}, {"iv."}),
        ("epinions", {"adam_lazy": [0.735, 0.732, 0.710, 0.698]}, {"iv."}),
        ("epinions", {"frozen": [0.60, 0.60, 0.60, 0.69]}, {"v."}),
        ("epinions", {"by_epoch": [0.747, 0.745, 0.744, 0.743]}, {"vi."}),
        ("amazon_sports", {}, set()),
        ("amazon_sports", {"adam_ar": [0.664, 0.759, 0.764, 0.764]}, {"iii."}),
        ("amazon_sports", {"adam_ar": [0.664, 0.786, 0.776, 0.7755]}, {"ii."}),
    ],
)
def test_each_condition_fails_on_figures_that_break_it(dataset, change, failing):
    figures = {**(EPINIONS if dataset == "epinions" else SPORTS), **change}
    judged = conditions(dataset, {name: np.array(auc) for name, auc in figures.items()})
    assert {condition.name.split()[0] for condition in judged if not condition.holds} == failing
    assert all(str(condition).startswith("PASS" if condition.holds else "FAIL") for condition in judged)
    numbers = {condition.name.split()[0] for condition in judged}
    assert numbers == ({"i.", "ii.", "iii.", "iv.", "v.", "vi."} if dataset == "epinions" else {"ii.", "iii."})


def test_elsewhere_runs_are_judged_by_their_best_epoch():
    """On a log with planted overfitting, Adam's fourth epoch falls below frozen embeddings: that is the phenomenon."""
    figures = {
        "adam": [0.66, 0.63, 0.59, 0.58],
        "adam_lazy": [0.66, 0.64, 0.6, 0.6],
        "frozen": [0.61, 0.62, 0.62, 0.62],
    }
    judged = conditions("clicklog", {name: np.array(auc) for name, auc in figures.items()})
    assert [condition.name for condition in judged] == ["v. adam learns embeddings", "v. adam_lazy learns embeddings"]
    assert all(condition.holds for condition in judged)


def test_the_table_shows_means_over_seeds():
    results = [Result("adam", seed, None, [0.5], [auc], 2.0) for seed, auc in ((0, 0.7), (1, 0.8))]
    assert "| adam | 0.7500 ± 0.0707 | 2 |" in table(results)
    assert "| adam | 0.7000 | 2 |" in table(results[:1])


def test_an_unknown_method_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["examples/epinions.yaml", "--methods", "adm"])
    assert "no such method: adm" in capsys.readouterr().err


@pytest.mark.data
@pytest.mark.slow
def test_adam_falls_and_decay_by_epoch_does_not_on_epinions(real_data, tmp_path):
    """The committed spec on the real rows, one seed and two epochs; the whole benchmark has three seeds, four epochs
    and the other methods. Adam fell by .0133 where .010 is asked; rounding differs from processor to processor."""
    dataset, job = read_spec(Path(__file__).resolve().parents[2] / "examples" / "epinions.yaml")
    dataset = dataset.model_copy(update={"uri": str(real_data / "epinions.parquet")})
    job = job.model_copy(update={"epochs": 2})
    data = Replayed(prepare(dataset, job, tmp_path / "data"))
    adam, by_epoch = run(job, data, "adam"), run(job, data, "by_epoch")
    judged = conditions("epinions", {"adam": np.array(adam.test), "by_epoch": np.array(by_epoch.test)})
    assert [condition.name[:3] for condition in judged] == ["i. ", "vi."]
    assert all(condition.holds for condition in judged), [str(condition) for condition in judged]
