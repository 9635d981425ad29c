"""Task 2 of the rff recipe: histories row by row, the two towers against loops, and what their consumers find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.papers.rff import next_item_task, task_2
from benchmarks.papers.rff.next_item_task import (
    CANDIDATES,
    HIDDEN,
    LENGTH,
    Histories,
    TwoTower,
    histories,
    judge,
    train,
)

Array = np.ndarray
NUM_CLASSES = 5


def write_rows(path: Path, taken: dict[int, list[int]]) -> Path:
    """Users' items, in an order of rows that is not that of time."""
    rows = [(user, item, pos) for user, items in taken.items() for pos, item in enumerate(items)]
    rows = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    user, item, pos = (np.array(column) for column in zip(*rows, strict=True))
    pq.write_table(pa.table({"user": user, "item": item, "pos": pos}), path)
    return path


def test_histories_end_before_the_last_item(tmp_path: Path) -> None:
    ids = np.array([7, 3, *range(1000, 1000 + CANDIDATES + LENGTH + 10)])
    long = [int(one) for one in ids[5 : LENGTH + 15]]
    taken = {4: [3, 7, 1000], 2: [7, 99, 3, 1001], 9: [3, 7], 5: [7, 1000, 99], 8: long}
    found = histories(write_rows(tmp_path / "rows.parquet", taken), ids)
    # Users in order; 9 has one item before its last, the last of 5 has no vector, nor has an item of 2.
    assert found.items.shape == (3, LENGTH)
    assert found.items[0].tolist() == [-1] * (LENGTH - 2) + [0, 1]
    assert found.items[1].tolist() == [-1] * (LENGTH - 2) + [1, 0]
    assert found.items[2].tolist() == list(range(len(long) - LENGTH + 4, len(long) + 4))
    assert found.test.tolist() == [3, 2, len(long) + 4]
    for had, shown in zip(([0, 1, 3], [1, 0, 2], range(5, LENGTH + 15)), found.candidates, strict=True):
        assert len(set(shown.tolist())) == CANDIDATES
        assert not set(shown.tolist()) & set(had)
    again = histories(tmp_path / "rows.parquet", ids)
    assert all((one == other).all() for one, other in zip(found, again, strict=True))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def test_the_towers_are_a_gru_and_two_layers() -> None:
    """Against the equations of a GRU, a step at a time; nothing that comes later is seen."""
    torch.manual_seed(0)
    raw = np.random.default_rng(0).normal(2.0, 3.0, size=(9, 4)).astype(np.float32)
    model = TwoTower(torch.from_numpy(raw))
    standard = (raw - raw.mean(axis=0)) / raw.std(axis=0, ddof=1)
    w = {name: value.detach().numpy().astype(np.float64) for name, value in model.named_parameters()}
    items = [-1, 4, 2, 8]
    state = np.zeros(HIDDEN)
    users = []
    for item in items:
        x = standard[item] if item >= 0 else np.zeros(4)
        from_x = w["history.weight_ih_l0"] @ x + w["history.bias_ih_l0"]
        from_state = w["history.weight_hh_l0"] @ state + w["history.bias_hh_l0"]
        reset, update = (
            sigmoid(from_x[part] + from_state[part]) for part in (slice(HIDDEN), slice(HIDDEN, 2 * HIDDEN))
        )
        new = np.tanh(from_x[2 * HIDDEN :] + reset * from_state[2 * HIDDEN :])
        state = (1 - update) * new + update * state
        users.append(sigmoid(w["user.weight"] @ state + w["user.bias"]))
    got = model.users(torch.tensor([items]))
    np.testing.assert_allclose(got[0].detach().numpy(), users, atol=1e-5)
    np.testing.assert_allclose(model.users(torch.tensor([items[:2]]))[0].detach().numpy(), users[:2], atol=1e-5)
    tower = sigmoid(w["item.weight"] @ standard[3] + w["item.bias"])
    scores = model.scores(got, torch.tensor([[[3], [3], [3], [3]]]))
    np.testing.assert_allclose(scores[0, :, 0].detach().numpy(), np.array(users) @ tower + w["bias"], atol=1e-5)


def classed(num_users: int = 300, count: int = 150) -> tuple[Array, Histories]:
    """Vectors of items around the centres of their classes, and users who each take of one class."""
    draw = np.random.default_rng(1)
    classes = np.arange(count) % NUM_CLASSES
    vectors = (np.eye(NUM_CLASSES, 6)[classes] + 0.1 * draw.normal(size=(count, 6))).astype(np.float32)
    items, test, candidates = [], [], []
    for user in range(num_users):
        own = draw.choice(np.flatnonzero(classes == user % NUM_CLASSES), 13, replace=False)
        others = np.setdiff1d(np.arange(count), own)
        items.append(np.concatenate([np.full(LENGTH - 12, -1), own[:12]]))
        test.append(own[12])
        candidates.append(draw.choice(others, CANDIDATES, replace=False))
    return vectors, Histories(np.array(items), np.array(test), np.array(candidates))


def test_a_consumer_learns_what_comes_next_and_reads_aligned_vectors() -> None:
    vectors, of = classed()
    turn = np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))[0]
    found = next_item_task.judge_runs(
        [vectors, (vectors @ turn).astype(np.float32)], lambda rows: rows, of, max_epochs=12
    )
    # A fifth of the candidates is of a user's class: who knows it finds the test item three times as often as chance.
    assert min(found.recall) > 0.15 > 3 * 5 / (CANDIDATES + 1)
    assert min(found.ndcg) > 0.08
    assert found.frozen[0] < 0.8 * found.recall[0]
    assert found.frozen_aligned[0] == pytest.approx(found.recall[0], abs=0.02)


def test_training_is_a_function_of_its_arguments_and_ends_when_it_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, of = classed(64)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, second = (train(vectors, of, max_epochs=2) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert judge(first, of) == judge(second, of)
    assert not torch.equal(train(vectors, of, 2, seed=1).item.weight, first.item.weight)
    # Where nothing ever improves by enough, the first epoch and PATIENCE more are all.
    monkeypatch.setattr(next_item_task, "IMPROVEMENT", 10.0)
    stopped = train(vectors, of, max_epochs=50)
    monkeypatch.setattr(next_item_task, "IMPROVEMENT", -10.0)
    assert torch.equal(stopped.item.weight, train(vectors, of, max_epochs=1 + next_item_task.PATIENCE).item.weight)


def test_a_report_that_is_made_again_trains_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, of = classed(64)
    record = {"key": "k", "finished_at": "2026-01-02T03:04:05Z", "packages": {}, "git_commit": None, "command": "x",
              "machine": "m", "seconds": 1.0}  # fmt: skip

    def section(runs: list[Array]) -> Any:
        return task_2.section_of(runs, of, 6, [record], tmp_path / "kept", 2, is_published=False)

    runs = [vectors, vectors[:, ::-1].copy()]
    first, judged = section(runs)
    assert [line[0] for line in first.lines] == ["h_6", "avg(h_6)", "phi_6", "phi_12"]
    assert len(judged["h_6"].recall) == 2
    assert len(task_2.claims_of(judged, 6, is_published=True)) == 3
    monkeypatch.setattr(task_2, "judge_runs", None)
    assert section(runs) == (first, judged)
    with pytest.raises(TypeError):
        section([vectors, vectors + 1])
