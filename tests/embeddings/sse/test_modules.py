"""The embedding of any torch module that draws swapped rows, in the place of torch.nn.Embedding."""

from __future__ import annotations

import pytest
import torch

from embeddings.kernels.swap import swap, swap_any
from embeddings.sse import StochasticSharedEmbedding
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import TableConfig
from tests.embeddings.sse.swaps import complete, graph_of


def test_drop_in_embedding_draws_in_training_alone_and_resumes():
    def module():
        torch.manual_seed(0)
        return StochasticSharedEmbedding(50, 3, padding_idx=0, probability=0.5, seed=4)

    ids = torch.arange(40).view(8, 5)
    shared = module()
    plain = torch.nn.functional.embedding(ids, shared.weight)
    first, second = shared(ids), shared(ids)
    assert first.shape == (8, 5, 3)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, second)
    assert not first[0, 0].any()
    assert 0.3 < (first != plain).any(dim=-1).float().mean() < 0.7
    resumed = module()
    resumed.load_state_dict(shared.state_dict())
    assert torch.equal(resumed(ids), shared(ids))
    assert torch.equal(shared.eval()(ids), plain)


@pytest.mark.parametrize("padding", [None, 0, 3, -1])
def test_drop_in_embedding_takes_what_torch_takes(padding):
    """Any padding row, other shapes and types of ids, torch's own arguments and errors, and pretrained rows."""
    shared = StochasticSharedEmbedding(8, 2, padding, 1.0, probability=1.0, sparse=True)
    plain = torch.nn.Embedding(8, 2, padding, 1.0, sparse=True)
    plain.load_state_dict({"weight": shared.weight.detach()})
    assert shared.padding_idx == plain.padding_idx
    ids = torch.arange(8, dtype=torch.int32).repeat(40)
    shared.weight.data.copy_(torch.arange(8.0)[:, None] / 100)
    drawn = (shared(ids)[:, 0] * 100).round().int()
    reserved = ids == (-1 if plain.padding_idx is None else plain.padding_idx)
    assert bool((drawn[~reserved] != ids[~reserved]).all())
    assert torch.equal(drawn[reserved], ids[reserved])
    assert set(drawn[~reserved].tolist()) == set(range(8)) - {plain.padding_idx}
    assert shared(torch.tensor(5)).shape == (2,)
    assert shared(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 2)
    for bad in (-1, 8):
        with pytest.raises(IndexError):
            shared(torch.tensor([bad, 1]))
    rows = torch.arange(12.0).view(6, 2)
    pretrained = StochasticSharedEmbedding.from_pretrained(rows, padding_idx=padding, freeze=False)
    assert torch.equal(pretrained.eval()(torch.arange(6)), rows)
    assert pretrained.weight.requires_grad


@pytest.mark.parametrize("padding", [None, 0, 3])
def test_drop_in_embedding_with_a_graph(padding):
    """Neighbours by the ids that the user knows, wherever the padding row is."""
    ring = graph_of([(k, k + 1) for k in range(4, 11)], 12, first_live_row=0)
    shared = StochasticSharedEmbedding(12, 1, padding, probability=1.0, graph=ring, rho=1e12)
    shared.weight.data.copy_(torch.arange(12.0)[:, None])
    ids = torch.arange(4, 12).repeat(50)
    drawn = shared(ids)[:, 0].long()
    assert ring.has_edges(ids.numpy(), drawn.numpy()).all()
    assert "rho=1e+12" in repr(shared)
    with pytest.raises(ValueError, match=r"table 'words' has 13 rows, its graph 12"):
        StochasticSharedEmbedding(13, 1, padding, graph=ring, name="words")
    with pytest.raises(ValueError, match=r"edges at rows below 1"):
        StochasticSharedEmbedding(12, 1, 5, graph=ring)


def test_drop_in_embeddings_of_ranks_draw_as_one():
    ids = torch.arange(40).view(10, 4)
    whole, part = (StochasticSharedEmbedding(40, 1, probability=0.5) for _ in range(2))
    part.load_state_dict(whole.state_dict())
    part.sample_offset = 7
    assert torch.equal(part(ids[7:]), whole(ids)[7:])


def test_any_module_can_be_given_swapped_ids():
    """The functional form: same shape and type, the draws of a table of that name."""
    ids = (torch.arange(60) % 10 + 2).view(20, 3)
    table, config = TableConfig("item", 12, 1, ("item",), first_live_row=0), SSEConfig(0.5, complete(12, 0), 3.0)
    expected = swap(
        ids.flatten(), torch.arange(21) * 3, table=table, feature="item", config=config, seed=4, step=2, sample_offset=3
    )
    swapped = swap_any(ids.int(), 12, config, seed=4, step=2, name="item", sample_offset=3)
    assert swapped.dtype == torch.int32
    assert torch.equal(swapped, expected.view(20, 3).int())
    assert not torch.equal(swapped, ids)
    assert torch.equal(swap_any(ids, 12, SSEConfig(0.0), seed=4, step=2), ids)
    with pytest.raises(ValueError, match=r"has 13 rows, its graph 12"):
        swap_any(ids, 13, config, seed=4, step=2)


def test_drop_in_embedding_sends_the_gradient_to_the_swapped_row():
    shared = StochasticSharedEmbedding(4, 1, probability=1.0)
    shared(torch.tensor([2, 2, 2])).sum().backward()
    assert shared.weight.grad[2] == 0.0
    assert shared.weight.grad.sum() == 3.0
