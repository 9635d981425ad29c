"""The comparison compares like with like: one set of rows, models of equal size, figures that can fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from benchmarks.ctr_peers import auc, deepctr, ours, speed, torchrec, training
from benchmarks.ctr_peers.__main__ import installed, read_lines
from benchmarks.ctr_peers.auc import at_best_epoch, auc_table, auc_verdicts, compare_auc
from benchmarks.ctr_peers.speed import (
    EQUAL,
    OWN,
    PARTS,
    PEER,
    PEER_WITH_OUR_LAYERS,
    compare_speed,
    contestants,
    speed_table,
    speed_verdicts,
)
from benchmarks.ctr_peers.tasks import MODELS, Task, quick_task, speed_task
from benchmarks.ctr_peers.training import Place, train
from benchmarks.support.harness import climbed
from benchmarks.support.peers import fbgemm_tables
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.jagged import Jagged
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import use_threads
from trainer.runs.failures import NonFiniteError
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

PEERS = (PEER, PEER_WITH_OUR_LAYERS)


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


@pytest.fixture(scope="module")
def data(task: Task, place: Place) -> PreparedData:
    return PreparedData.open(training.prepared(task, 0, place))


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
def test_torchrec_trains_rows_by_rowwise_adagrad(task: Task, data: PreparedData, model: str) -> None:
    """A row's first step is lr g / (sqrt(mean g^2) + eps), so its root mean square is the learning rate, but for eps
    where the gradient is tiny, over the columns that the model reads."""
    torch.manual_seed(0)
    with single_rank_group():
        parallel = torchrec.built(task, model, 0, 0.03, data)
        rows = torchrec.rows(parallel)
        assert rows.keys() == data.tables.keys()
        before = {name: parameter.detach().clone() for name, parameter in rows.items()}
        batch = next(iter(data.train_batches(0)))
        torchrec.step(parallel, torchrec.dense_optimizer(parallel), batch)
        columns = task.dim + (model == "deepfm")
        for name, parameter in rows.items():
            step = (parameter.detach() - before[name]).square()[:, :columns].mean(1).sqrt()
            moved = step[step > 0]
            assert 0 < len(moved) <= len(batch)
            torch.testing.assert_close(moved, torch.full_like(moved, 0.03), rtol=1e-2, atol=0)


def test_torchrec_ends_with_an_auc_for_each_epoch(task: Task, place: Place) -> None:
    found = train(task, "torchrec", "deepfm", 0, 0.03, place)
    assert [len(found[split]) for split in ("validation", "test")] == [task.epochs] * 2
    assert max(found["validation"]) > 0.57


@pytest.mark.parametrize("model", MODELS)
def test_deepctrs_models_are_as_large_as_ours(library: Any, task: Task, data: PreparedData, model: str) -> None:
    theirs = sum(p.numel() for p in deepctr.built(library, task, model, 0, data).parameters())
    with single_rank_group():
        dense = torchrec.built(task, model, 0, 0.03, data).module  # whose dense part is ours
        ours = sum(p.numel() for name, p in dense.named_parameters() if not name.startswith("embeddings."))
    columns = task.dim + (model == "deepfm")
    assert theirs == ours + columns * sum(table.num_rows for table in data.tables.values())


def test_deepctr_trains(library: Any, task: Task, place: Place) -> None:
    found = train(task, "deepctr_torch", "dnn", 0, 0.001, place)
    assert [len(found[split]) for split in ("validation", "test")] == [task.epochs] * 2
    assert max(found["validation"]) > 0.6


def test_lists_are_padded_behind() -> None:
    lists = Jagged(np.array([9, 5, 6, 7], np.int32), np.array([1, 3, 3, 4]))
    np.testing.assert_array_equal(deepctr.padded(lists), [[5, 6], [0, 0], [7, 0]])
    np.testing.assert_array_equal(deepctr.padded(lists, 3), [[5, 6, 0], [0, 0, 0], [7, 0, 0]])


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


# --- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_with_the_same_optimizer_the_losses_of_the_timed_steps_agree(
    task: Task, place: Place, data: PreparedData, model: str
) -> None:
    """Every step of both: equal rows at the start and equal rates, DeepFM's unused columns included."""
    with single_rank_group():
        found = contestants(task, model, place, data)
        ours, peer = found[EQUAL], found[PEER]
        for name, rows in ours.rows.items():
            columns = rows.shape[1]
            torch.testing.assert_close(peer.rows[name].detach()[:, :columns], rows, rtol=0, atol=0)
        began = {name: rows.clone() for name, rows in ours.rows.items()}
        batches = list(itertools.islice(data.train_batches(0), 12))
        for batch in batches:
            for one in found.values():
                one.step(batch)
        # Sums in float32, in another order.
        np.testing.assert_allclose(ours.losses, peer.losses, rtol=1e-5)
        assert ours.losses[-1] != ours.losses[0]
        for name, rows in ours.rows.items():
            moved = (rows != began[name]).any(1)
            their_rows = peer.rows[name].detach()[:, : rows.shape[1]]
            assert 0 < moved.sum() < len(rows)
            torch.testing.assert_close((their_rows != began[name]).any(1), moved)
            torch.testing.assert_close(their_rows, rows, rtol=0, atol=1e-4)
        for name in OWN.keys() - {EQUAL}:
            assert found[name].losses[0] == ours.losses[0]
            assert found[name].losses[-1] != ours.losses[-1]


def test_our_timed_step_is_the_loops(task: Task, place: Place, data: PreparedData) -> None:
    """Laps change no bit, and a loss that is not finite stops the step, as in a job."""
    job = task.job("dnn", 0, 0.03, place.threads, "rowwise_adagrad")
    batches = list(itertools.islice(data.train_batches(0), 4))
    with single_rank_group():
        timed, plain = speed.Ours(job, data), build(job, data, alpha=None)
        plain.train()
        trainer = Trainer(job, data, plain, dense_optimizer(job, plain))
        for batch in batches:
            timed.step(batch)
            trainer.train_step((batch,))
        pieces: Any = plain.module.embeddings
        for piece in pieces.local_pieces():
            assert torch.equal(piece.tables.weight(piece.name), timed.rows[piece.name])
        with pytest.raises(NonFiniteError):
            timed.step(dataclasses.replace(batches[0], labels=batches[0].labels * float("nan")))


def test_each_call_of_a_step_counts_for_its_part(
    monkeypatch: pytest.MonkeyPatch, task: Task, place: Place, data: PreparedData
) -> None:
    """By a clock that goes one on when it is read."""
    clock = itertools.count()
    monkeypatch.setattr(speed, "_now", lambda: np.full(2, next(clock)))
    with single_rank_group():
        found = contestants(task, "deepfm", place, data)
        for one in found.values():
            one.step(next(iter(data.train_batches(0))))
    both = {"lookup": 1, "dense forward": 1, "dense backward": 1, "dense optimizer": 1}
    for name, one in found.items():
        more = {"tables": 1, "finite": 0, "rest": 1} if name in PEERS else {"tables": 2, "finite": 1, "rest": 5}
        assert [{part: laps[1] for part, laps in step.items()} for step in one.laps.steps] == [both | more]


def test_a_line_and_a_row_of_the_table_say_whose_they_are(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    place = Place(tmp_path, told.append, 1)
    lines = list(compare_speed([speed_task(tmp_path, 2, 400, 4, 20)], ["dnn"], [1], 15, place))
    assert lines == told
    assert [(line["dim"], line["contestant"]) for line in lines] == [(4, name) for name in (*OWN, *PEERS)]
    for line in lines:
        assert list(line["parts"]) == list(line["cpu_parts"]) == list(PARTS)
        assert (line["cpu_parts"]["finite"] > 0) == (line["contestant"] not in PEERS)
        assert (line["ratio"] == line["cpu_ratio"] == [1.0, 1.0, 1.0]) == (line["contestant"] == PEER)
        assert line["contestant"] not in (EQUAL, *PEERS) or line["loss"] == pytest.approx(lines[0]["loss"], rel=1e-5)
    rows = [row.split(" | ") for row in speed_table(lines).splitlines()[2:]]
    assert [row[:2] for row in rows] == [["| dnn 4, 1 thread", name] for name in (*OWN, *PEERS)]
    assert [len(row) for row in rows] == [6 + len(PARTS)] * 5


@pytest.mark.parametrize(("ratio", "holds"), [(0.9, True), (1.2, False)])
def test_with_the_same_optimizer_we_are_not_to_be_slower(ratio: float, holds: bool) -> None:
    lines = [
        {"model": "dnn", "dim": 16, "threads": 2, "contestant": name, "cpu_ratio": [r, r, r]}
        for name, r in ((EQUAL, ratio), ("ours, AdamAR, dense moments", 1.5), (PEER, 1.0))
    ]
    judged = speed_verdicts(lines)
    assert [verdict.holds for verdict in judged] == [holds]
    assert "dnn 16, 2 threads" in str(judged[0])


def test_fbgemm_has_no_adam_on_cpus() -> None:
    with pytest.raises(AssertionError, match="not supported in CPU mode"):
        fbgemm_tables([10], 4, EmbOptimType.ADAM)


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installed() == ("ours", "ours_adam", "ours_rowwise_adagrad", "torchrec")


def test_lines_are_read_back(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none") == []
    (tmp_path / "lines.jsonl").write_text('{"case": "auc"}\n')
    assert read_lines(tmp_path / "lines.jsonl") == [{"case": "auc"}]
