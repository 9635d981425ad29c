"""Rows moved for a second lookup of a step: read where they should be, whatever they owe, and put back bit for bit."""

from __future__ import annotations

import pytest
import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD, Adagrad, AdagradAR, Adam, AdamAR, AdamW, RMSpropAR, RowwiseAdam, RowwiseAdamAR
from embeddings.perturbation import perturb
from embeddings.tables.config import InitConfig, TableConfig

OPTIMIZERS = [
    SGD(0.1),
    Adagrad(0.1),
    AdagradAR(0.1, alpha=0.05),
    Adam(0.1),
    Adam(0.1, moments="lazy"),
    AdamW(0.1, weight_decay=0.3, first_touch="literal"),
    AdamAR(0.1, alpha=0.02),
    AdamAR(0.1, alpha=0.5),  # rows that have decayed to nothing
    RMSpropAR(0.1, alpha=0.05),
    RowwiseAdam(0.1),
    RowwiseAdamAR(0.1, alpha=0.02),
]


# The compiled kernel in the type of jobs, for which it is compiled anyway; its reads are rounded otherwise.
DTYPES = {"reference": torch.float64, "cpu": torch.float32}
CLOSE = {"reference": {"rtol": 1e-12, "atol": 1e-14}, "cpu": {"rtol": 1e-5, "atol": 1e-5}}


def trained(optimizer, backend, dtype=torch.float64) -> EmbeddingTables:
    """Nine steps over 12 rows, of which some idle: lists of ids, some twice, of two features of one table."""
    tables = EmbeddingTables(
        [TableConfig("t", 12, 4, ("a", "b"), pooling={"a": "sum", "b": "mean"}, init=InitConfig("normal", 0.5))],
        optimizer, backend=backend, dtype=dtype, seed=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for k in range(1, 10):
        high = 12 if k < 4 else 7
        ids = torch.randint(2, high, (9,), generator=generator)
        tables.set_context(k)
        out = tables(ids, torch.tensor([0, 2, 4, 5, 6, 7, 9]))
        (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum().backward()
        tables.step(k)
    return tables


def bits(tables: EmbeddingTables) -> list[torch.Tensor]:
    return [tables.weight("t").clone(), *(value.clone() for value in tables.state("t").values())]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{type(o).__name__}-{getattr(o, 'alpha', '')}")
def test_a_second_lookup_reads_rows_moved_and_the_next_reads_them_as_before(optimizer, backend):
    dtype = DTYPES[backend]
    tables = trained(optimizer, backend, dtype)
    ids, offsets = torch.tensor([0, 2, 2, 8, 11, 3, 9]), torch.tensor([0, 1, 3, 4, 5, 6, 7])
    tables.set_context(10)
    before, read = bits(tables), tables.read("t")
    factors = torch.randn(3, 8, generator=torch.Generator().manual_seed(2), dtype=dtype)
    (tables(ids, offsets) * factors).sum().backward()
    rows = torch.zeros(12, 4, dtype=dtype, requires_grad=True)
    # The same gradient by torch alone: row 0 is padding.
    a = torch.stack([rows[0] * 0, rows[2] + rows[2], rows[8]])
    b = torch.stack([rows[11], rows[3], rows[9]])
    (torch.cat([a, b], dim=1) * factors).sum().backward()

    restore = perturb(tables, 0.25)
    torch.testing.assert_close(tables.read("t"), read + 0.25 * rows.grad, **CLOSE[backend])
    assert bool((rows.grad[[2, 3, 8, 9, 11]].abs().sum(1) > 0).all())
    assert not torch.equal(tables.weight("t"), before[0])
    restore()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bits(tables), before, strict=True))
    assert torch.equal(tables.read("t"), read)
    assert tables.num_records == 1  # the first pass is still there, to be dropped by the caller
    restore()  # again: nothing
    assert torch.equal(tables.read("t"), read)


def test_the_first_step_of_all():
    """No step is complete: rows were never touched, and owe nothing."""
    tables = EmbeddingTables(
        [TableConfig("t", 6, 4, ("a",), init=InitConfig("normal", 0.5))],
        AdamW(0.1, weight_decay=0.3),
        backend="reference",
        dtype=torch.float64,
    )
    before = bits(tables)
    tables(torch.tensor([3]), torch.tensor([0, 1])).sum().backward()
    restore = perturb(tables, 1.0)
    expected = before[0].clone()
    expected[3] += 1.0
    torch.testing.assert_close(tables.read("t"), expected, rtol=1e-12, atol=0)
    restore()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bits(tables), before, strict=True))


def test_half_rows_cannot_hold_it():
    tables = trained(SGD(0.1), "reference", torch.bfloat16)
    with pytest.raises(ValueError, match="use float32"):
        perturb(tables, 0.1)


@pytest.mark.parametrize("optimizer", [Adam(0.1), AdamAR(0.1, alpha=0.01)], ids=lambda o: type(o).__name__)
def test_rows_born_again_are_trained_as_new_ones(optimizer):
    """MEDA: after ``reset(K)`` a table goes on as one that begins, its optimizer's bias correction too; draws of SSE go
    on counting."""
    again, fresh = (trained(optimizer, "cpu", torch.float32) for _ in range(2))
    again.reset(9)
    fresh.reset()
    assert (again.birth_step, again.completed_steps) == (9, 9)
    for k in (1, 2, 3):
        ids = torch.tensor([2, 5 + k, 4])
        for tables, step in ((again, 9 + k), (fresh, k)):
            tables.set_context(step)
            out = tables(ids, torch.tensor([0, 1, 3]))
            (out * torch.arange(8.0)).sum().backward()
            tables.step(step)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(bits(again), bits(fresh), strict=True))
    assert torch.equal(again.read("t"), fresh.read("t"))
    # Bias-corrected, the first step is as long as the learning rate.
    again.reset(12)
    start = again.read("t")
    again.set_context(13)
    again(torch.tensor([2, 2]), torch.tensor([0, 1, 2])).sum().backward()
    again.step(13)
    torch.testing.assert_close(start[2] - again.read("t")[2], torch.full((4,), 0.1), rtol=1e-5, atol=0)
