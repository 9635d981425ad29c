"""EmbeddingTables: pooling against torch, recording and stepping, reading, shards, and errors."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD, Adagrad, Adam, AdamAR, RMSprop, RowwiseAdam
from embeddings.tables.config import InitConfig, TableConfig

BACKENDS = ("reference", "cpu")
pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def make(backend, optimizer=None, dtype=torch.float64, **table):
    config = {
        "name": "item",
        "num_rows": 30,
        "dim": 4,
        "features": ("item",),
        "init": InitConfig("normal", 1.0),
    } | table
    return EmbeddingTables([TableConfig(**config)], optimizer or SGD(0.1), backend=backend, dtype=dtype)


def bags(lengths, num_rows=30, first=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    return torch.randint(first, num_rows, (int(offsets[-1]),), generator=generator), offsets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_pooling_equals_embedding_bag(backend, pooling, dtype):
    """With padding and empty bags; sum also with weights. Tolerance: rounding of sums of up to 9 rows."""
    tables = make(backend, dtype=dtype, pooling=pooling)
    ids, offsets = bags([3, 0, 1, 9, 2], first=0)
    weight = tables.weight("item")
    expected = nn.functional.embedding_bag(ids, weight, offsets, mode=pooling, padding_idx=0, include_last_offset=True)
    torch.testing.assert_close(tables(ids, offsets), expected, rtol=1e-6, atol=1e-6)
    if pooling == "sum":
        scales = torch.rand(len(ids), dtype=dtype)
        expected = nn.functional.embedding_bag(
            ids, weight, offsets, mode="sum", per_sample_weights=scales, padding_idx=0, include_last_offset=True
        )
        torch.testing.assert_close(tables(ids, offsets, scales), expected, rtol=1e-6, atol=1e-6)


def test_features_of_one_table_pool_each_in_its_way(backend):
    tables = make(backend, features=("item", "history"), pooling={"history": "mean", "item": "sum"})
    ids, offsets = bags([1, 1, 3, 2])
    rows = tables.weight("item")[ids]
    expected = torch.stack([torch.cat([rows[0], rows[2:5].mean(0)]), torch.cat([rows[1], rows[5:7].mean(0)])])
    assert tables.features == ("item", "history")
    torch.testing.assert_close(tables(ids, offsets), expected)


def test_gradcheck(backend):
    """The recorded gradient, as SGD with rate 1 applies it, against finite differences of the pooled output."""
    configs = [
        TableConfig("a", 6, 3, ("x", "y"), pooling=("sum", "mean"), init=InitConfig("normal", 1.0)),
        TableConfig("b", 5, 2, ("z",), init=InitConfig("normal", 1.0)),
    ]
    lengths = [2, 1, 3, 2, 0, 4]
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    ids = torch.tensor([1, 2, 2, 5, 3, 3, 0, 4, 1, 1, 4, 2])
    scales = torch.linspace(0.5, 1.5, 12, dtype=torch.float64)
    mix = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    class Pooled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return lookup(a, b)[0]

        @staticmethod
        def backward(ctx, grad):
            tables, output = None, None
            with torch.enable_grad():
                output, tables = lookup(*ctx.saved_tensors)
                output.backward(grad)
            before = [tables.weight(name).clone() for name in "ab"]
            tables.step(1)
            return tuple(old - tables.weight(name) for old, name in zip(before, "ab", strict=True))

    def lookup(a, b):
        tables = EmbeddingTables(configs, SGD(1.0), backend=backend, dtype=torch.float64)
        tables.weight("a").copy_(a)
        tables.weight("b").copy_(b)
        return tables(ids, offsets, scales), tables

    tables = EmbeddingTables(configs, SGD(1.0), backend=backend, dtype=torch.float64)
    inputs = [tables.weight(name).clone().requires_grad_() for name in "ab"]
    assert torch.autograd.gradcheck(lambda a, b: (Pooled.apply(a, b) * mix).sin(), inputs)


def test_padding_and_zero_weights_are_not_touched(backend):
    tables = make(backend, Adam(0.1))
    ids = torch.tensor([0, 3, 4, 5])
    tables(ids, torch.tensor([0, 4]), torch.tensor([1.0, 0.0, 1.0, 2.0])).sum().backward()
    tables.step(1)
    assert tables.state("item")["last_update_step"].nonzero()[:, 0].tolist() == [4, 5]
    assert not tables.weight("item")[0].any()


def test_a_touch_with_zero_gradient_counts(backend):
    tables = make(backend, AdamAR(0.1))
    (tables(torch.tensor([3]), torch.tensor([0, 1])) * 0.0).sum().backward()
    tables.step(1)
    assert tables.state("item")["last_update_step"][3] == 1


def test_several_backwards_are_one_step(backend):
    """Two uses in a step, and accumulated gradients, give the step of the summed gradient."""
    once, twice = make(backend, Adagrad(0.1)), make(backend, Adagrad(0.1))
    ids, offsets = bags([2, 3, 1])
    more, more_offsets = bags([1, 4], seed=1)
    joined = once(torch.cat([ids, more]), torch.cat([offsets, more_offsets[1:] + len(ids)]))
    joined.square().sum().backward()
    once.step(1)
    twice(ids, offsets).square().sum().backward()
    twice(more, more_offsets).square().sum().backward()
    assert twice.num_records == 2
    twice.step(1)
    assert twice.num_records == 0
    torch.testing.assert_close(once.weight("item"), twice.weight("item"), rtol=1e-14, atol=1e-14)


def test_discard_drops_what_was_recorded(backend):
    tables = make(backend)
    before = tables.weight("item").clone()
    (tables(*bags([2, 3])) * float("nan")).sum().backward()
    assert not tables.gradient_is_finite()
    tables.discard()
    assert tables.gradient_is_finite()
    tables.step(1)
    assert torch.equal(tables.weight("item"), before)
    assert tables.completed_steps == 1


def test_nothing_is_recorded_without_gradients(backend):
    tables = make(backend)
    with torch.no_grad():
        assert not tables(*bags([2, 3])).requires_grad
    assert tables.num_records == 0


@pytest.mark.parametrize("k", [0, 2, 5])
def test_steps_that_do_not_follow_are_refused(backend, k):
    tables = make(backend)
    with pytest.raises(ValueError, match="does not follow 0 completed"):
        tables.step(k)
    with pytest.raises(ValueError, match="does not follow 0 completed"):
        tables.set_context(k)


def trained(backend, optimizer, num_steps=60, **table):
    tables = make(backend, optimizer, **table)
    for k in range(1, num_steps + 1):
        ids, offsets = bags([1, 2, 1], num_rows=30 if k % 20 == 0 else 6, seed=k)
        tables(ids, offsets).square().sum().backward()
        tables.step(k)
    return tables


@pytest.mark.parametrize("optimizer", [Adam(0.05), AdamAR(0.05, alpha=0.02), AdamAR(0.05, alpha=0.02, moments="lazy")])
def test_reading_changes_nothing_and_no_row_depends_on_others(backend, optimizer):
    tables = trained(backend, optimizer)
    stored = (tables.layout.weights, tables.layout.vectors, tables.layout.last_steps)
    frozen = [each.clone() for each in stored]
    first = tables.read("item")
    undecayed = tables.read("item", decay=False)
    alone = [tables.read("item", torch.tensor([row]), decay=False) for row in range(30)]
    assert torch.equal(torch.cat(alone), undecayed)
    tables.eval()
    pooled = tables(torch.arange(2, 30), torch.arange(29))
    torch.testing.assert_close(pooled, first[2:], rtol=1e-13, atol=1e-13)
    assert torch.equal(tables.read("item"), first)
    assert torch.equal(tables.read("item", torch.tensor([7, 3, 7])), first[[7, 3, 7]])
    assert all(torch.equal(a, b) for a, b in zip(frozen, stored, strict=True))
    assert not torch.equal(first, tables.weight("item"))
    first += 1.0
    assert not torch.equal(tables.read("item"), first)


@pytest.mark.parametrize("alpha", [5e-4, 0.02])
def test_read_without_decay_keeps_the_momentum(backend, alpha):
    """Lazy moments: the stored row. Dense: each row as if Adam without regularization had followed its last touch."""
    lazy = trained(backend, AdamAR(0.05, alpha=0.02, moments="lazy"))
    assert torch.equal(lazy.read("item", decay=False), lazy.weight("item"))
    tables = trained(backend, AdamAR(0.05, alpha=alpha))
    last = tables.state("item")["last_update_step"]
    idle = torch.arange(30)[(last > 0) & (last < 60)]
    now = {name: state[idle] for name, state in tables.state("item").items()}
    expected, num_steps = at_last_touch(tables, idle), tables.completed_steps
    for row, s in enumerate(last[idle].tolist()):
        for t in range(s + 1, num_steps + 1):
            mhat = now["m"][row] * 0.9 ** (t - s) / (1 - 0.9**t)
            vhat = now["v"][row] * 0.999 ** (t - s) / (1 - 0.999**t)
            expected[row] -= 0.05 * mhat / (vhat.sqrt() + 1e-8)
    torch.testing.assert_close(tables.read("item", idle, decay=False), expected, rtol=0, atol=1e-11)
    assert tables.read("item").norm() < tables.read("item", decay=False).norm()


def at_last_touch(tables, rows):
    """The value of each row right after its last touch: read from a copy that has gone no farther."""
    values = []
    for row in rows.tolist():
        then = copy.deepcopy(tables)
        then.completed_steps = int(tables.state("item")["last_update_step"][row])
        # Rows that were touched later could not be read.
        then.state("item")["last_update_step"].clamp_(max=then.completed_steps)
        values.append(then.read("item", torch.tensor([row]))[0])
    return torch.stack(values)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1), Adam(0.1), AdamAR(0.1, alpha=0.02)])
def test_restored_tables_go_on_as_if_never_stopped(backend, optimizer):
    """Bitwise, with rows idle across the cut."""
    tables = trained(backend, optimizer, num_steps=60)
    restored = make(backend, optimizer)
    restored.load("item", tables.weight("item").clone(), {k: v.clone() for k, v in tables.state("item").items()})
    restored.completed_steps = 60
    for k in range(61, 90):
        ids, offsets = bags([2, 2], seed=k)
        for each in (tables, restored):
            each(ids, offsets).square().sum().backward()
            each.step(k)
    assert torch.equal(tables.read("item"), restored.read("item"))
    assert torch.equal(tables.layout.vectors, restored.layout.vectors)
    assert torch.equal(tables.layout.last_steps, restored.layout.last_steps)


@pytest.mark.parametrize("optimizer", [SGD(0.1), AdamAR(0.1, alpha=0.02)])
def test_row_shards_together_are_the_whole(backend, optimizer):
    """Each shard gets its own ids, local, and the pooled outputs add up, as in a row-wise plan."""
    whole = make(backend, optimizer)
    shards = [make(backend, optimizer, row_start=start, row_count=count) for start, count in ((0, 11), (11, 19))]
    for k in range(1, 40):
        ids, offsets = bags([1, 3, 2], first=0, seed=k)
        total = 0
        for shard, start, count in zip(shards, (0, 11), (11, 19), strict=True):
            mine = (ids >= start) & (ids < start + count)
            local = torch.cat([torch.zeros(1, dtype=torch.int64), mine.long().cumsum(0)])[offsets]
            total = total + shard(ids[mine] - start, local)
        pooled = whole(ids, offsets)
        torch.testing.assert_close(total, pooled, rtol=1e-12, atol=1e-12)
        grad = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        pooled.backward(grad)
        total.backward(grad)
        for each in (whole, *shards):
            each.step(k)
    joined = torch.cat([shard.read("item") for shard in shards])
    torch.testing.assert_close(joined, whole.read("item"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [-1, 30, 2**40])
def test_bad_ids_are_named(backend, bad):
    tables = make(backend, features=("item", "history"))
    ids = torch.tensor([3, 4, bad, 5])
    with pytest.raises(
        ValueError, match=rf"feature 'history': id {bad} is not a row of table 'item', which has 30 rows"
    ):
        tables(ids, torch.tensor([0, 1, 2, 3, 4]))


def test_input_that_does_not_fit_is_refused(backend):
    tables = make(backend)
    ids, offsets = bags([2, 3])
    for arguments, message in [
        ((ids.short(), offsets), "int32 or int64"),
        ((ids, offsets.float()), "int32 or int64"),
        ((ids, offsets[:0]), "F = 1 features"),
        ((ids, offsets[:-1]), "offsets must run from 0 to the number of indices, 5"),
        ((ids, offsets + 1), "offsets must run from 0"),
        ((ids[None], offsets), r"must be \[n\]"),
        ((ids, torch.tensor([0, 4, 2, 5])), "feature 'item': offsets must not decrease"),
        ((ids, offsets, torch.ones(3)), "shape of indices"),
        ((ids, offsets, torch.ones(5, requires_grad=True)), "need no gradient"),
    ]:
        with pytest.raises(ValueError, match=message):
            tables(*arguments)
    two = make(backend, features=("a", "b"))
    with pytest.raises(ValueError, match="F = 2 features"):
        two(ids, offsets[:2])


def test_tables_that_make_no_sense_are_refused(backend):
    for change, message in [
        ({"dim": 0}, "dim must be at least 1"),
        ({"features": ()}, "at least one"),
        ({"pooling": "max"}, "sum, mean or none"),
        ({"pooling": {"other": "sum"}}, "pooling names"),
        ({"row_start": 20, "row_count": 20}, r"rows \[20, 40\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(backend, **change)
    with pytest.raises(ValueError, match="must each be unique"):
        EmbeddingTables([TableConfig("a", 5, 2, ("x",)), TableConfig("b", 5, 2, ("x",))], SGD(), backend=backend)
    with pytest.raises(ValueError, match=r"dtype must be one of torch\.float64, .* not torch\.int8"):
        make(backend, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"state_dtype must be one of"):
        EmbeddingTables([TableConfig("a", 5, 2, ("x",))], SGD(), backend=backend, state_dtype=torch.int8)
    for dtype, state in ((torch.float64, torch.float32), (torch.bfloat16, torch.float64)):
        with pytest.raises(ValueError, match=rf"{state} does not go with rows of {dtype}: .* leave state_dtype out"):
            EmbeddingTables([TableConfig("a", 5, 2, ("x",))], Adam(), backend=backend, dtype=dtype, state_dtype=state)
    with pytest.raises(ValueError, match="bounds must be 'fatal' or 'ignore', not 'wrap'"):
        EmbeddingTables([TableConfig("a", 5, 2, ("x",))], SGD(), backend=backend, bounds="wrap")
    with pytest.raises(ValueError, match="runs on the CPU, not on cuda:0"):
        EmbeddingTables([TableConfig("a", 5, 2, ("x",))], SGD(), backend=backend, device="cuda:0")
    with pytest.raises(ValueError, match=r"features \['x'\] have pooling none, \['y'\] do not"):
        make(backend, features=("x", "y"), pooling=("none", "sum"))
    with pytest.raises(ValueError, match=r"dims \[2, 3\].*one dim"):
        EmbeddingTables(
            [TableConfig("a", 5, 2, ("x",), "none"), TableConfig("b", 5, 3, ("y",), "none")], SGD(), backend=backend
        )
    with pytest.raises(ValueError, match="there is no table 'user'"):
        make(backend).read("user")
    with pytest.raises(ValueError, match="30 rows"):
        make(backend).read("item", torch.tensor([30]))


def test_loading_what_does_not_fit_changes_nothing(backend):
    tables = make(backend, Adam())
    before = tables.weight("item").clone()
    with pytest.raises(ValueError, match="state must hold"):
        tables.load("item", torch.zeros(30, 4), {})
    state = tables.state("item") | {"last_update_step": torch.zeros(29, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"last_update_step must have shape \[30\]"):
        tables.load("item", torch.zeros(30, 4), state)
    assert torch.equal(tables.weight("item"), before)


def test_a_deep_copy_is_independent(backend):
    tables = trained(backend, Adam(0.1), num_steps=5)
    other = copy.deepcopy(tables)
    frozen = tables.weight("item").clone()
    for each, k in ((other, 6), (tables, 6)):
        assert torch.equal(each.weight("item"), frozen)
        each(*bags([2, 3])).sum().backward()
        each.step(k)
        assert not torch.equal(each.weight("item"), frozen)
    assert torch.equal(other.layout.last_steps, tables.layout.last_steps)
    assert torch.equal(other.read("item"), tables.read("item"))


@pytest.mark.parametrize("use", ["lookup", "read", "step"])
def test_rows_ahead_of_the_completed_steps_are_refused(backend, use):
    """Compiled kernels would read their coefficients at a negative place."""
    before = trained(backend, Adam(0.1), num_steps=50)
    tables = make(backend, Adam(0.1))
    ids, offsets = torch.arange(2, 12), torch.arange(11)
    if use == "step":
        tables(ids, offsets).sum().backward()
    tables.load("item", before.weight("item"), before.state("item"))
    calls = {
        "lookup": lambda: tables(ids, offsets), "read": lambda: tables.read("item"), "step": lambda: tables.step(1)
    }  # fmt: skip
    with pytest.raises(ValueError, match="last touched at step 50, after the 0 completed steps: restore completed_st"):
        calls[use]()
    tables.completed_steps = 50
    assert torch.equal(tables.read("item"), before.read("item"))


def test_the_table_of_a_non_finite_gradient_is_named(backend):
    for pooling in ("sum", "none"):
        configs = [TableConfig(name, 9, 4, (f"{name}1", f"{name}2"), pooling=pooling) for name in "ab"]
        tables = EmbeddingTables(configs, SGD(0.1), backend=backend)
        output = tables(torch.arange(2, 6), torch.arange(5))
        gradient = torch.zeros_like(output)
        # Of feature b2.
        gradient[-1, -1] = torch.nan
        output.backward(gradient)
        assert tables.non_finite_tables() == ["b"]


def test_a_shard_without_rows_ignores_every_id(backend):
    tables = EmbeddingTables(
        [TableConfig("item", 9, 4, ("item",), row_count=0)], SGD(0.1), backend=backend, bounds="ignore"
    )
    pooled = tables(torch.tensor([0, 1, 5, -1]), torch.tensor([0, 2, 4]))
    assert not pooled.any()
    pooled.sum().backward()
    tables.step(1)


@pytest.mark.parametrize("optimizer", [AdamAR(), RMSprop(), RowwiseAdam()])
def test_half_precision_cannot_hold_a_mean_of_squares(backend, optimizer):
    with pytest.raises(ValueError, match=rf"float16 cannot hold {type(optimizer).__name__}'s v.*use torch.bfloat16"):
        EmbeddingTables([TableConfig("item", 9, 4, ("item",))], optimizer, backend=backend, state_dtype=torch.float16)


def test_the_last_step_that_can_be_counted(backend):
    tables = make(backend, Adam(0.1))
    tables.completed_steps = 2**31 - 2
    tables(torch.arange(2, 5), torch.arange(4)).sum().backward()
    tables.step(2**31 - 1)
    assert tables.state("item")["last_update_step"].max() == 2**31 - 1
    assert tables.read("item").isfinite().all()
    with pytest.raises(ValueError, match="int32: 2147483647 steps are the most"):
        tables.step(2**31)


OVERFLOWING = {
    "finite": ([3e38, 3e38], True),
    "negative": ([-3e38, -3e38], True),
    "nan": ([1.0, math.nan], False),
    "opposite": ([math.inf, -math.inf], False),
    "one": ([3e38, 3e38, math.inf], False),
}


@pytest.mark.parametrize("case", OVERFLOWING)
def test_gradients_whose_sum_overflows_are_finite(backend, case):
    """One sum says that all are finite, where it is; where it is not, each is looked at."""
    values, finite = OVERFLOWING[case]
    tables = EmbeddingTables([TableConfig("item", 10, 1, ("item",))], SGD(0.1), backend=backend)
    pooled = tables(torch.arange(2, 2 + len(values)), torch.arange(len(values) + 1))
    pooled.backward(torch.tensor(values)[:, None])
    assert tables.gradient_is_finite() is finite
    assert tables.non_finite_tables() == ([] if finite else ["item"])
