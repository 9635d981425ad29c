"""An embedding for any module: torch's forward, the row optimizer's step, a state that goes on bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch

from embeddings import InitConfig, OptimizedEmbedding, SSEConfig
from embeddings.optim import SGD, Adam, AdamAR


def batches(number: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 20, (4, 3), generator=generator) for _ in range(number)]


def train(embedding: torch.nn.Module, ids: torch.Tensor, step: Callable[[], object]) -> None:
    (embedding(ids) - 0.3).square().sum().backward()
    step()


def test_rows_move_as_torchs_adam_moves_dense_ones() -> None:
    """Also those that a batch does not have: the moments are dense."""
    ours = OptimizedEmbedding(20, 4, optimizer=Adam(learning_rate=0.01), seed=3)
    theirs = torch.nn.Embedding(20, 4, _weight=ours.weight)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.01)
    for ids in batches(12):
        train(ours, ids, ours.step)
        train(theirs, ids, adam.step)
        adam.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-4, atol=1e-5)


def test_ids_of_any_shape_and_padding() -> None:
    embedding = OptimizedEmbedding(20, 4, padding_idx=0, optimizer=SGD(learning_rate=1.0))
    assert embedding(torch.tensor(5)).shape == (4,)
    assert embedding(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 4)
    rows = embedding(torch.tensor([[[0, 1], [2, 0]]]))
    assert rows.shape == (1, 2, 2, 4)
    assert not rows[0, 0, 0].any()
    rows.sum().backward()
    before = embedding.weight
    embedding.step()
    moved = (embedding.weight != before).any(1)
    assert moved.tolist() == [False, True, True] + [False] * 17


def test_a_state_that_is_restored_goes_on_bit_for_bit() -> None:
    def fresh() -> OptimizedEmbedding:
        return OptimizedEmbedding(
            20, 4, optimizer=AdamAR(learning_rate=0.01, alpha=1e-3), sse=SSEConfig(0.3), init=InitConfig("normal", 0.1)
        )

    whole = fresh()
    for ids in batches(6):
        train(whole, ids, whole.step)
    first = fresh()
    for ids in batches(6)[:3]:
        train(first, ids, first.step)
    second = fresh()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(second.weight, first.weight)
    for ids in batches(6)[3:]:
        train(second, ids, second.step)
    assert torch.equal(second.weight, whole.weight)
    unswapped = fresh()
    unswapped.tables.eval()
    assert not torch.equal(unswapped.weight, whole.weight)


def test_a_gradient_from_before_a_restored_state_is_dropped() -> None:
    embedding = OptimizedEmbedding(20, 4, optimizer=SGD(learning_rate=1.0))
    state = copy.deepcopy(embedding.state_dict())
    before = embedding.weight
    embedding(torch.tensor([3])).sum().backward()
    embedding.load_state_dict(state)
    embedding.step()
    assert torch.equal(embedding.weight, before)


def test_a_module_that_is_saved_whole_goes_on_bit_for_bit() -> None:
    embedding = OptimizedEmbedding(20, 4, optimizer=AdamAR(learning_rate=0.01, alpha=1e-3), sse=SSEConfig(0.3))
    first, *others = batches(4)
    train(embedding, first, embedding.step)
    file = io.BytesIO()
    torch.save(embedding, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for each in (embedding, saved):
        for ids in others:
            train(each, ids, each.step)
    assert torch.equal(saved.weight, embedding.weight)


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    embedding = OptimizedEmbedding(20, 4, optimizer=SGD(learning_rate=1.0))
    before = embedding.weight
    (embedding(torch.tensor([3])) * float("inf")).sum().backward()
    with pytest.raises(ValueError, match="not finite: lower the learning rate, or clip gradients"):
        embedding.step()
    assert torch.equal(embedding.weight, before)
    train(embedding, torch.tensor([3]), embedding.step)
    assert (embedding.weight != before).any(1).nonzero().flatten().tolist() == [3]


def test_padding_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="padding_idx is 3: use 0 and number the ids from 1, or None"):
        OptimizedEmbedding(20, 4, padding_idx=3, optimizer=SGD(learning_rate=1.0))
