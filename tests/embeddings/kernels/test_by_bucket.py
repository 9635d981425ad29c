"""An optimizer for each bucket of rows: each row is trained as a table of its own optimizer trains it, to the bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import Adagrad, Adam, AdamAR, AdamW, ByBucket, RowOptimizer
from embeddings.perturbation import perturb
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig

NUM_ROWS, NUM_STEPS = 30, 12
AR, W = AdamAR(0.01, alpha=0.02), AdamW(0.01, weight_decay=3.0)
BUCKETS = (np.arange(NUM_ROWS) % 3).astype(np.int8)


def tables_of(
    optimizer: RowOptimizer, backend="cpu", pooling="mean", dtype=torch.float32, **changes
) -> EmbeddingTables:
    of = dict.fromkeys(("item", "history"), pooling)
    table = TableConfig(
        "item", NUM_ROWS, 4, tuple(of), of, init=InitConfig("normal", 0.1), buckets=BUCKETS, **changes
    )  # fmt: skip
    sse = {"history": SSEConfig(0.3)} if pooling != "none" else None
    return EmbeddingTables([table], optimizer, backend=backend, seed=4, sse=sse)


def batch(step: int, weighted: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Five samples of an item and a list of up to three; half of the rows idle after a few steps."""
    rng = np.random.default_rng(step)
    lengths = np.concatenate([np.ones(5, np.int64), rng.integers(0, 4, 5)])
    ids = rng.integers(0, NUM_ROWS if step < 5 else NUM_ROWS // 2, lengths.sum())
    weights = torch.from_numpy(rng.integers(0, 3, len(ids)).astype(np.float32)) if weighted else None
    return torch.from_numpy(ids), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])), weights


def train(tables: EmbeddingTables, weighted=False, last: int = NUM_STEPS) -> list[torch.Tensor]:
    """Gradients that depend on the step and the sample alone, not on the rows: what each row gets is known."""
    outputs = []
    for step in range(tables.completed_steps + 1, last + 1):
        ids, offsets, weights = batch(step, weighted)
        tables.set_context(step)
        out = tables(ids, offsets, weights)
        outputs.append(out.detach().clone())
        (out * torch.arange(out.numel(), dtype=out.dtype).view(out.shape).add(step).cos()).sum().backward()
        tables.step(step)
    return outputs


@pytest.mark.parametrize(("backend", "weighted"), [("cpu", False), ("cpu", True), ("reference", False)])
@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_a_row_is_trained_as_by_its_own_optimizer(backend, weighted, pooling) -> None:
    mixed = tables_of(ByBucket.of(W, (AR, (1,))), backend, pooling)
    outputs = train(mixed, weighted)
    assert torch.equal(mixed.state("item")["bucket"], torch.from_numpy(BUCKETS))
    for optimizer, buckets in ((W, (0, 2)), (AR, (1,))):
        alone = tables_of(optimizer, backend, pooling)
        train(alone, weighted)
        rows = torch.from_numpy(np.flatnonzero(np.isin(BUCKETS, buckets)))
        for decay in (True, False):
            assert torch.equal(mixed.read("item", rows, decay=decay), alone.read("item", rows, decay=decay))
        for name, state in alone.state("item").items():
            assert torch.equal(mixed.state("item")[name][rows], state[rows])
    # What a lookup reads is what the tables read.
    ids, offsets, weights = batch(NUM_STEPS + 1, weighted)
    out, rows = mixed.eval()(ids, offsets, weights).detach(), mixed.read("item")
    singles = rows[ids[:5]] * (ids[:5] != 0)[:, None] * (1.0 if weights is None else weights[:5, None])
    torch.testing.assert_close(out[:5, :4], singles, rtol=1e-6, atol=1e-8)
    assert len(outputs) == NUM_STEPS


def test_all_rows_of_one_bucket_are_a_plain_table() -> None:
    """Outputs of pooled lists with swaps too: nothing is added to the sums but zeros."""
    plain, mixed = tables_of(AR), tables_of(ByBucket.of(W, (AR, (0, 1, 2))))
    for one, other in zip(train(plain), train(mixed), strict=True):
        assert torch.equal(one, other)


def test_a_copy_and_what_is_loaded_go_on_alike() -> None:
    mixed = tables_of(ByBucket.of(W, (AR, (1,))))
    train(mixed, last=6)
    twin, loaded = copy.deepcopy(mixed), tables_of(ByBucket.of(W, (AR, (1,))))
    loaded.layout.bucket(0).zero_()
    loaded.load("item", mixed.weight("item"), mixed.state("item"))
    loaded.completed_steps = 6
    for one in (mixed, twin, loaded):
        train(one)
    for one in (twin, loaded):
        assert torch.equal(mixed.read("item"), one.read("item"))
    # Initial rows again, in their buckets.
    twin.reset()
    assert torch.equal(twin.state("item")["bucket"], torch.from_numpy(BUCKETS))


def test_a_shard_has_the_buckets_of_its_rows() -> None:
    shard = tables_of(ByBucket.of(W, (AR, (1,))), row_start=7, row_count=11, pooling="none")
    assert torch.equal(shard.state("item")["bucket"], torch.from_numpy(BUCKETS[7:18]))


def test_the_norm_of_the_gradient_is_that_of_all_rows() -> None:
    norms = []
    for optimizer in (W, ByBucket.of(W, (AR, (1,)))):
        tables = tables_of(optimizer)
        tables(*batch(1, weighted=False)).sum().backward()
        norms.append(tables.gradient_squared_norm())
    assert norms[0] == norms[1] > 0


def test_bad_ids_are_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="id 99 is not a row of table 'item'"):
        tables_of(ByBucket.of(W, (AR, (1,))))(torch.tensor([99, 3]), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    ("first", "others", "message"),
    [
        (W, [(Adagrad(0.01), (1,))], "AdamW and Adagrad differ in .*rule"),
        (W, [(AdamAR(0.02), (1,))], "AdamW and AdamAR differ in learning_rate: .*decay alone"),
        (W, [(AR, (1, 2)), (Adam(0.01), (2,))], r"buckets \[1, 2, 2\] must be numbers from 0 to 127"),
        (W, [(AR, (128,))], "must be numbers from 0 to 127"),
    ],
)
def test_what_buckets_cannot_have(first, others, message) -> None:
    with pytest.raises(ValueError, match=message):
        ByBucket.of(first, *others)


def test_what_does_not_go_with_buckets_says_so() -> None:
    optimizer = ByBucket.of(W, (AR, (1,)))
    with pytest.raises(ValueError, match="FBGEMM has one optimizer for a table: use backend"):
        tables_of(optimizer, "fbgemm")
    with pytest.raises(ValueError, match="cannot be moved for a step: use one optimizer for all"):
        perturb(tables_of(optimizer), 0.1)
    with pytest.raises(ValueError, match="buckets has 3 entries for 5 rows"):
        TableConfig("item", 5, 4, ("item",), buckets=np.zeros(3, np.int8))
