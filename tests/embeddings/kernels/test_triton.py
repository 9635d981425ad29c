"""The Triton kernel against the reference: on a CPU by Triton's interpreter, on a GPU by `make gpu-check`.

The interpreter takes a tenth of a millisecond for each operation of a program, so problems are small, and tiles and
splits with them where their bounds matter.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.triton import philox
from embeddings.kernels.triton.kernel import Tiling
from embeddings.optim import (
    SGD,
    Adagrad,
    AdagradAR,
    Adam,
    AdamAR,
    AdamW,
    RMSprop,
    RMSpropAR,
    RowOptimizer,
    RowwiseAdagrad,
    RowwiseAdam,
    RowwiseAdamAR,
)
from embeddings.optim.lr_schedules import LinearWarmup
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.sse.swap import swap_in_numpy
from embeddings.tables import philox as words_in_numpy
from embeddings.tables.config import InitConfig, TableConfig

ROOT = Path(__file__).resolve().parents[3]
DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
SMALL = Tiling(elements=256, moving=128, rows=16, samples=16, walkers=8, entries=32, window=2, warps=4)


@triton.jit
def draw_words(output, counters, key0, key1, n, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    c0 = tl.load(counters + i).to(tl.uint32)
    c1 = tl.load(counters + COUNT + i).to(tl.uint32)
    c2 = tl.load(counters + 2 * COUNT + i).to(tl.uint32)
    key0, key1 = key0.to(tl.uint32), key1.to(tl.uint32)
    stream = tl.full([], 1, tl.uint32)
    tl.store(output + i, philox.one_word(c0, c1, c2, stream, key0, key1, i % 4).to(tl.int64))
    bound = tl.zeros([COUNT], tl.int64) + n
    tl.store(output + COUNT + i, philox.below(bound, c0, c1, c2, stream, key0, key1, i % 4))


def pair(
    tables, optimizer: RowOptimizer, *, small: bool = False, **settings
) -> tuple[EmbeddingTables, EmbeddingTables]:
    """The same tables in the reference and in Triton."""
    reference = EmbeddingTables(tables, optimizer, seed=5, backend="reference", **settings)
    other = EmbeddingTables(tables, optimizer, seed=5, backend="triton", device=DEVICE, **settings)
    if small:
        other._kernel.tiling, other._kernel.split = SMALL, 4
    return reference, other


def draw_batch(tables, batch_size: int, longest: int, seed: int, dtype=torch.int64):
    """Bags of 0 to ``longest`` ids for every feature, half of them among few rows."""
    generator = np.random.default_rng(seed)
    ids, lengths = [np.empty(0, np.int64)], []
    for table in tables:
        for _ in table.features:
            length = generator.integers(0, longest + 1, batch_size)
            few, size = min(table.num_rows, 3), int(length.sum())
            hot = generator.random(size) < 0.5
            ids.append(np.where(hot, generator.integers(0, few, size), generator.integers(0, table.num_rows, size)))
            lengths.append(length)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    weights = generator.uniform(0.5, 2.0, offsets[-1]) * (generator.random(offsets[-1]) < 0.8)
    return (
        torch.from_numpy(np.concatenate(ids)).to(dtype),
        torch.from_numpy(offsets).to(dtype),
        torch.from_numpy(weights),
    )


def look_up(tables: EmbeddingTables, ids, offsets, weights=None) -> torch.Tensor:
    given = (each if each is None else each.to(tables.layout.device) for each in (ids, offsets, weights))
    return tables(*given)


def train(two, tables, num_steps: int = 3, *, weighted: bool = True, seed: int = 0, **batch) -> None:
    """Steps of both, compared: swapped ids and last steps bit for bit, outputs and rows to rounding. The first step has
    two backwards, the second nothing: at the third every row has idled, none is read as it is stored."""
    dtype = two[0].layout.compute_dtype
    # Sums of some ten rows and of as many gradients, in another order.
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    for k in range(1, num_steps + 1):
        for half in range({1: 2, 2: 0}.get(k, 1)):
            ids, offsets, weights = draw_batch(tables, seed=100 * seed + 2 * k + half, **batch)
            weights = weights.to(dtype) if weighted and not half else None
            expected, got = (look_up(each, ids, offsets, weights) for each in two)
            torch.testing.assert_close(got.cpu(), expected, rtol=10 * tolerance, atol=tolerance)
            for output in (expected, got):
                (output.square() / 2 + 2.0 * output).sum().backward()
        for expected, got in zip(two[0]._records, two[1]._records, strict=True):
            assert torch.equal(got.indices.cpu(), expected.indices)
        expected, got = (each.gradient_squared_norm() for each in two)
        assert got == pytest.approx(expected, rel=10 * tolerance)
        for each in two:
            each.step(k, 0.5 if k == 3 else 1.0)
    for table in tables:
        expected, got = (each.read(table.name).cpu() for each in two)
        torch.testing.assert_close(got, expected, rtol=10 * tolerance, atol=tolerance)
        expected, got = ({name: value.cpu() for name, value in each.state(table.name).items()} for each in two)
        assert torch.equal(got.pop("last_update_step"), expected.pop("last_update_step"))
        torch.testing.assert_close(got, expected, rtol=10 * tolerance, atol=10 * tolerance)


NORMAL = InitConfig("normal", 0.5)
TABLES = (
    TableConfig("a", 40, 16, ("a", "b"), ("sum", "mean"), init=NORMAL),
    TableConfig("c", 7, 5, ("c",), init=NORMAL, first_live_row=0),
)
SSE = {"a": SSEConfig(0.3), "c": SSEConfig(1.0)}
OPTIMIZERS = {
    "sgd": SGD(0.1, clip_row_norm=1.0),
    "adagrad": Adagrad(0.1, weight_decay=0.1, first_touch="literal"),
    "adagrad_ar": AdagradAR(0.1, alpha=0.1, eps_inside_root=True),
    "adam": Adam(0.1),
    "adam-no-momentum": Adam(0.1, beta1=0.0),
    "adam-lazy": Adam(0.1, moments="lazy"),
    "adam_w": AdamW(0.1, weight_decay=0.1, first_touch="literal", eps_inside_root=True),
    "adam_ar": AdamAR(0.1, alpha=0.02, schedule=LinearWarmup(warmup_steps=3)),
    "rowwise_adagrad": RowwiseAdagrad(0.1),
    "rmsprop": RMSprop(0.1, clip_row_norm=1.0),
    "rmsprop_ar": RMSpropAR(0.1, alpha=0.1, eps_inside_root=True),
    "rowwise_adam": RowwiseAdam(0.1),
    "rowwise_adam-lazy": RowwiseAdam(0.1, moments="lazy", eps_inside_root=True),
    "rowwise_adam_ar": RowwiseAdamAR(0.1, alpha=0.002, schedule=LinearWarmup(warmup_steps=3)),
}


@pytest.mark.parametrize("n", [1, 7, 2**22, 2**22 + 1, 3_000_000_000])
def test_words_are_those_of_philox(n):
    """Every bit of counters and keys counts, and numbers above 2^22 take two words."""
    counters = np.random.default_rng(n).integers(0, 2**32, (3, 64))
    output = torch.zeros(2, 64, dtype=torch.int64, device=DEVICE)
    key = (0xFFFFFFF1, 0x80000001)
    draw_words[(1,)](output, torch.from_numpy(counters).to(DEVICE), *key, n, 64)
    lanes = np.arange(64) % 4
    high, low = (
        words_in_numpy.lane(words_in_numpy.philox4x32((*counters, stream), key), lanes) for stream in (1, 1 + 2**31)
    )
    assert np.array_equal(output[0].cpu().numpy(), high.astype(np.int64))
    assert np.array_equal(output[1].cpu().numpy(), words_in_numpy.uniform_below(n, high, low).astype(np.int64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_swaps_are_those_of_sse(dtype):
    """A table of more than 2^22 rows, one with a graph, sequences, and an offset into the global batch."""
    num_rows = 2**22 + 1000
    edges = np.random.default_rng(0).integers(2, 50, (2, 300))
    graph = Graph.from_edges(*edges, 50)
    tables = (TableConfig("large", num_rows, 1, ("x",)), TableConfig("graph", 50, 1, ("y", "z")))
    sse = {"x": SSEConfig(0.5), "y": SSEConfig(1.0, graph, 20.0), "z": SSEConfig(0.0)}
    other = EmbeddingTables(tables, SGD(), sse=sse, seed=3, backend="triton", device=DEVICE)
    # Tiles begin inside blocks of samples, whose hits before them are not theirs.
    other._kernel.tiling = SMALL
    other._sample_offset = 6
    ids, offsets, _ = draw_batch(tables, 30, 4, seed=1, dtype=dtype)
    used = look_up(other, ids, offsets).grad_fn.lookup[0].cpu()
    assert used.dtype == dtype
    for number, (name, config) in enumerate(sse.items()):
        bounds = offsets[30 * number : 30 * number + 31].long()
        expected = swap_in_numpy(
            ids[bounds[0] : bounds[-1]].long(), bounds, table=tables[min(number, 1)], feature=name, config=config,
            seed=3, step=1, sample_offset=6,
        )  # fmt: skip
        assert torch.equal(used[bounds[0] : bounds[-1]].long(), expected)
    assert (used != ids).sum() > 30


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [(each, torch.float64) for each in OPTIMIZERS.values()]
    + [(OPTIMIZERS[name], torch.float32) for name in ("adam_ar", "rowwise_adam_ar")],
    ids=[*OPTIMIZERS, "adam_ar-float32", "rowwise_adam_ar-float32"],
)
def test_equals_the_reference(optimizer, dtype):
    """Sum and mean, tables of two dims, weights, two backwards in a step, SSE, a scaled gradient."""
    two = pair(TABLES, optimizer, sse=SSE, dtype=dtype)
    train(two, TABLES, batch_size=12, longest=3)


def test_a_backward_without_ids_beside_others():
    """Its gradient has rows, none of which belongs to an id."""
    two = pair(TABLES, SGD(1.0))
    batches = [draw_batch(TABLES, 6, longest, seed=3)[:2] for longest in (0, 3)]
    for each in two:
        for batch in batches:
            output = look_up(each, *batch)
            output.backward(torch.arange(output.numel(), device=output.device).view_as(output).float())
        each.step(1)
    for name in "ac":
        torch.testing.assert_close(two[1].read(name).cpu(), two[0].read(name), rtol=1e-5, atol=1e-6)


def test_bounds_of_tiles_and_splits():
    """Rows that occur in several programs and many times in one: pieces, their sums, and rows beside them."""
    two = pair(TABLES, OPTIMIZERS["adam_ar"], small=True, sse=SSE)
    train(two, TABLES, 1, batch_size=40, longest=3)


@pytest.mark.parametrize("num_hot", [1, 4, 5, 8, 9, 11, 24, 41])
def test_a_run_of_every_length_is_summed_once(num_hot):
    """Row 3 occurs ``num_hot`` times after row 2, which moves where its run starts; row 4 follows."""
    tables = (TableConfig("a", 6, 3, ("a",)),)
    two = pair(tables, SGD(1.0), small=True, dtype=torch.float64)
    ids = torch.tensor([2] * (num_hot % 5) + [3] * num_hot + [4, 4])
    grad = torch.randn(len(ids), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(num_hot))
    for each in two:
        look_up(each, ids, torch.arange(len(ids) + 1)).backward(grad.to(each.layout.device))
        each.step(1)
    torch.testing.assert_close(two[1].read("a").cpu(), two[0].read("a"), rtol=1e-13, atol=1e-13)


def test_without_pooling():
    tables = (TableConfig("a", 30, 8, ("a", "b"), "none", init=NORMAL),)
    two = pair(tables, Adam(0.1), sse={"b": SSEConfig(0.5)})
    train(two, tables, batch_size=9, longest=4)


def test_bitwise_the_same_in_every_run():
    results = []
    for _ in range(2):
        tables = EmbeddingTables(TABLES, OPTIMIZERS["adam_ar"], sse=SSE, seed=5, backend="triton", device=DEVICE)
        tables._kernel.split = 4
        for k in (1, 2):
            look_up(tables, *draw_batch(TABLES, 20, 3, seed=k)[:2]).square().sum().backward()
            tables.step(k)
        results.append((tables.layout.weights, tables.layout.vectors, tables.layout.last_steps))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_deep_copy_is_independent():
    tables = EmbeddingTables(TABLES, Adam(0.1), backend="triton", device=DEVICE)
    batch = draw_batch(TABLES, 5, 3, seed=0)[:2]
    look_up(tables, *batch).sum().backward()
    tables.step(1)
    other = copy.deepcopy(tables)
    before = tables.layout.weights.clone()
    look_up(other, *batch).sum().backward()
    other.step(2)
    assert torch.equal(tables.layout.weights, before)
    assert not torch.equal(other.layout.weights, before)
    assert torch.equal(other.read("a").isfinite().all(), torch.tensor(True, device=DEVICE))


def step(tables: EmbeddingTables, ids: list[int], offsets: list[int]) -> None:
    look_up(tables, torch.tensor(ids), torch.tensor(offsets)).sum().backward()
    tables.step(1)


def test_bad_ids_and_offsets_are_named():
    """On a GPU at the latest before a row is changed."""
    for ids, offsets, message in [
        ([3, 40], [0, 1, 2, 2], r"feature 'b': id 40 is not a row of table 'a', which has 40 rows"),
        ([3, -1], [0, 1, 1, 2], r"feature 'c': id -1 is not a row"),
        ([3, 3, 3], [0, 2, 1, 3], r"feature 'b': offsets must not decrease"),
        ([3, 3, 3], [0, 1, 1, 2], r"offsets must run from 0 to the number of indices, 3, not from 0 to 2"),
    ]:
        tables = EmbeddingTables(TABLES, SGD(), backend="triton", device=DEVICE)
        before = tables.layout.weights.clone()
        with pytest.raises(ValueError, match=message):
            step(tables, ids, offsets)
        assert torch.equal(tables.layout.weights, before)
        # The fault is forgotten with the lookup that had it.
        tables.discard()
        step(tables, [2, 2, 2], [0, 1, 2, 3])
        assert not torch.equal(tables.layout.weights, before)


def test_ids_out_of_bounds_are_ignored_where_asked():
    two = pair(TABLES, Adam(0.1), bounds="ignore", sse=SSE)
    ids, offsets, weights = draw_batch(TABLES, 9, 4, seed=2)
    ids[::3] = torch.tensor([-1, 40, 2**40]).repeat(len(ids))[: len(ids[::3])]
    outputs = [look_up(each, ids, offsets, weights.float()) for each in two]
    torch.testing.assert_close(outputs[1].cpu(), outputs[0], rtol=1e-5, atol=1e-6)
    for each, output in zip(two, outputs, strict=True):
        output.square().sum().backward()
        each.step(1)
    for name in "ac":
        torch.testing.assert_close(two[1].read(name).cpu(), two[0].read(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "value", "gap"),
    [(torch.bfloat16, 1.0, 2.0**-7), (torch.float16, -1.0, 2.0**-10), (torch.float16, 2.0**-20, 2.0**-24)],
    ids=["bfloat16", "float16", "float16-subnormal"],
)
def test_half_rows_are_rounded_without_bias(dtype, value, gap):
    """A row 0.3 of the way from one half to the next becomes the next with probability 0.3."""
    tables = EmbeddingTables(
        [TableConfig("a", 1024, 4, ("a",))], SGD(1.0), backend="triton", device=DEVICE, dtype=dtype
    )
    tables.weight("a").fill_(value)
    away = gap if value > 0 else -gap
    grad = torch.full((1024, 4), -0.3 * away, device=DEVICE)
    look_up(tables, torch.arange(1024), torch.arange(1025)).backward(grad)
    tables.step(1)
    # Row 0 is padding.
    stored = tables.weight("a")[1:].float()
    up = stored == value + away
    assert torch.equal(up | (stored == value), torch.ones_like(up))
    # Five standard deviations of a mean of 4092 draws.
    assert abs(float(up.float().mean()) - 0.3) < 5 * (0.21 / up.numel()) ** 0.5
    assert len({tuple(column.tolist()) for column in up.T}) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("column_start", [4, 6], ids=["aligned", "unaligned"])
def test_half_rows_are_rounded_as_in_the_whole_table_of_the_reference(column_start, dtype):
    """A shard of rows and columns stores the bits that the whole table has there: halves of every size, infinities."""
    whole = EmbeddingTables([TableConfig("a", 20, 12, ("a",))], SGD(1.0), seed=9, backend="reference", dtype=dtype)
    shard_config = TableConfig(
        "a", 20, 12 - column_start, ("a",), row_start=8, row_count=12, column_start=column_start, total_dim=12
    )
    shard = EmbeddingTables([shard_config], SGD(1.0), seed=9, backend="triton", device=DEVICE, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(12, 12, generator=generator) * 2.0 ** torch.randint(-26, 10, (12, 12), generator=generator)
    grad[-1] = torch.tensor([float("inf"), float("-inf"), 0.0]).repeat(4)
    whole(torch.arange(8, 20), torch.arange(13)).backward(grad)
    look_up(shard, torch.arange(12), torch.arange(13)).backward(grad[:, column_start:].to(DEVICE))
    for each in (whole, shard):
        each.step(1)
    expected, got = whole.weight("a")[8:, column_start:], shard.weight("a").cpu()
    assert torch.equal(got.view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.process
def test_compiles_for_a_gpu(tmp_path):
    """Which needs none. What the interpreter can't see: types, and that rows are moved in accesses of 16 bytes."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/embeddings/kernels/triton_for_gpu.py"), "fp32", "bf16"],
        cwd=ROOT, check=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = [json.loads(text) for text in done.stdout.splitlines()]
    kernels = {(each["kernel"], each["stored"]): each["moves"] for each in found if each["optimizer"] == "adam"}
    others = {(each["kernel"], each["optimizer"]): each["moves"] for each in found if each["optimizer"] != "adam"}
    assert set(kernels) == {(name, "fp32") for name in ("swap", "lookup", "entries", "update", "finish")} | {
        ("update", "bf16")
    }
    # A tile of 32 rows of 64 over 128 threads: 4 accesses for each of rows, m and v, and of the output.
    assert kernels["lookup", "fp32"]["ld.global.v4.b32"] == 12
    assert kernels["lookup", "fp32"]["st.global.v4.b32"] == 4
    # Rows, m, v and four gradients of 32 pieces, and 16 gradients in the midst of a run; rows, m, v and sums.
    assert kernels["update", "fp32"]["ld.global.v4.b32"] == 30
    assert kernels["update", "fp32"]["st.global.v4.b32"] >= 16
    # Half as much of rows.
    assert kernels["update", "bf16"]["ld.global.v4.b32"] == 28
    # Without m, or with a v that is one number for each row, 4 less; without either 8.
    assert others["lookup", "rowwise_adam"]["ld.global.v4.b32"] == 8
    wide = {name: others["update", name]["ld.global.v4.b32"] for name in ("rmsprop", "rowwise_adam", "rowwise_adagrad")}
    assert wide == {"rmsprop": 26, "rowwise_adam": 26, "rowwise_adagrad": 22}
    assert not any("local" in access for moves in (*kernels.values(), *others.values()) for access in moves)


@pytest.mark.process
def test_devices_that_do_not_fit_are_refused():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    program = (
        "from embeddings import EmbeddingTables, TableConfig\n"
        "from embeddings.optim import SGD\n"
        "try:\n"
        "    EmbeddingTables([TableConfig('a', 9, 4, ('a',))], SGD(), backend='triton', device='cpu')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True,
        text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "backend 'triton' runs on a GPU: pass device='cuda', or take backend 'cpu'" in done.stdout
    if DEVICE == "cpu" and not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device cuda is asked for, but this torch .* finds no GPU"):
            EmbeddingTables(TABLES, SGD(), backend="triton", device="cuda")
    tables = EmbeddingTables(TABLES, SGD(), backend="triton", device=DEVICE)
    with pytest.raises(ValueError, match="must be where the tables are"):
        tables(torch.tensor([3], device="meta"), torch.tensor([0, 1, 1, 1], device="meta"))
