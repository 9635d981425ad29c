"""The comparison compares like with like: one set of rows, models of equal size, figures that can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.ctr_peers import auc, deepctr, ours, torchrec, training
from benchmarks.ctr_peers.__main__ import installed, read_lines
from benchmarks.ctr_peers.auc import at_best_epoch, auc_table, auc_verdicts, compare_auc
from benchmarks.ctr_peers.speed import speed_table, speed_verdicts
from benchmarks.ctr_peers.tasks import MODELS, Request, Task, quick_task
from benchmarks.ctr_peers.training import Place, train
from benchmarks.support.harness import climbed
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.jagged import Jagged
from trainer.data.prepare.preparation import prepare
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import use_threads


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    use_threads(1)
    return Place(tmp_path_factory.mktemp("ctr"), lambda line: None, 1)


@pytest.fixture(scope="module")
def task(place: Place) -> Task:
    return quick_task(place.folder)


@pytest.fixture
def library() -> Any:
    if importlib.util.find_spec("deepctr_torch") is None:
        pytest.skip("DeepCTR-Torch is not installed (extra bench)")
    return deepctr.imported()


def asked(task: Task, place: Place, model: str, **more: Any) -> tuple[Request, PreparedData]:
    request = Request.from_json(training.request(task, model, 0, 0.03, place, **more).to_json())
    return request, PreparedData.open(request.prepared)


def test_ours_is_a_job_on_the_rows_of_the_peers(task: Task, place: Place) -> None:
    found = train(task, "ours", "dnn", 0, 0.001, place)
    assert [len(found[split]) for split in ("validation", "test")] == [task.epochs] * 2
    assert max(found["validation"]) > 0.6


def test_ours_takes_the_optimizers_of_the_peers(task: Task) -> None:
    jobs = {name: task.job("dnn", 0, 0.03, 1, kind) for name, kind in training.OPTIMIZERS.items()}
    assert [job.optimizer.kind for job in jobs.values()] == ["adam_ar", "adam", "rowwise_adagrad"]
    assert [job.dense_optimizer.learning_rate for job in jobs.values()] == [0.03, 0.03, 0.001]


def test_a_job_that_takes_other_rows_is_no_comparison(
    monkeypatch: pytest.MonkeyPatch, task: Task, place: Place
) -> None:
    def only_prepared(dataset: Any, job: Any, *, run_dir: Path, store: str) -> int:
        prepare(dataset, job, run_dir / "data")
        return 0

    monkeypatch.setattr(ours, "train", only_prepared)
    job = task.job("dcnv2", 0, 0.003, 1)
    assert ours.events_of(task.dataset, job, place.folder, training.prepared(task, 0, place)) == []
    with pytest.raises(RuntimeError, match="prepared other rows"):
        ours.events_of(task.dataset, job, place.folder, training.prepared(task, 1, place))


@pytest.mark.parametrize("model", MODELS)
def test_torchrec_trains_rows_by_rowwise_adagrad(task: Task, place: Place, model: str) -> None:
    """A row's first step is lr g / (sqrt(mean g^2) + eps), so its root mean square is the learning rate, but for eps
    where the gradient is tiny."""
    request, data = asked(task, place, model)
    torch.manual_seed(0)
    with single_rank_group():
        parallel = torchrec.built(request, data)
        rows = {n: p for n, p in parallel.named_parameters() if "embedding_bags" in n}
        assert len(rows) == len(data.tables)
        before = {name: parameter.detach().clone() for name, parameter in rows.items()}
        dense = [p for name, p in parallel.module.named_parameters() if not name.startswith("embeddings.")]
        batch = next(iter(data.train_batches(0)))
        torchrec._step(parallel, torch.optim.Adam(dense), batch)
        for name, parameter in rows.items():
            step = (parameter.detach() - before[name]).square().mean(1).sqrt()
            moved = step[step > 0]
            assert 0 < len(moved) <= len(batch)
            torch.testing.assert_close(moved, torch.full_like(moved, 0.03), rtol=1e-2, atol=0)


def test_torchrec_ends_with_an_auc_for_each_epoch(task: Task, place: Place) -> None:
    found = train(task, "torchrec", "deepfm", 0, 0.03, place)
    assert [len(found[split]) for split in ("validation", "test")] == [task.epochs] * 2
    assert max(found["validation"]) > 0.57
    timed, data = asked(task, place, "dnn", variant="memory", warm_steps=2, timed_steps=4)
    assert torchrec.run(timed, data)["examples_per_second"] > 0


@pytest.mark.parametrize("model", MODELS)
def test_deepctrs_models_are_as_large_as_ours(library: Any, task: Task, place: Place, model: str) -> None:
    request, data = asked(task, place, model)
    theirs = sum(p.numel() for p in deepctr._model(library, request, data).parameters())
    with single_rank_group():
        dense = torchrec.built(request, data).module  # whose dense part is ours
        ours = sum(p.numel() for name, p in dense.named_parameters() if not name.startswith("embeddings."))
    columns = request.dim + (model == "deepfm")
    assert theirs == ours + columns * sum(table.num_rows for table in data.tables.values())


def test_deepctr_trains(library: Any, task: Task, place: Place) -> None:
    found = train(task, "deepctr_torch", "dnn", 0, 0.001, place)
    assert [len(found[split]) for split in ("validation", "test")] == [task.epochs] * 2
    assert max(found["validation"]) > 0.6
    timed, data = asked(task, place, "dnn", variant="adagrad_no_l2", timed_steps=3)
    assert deepctr.run(timed, data)["examples_per_second"] > 0


def test_lists_are_padded_behind() -> None:
    lists = Jagged(np.array([9, 5, 6, 7], np.int32), np.array([1, 3, 3, 4]))
    np.testing.assert_array_equal(deepctr.padded(lists), [[5, 6], [0, 0], [7, 0]])
    np.testing.assert_array_equal(deepctr.padded(lists, 3), [[5, 6, 0], [0, 0, 0], [7, 0, 0]])


def test_a_jobs_rate_leaves_its_start_out() -> None:
    """Windows of 5 s at 10 examples a second, then 2 s at 100 and 1 s at 400."""
    told = ((50, 10.0), (250, 100.0), (650, 400.0))
    events = [{"type": "progress", "examples": n, "examples_per_second": rate} for n, rate in told]
    assert ours.rate([{"type": "info"}, *events]) == pytest.approx(600 / 3)
    with pytest.raises(ValueError, match="give it more rows"):
        ours.rate(events[:1])


def test_the_search_ends_between_two_that_are_worse() -> None:
    tried: list[int] = []

    def score(n: int) -> float:
        tried.append(n)
        return -abs(n - 2.2)

    assert climbed(score) == 2
    assert set(tried) == {-1, 0, 1, 2, 3}


def test_validation_alone_chooses(monkeypatch: pytest.MonkeyPatch, task: Task, place: Place) -> None:
    """Learning rate and epoch: the test AUC, which is best elsewhere, has no say. What is known is not made again."""
    made, told = [], []
    place = Place(place.folder, told.append, 1)

    def trained(task: Task, library: str, model: str, seed: int, rate: float, place: Place) -> dict[str, list[float]]:
        made.append((seed, round(rate, 6)))
        return {"validation": [0.6, 0.7 - abs(np.log10(rate) + 3.5), 0.5], "test": [0.9, 0.55, 0.9]}

    monkeypatch.setattr(auc, "train", trained)
    lines = list(compare_auc(task, ["ours"], ["dnn"], 2, [], place))
    assert [(line["seed"], line["learning_rate"]) for line in lines] == [(0, 3.16e-4), (1, 3.16e-4)]
    assert [at_best_epoch(line) for line in lines] == [(pytest.approx(0.7), 0.55)] * 2
    assert len(made) == len(set(made)) == 5
    assert len(told) == len(made)
    assert list(compare_auc(task, ["ours"], ["dnn"], 2, told, place)) == lines
    assert len(made) == len(told)


def lines_of(ours: list[float], theirs: list[float]) -> list[dict[str, Any]]:
    return [
        {"task": "t", "model": "dnn", "library": library, "seed": seed, "learning_rate": 0.001, "validation": [1.0],
         "test": [auc]}
        for library, aucs in (("ours", ours), ("torchrec", theirs)) for seed, auc in enumerate(aucs)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "holds"),
    [([0.75, 0.76, 0.77], True), ([0.745, 0.765, 0.76], True), ([0.745, 0.755, 0.764], False)],
)
def test_below_by_more_than_noise_fails(ours: list[float], holds: bool) -> None:
    """Seeds are paired: .005 below in each of them is no noise."""
    judged = auc_verdicts(lines_of(ours, [0.75, 0.76, 0.77]))
    assert [verdict.holds for verdict in judged] == [holds]
    assert str(judged[0]).startswith("PASS" if holds else "FAIL")
    assert "0.7600 ± 0.0100 (1.0e-03)" in auc_table(lines_of(ours, [0.75, 0.76, 0.77]))


@pytest.mark.parametrize(("own", "holds"), [(0.7551, True), (0.7651, False), (0.744, False)])
def test_with_a_peers_optimizer_ours_is_to_be_near_it(own: float, holds: bool) -> None:
    lines = [line | {"library": "ours_rowwise_adagrad"} for line in lines_of([own], []) if line["library"] == "ours"]
    judged = auc_verdicts([*lines, *lines_of([], [0.76])])
    assert [(verdict.holds, "ours_rowwise_adagrad within" in str(verdict)) for verdict in judged] == [(holds, True)]


@pytest.mark.parametrize(("slowest", "holds"), [(90.0, [True, True]), (101.0, [False, True]), (301.0, [False, False])])
def test_the_fastest_form_of_a_peer_is_the_bar(slowest: float, holds: list[bool]) -> None:
    rates = {("ours", ""): 500, ("deepctr_torch", "adam"): 10, ("deepctr_torch", "adagrad_no_l2"): slowest,
             ("torchrec", "memory"): 1000, ("torchrec", "reader"): 3.5 * slowest}  # fmt: skip
    lines = [
        {"model": "dnn", "library": library, "variant": variant, "examples_per_second": rate * noise}
        for (library, variant), rate in rates.items() for noise in (0.5, 1, 2)
    ]  # fmt: skip
    assert [verdict.holds for verdict in speed_verdicts(lines)] == holds
    assert "| torchrec memory | 1,000 |" in speed_table(lines)


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installed() == ("ours", "ours_adam", "ours_rowwise_adagrad", "torchrec")


def test_lines_are_read_back(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none") == []
    (tmp_path / "lines.jsonl").write_text('{"case": "auc"}\n')
    assert read_lines(tmp_path / "lines.jsonl") == [{"case": "auc"}]
