"""The CPU kernel's own parts: instruction sets, the order of sums, threads, swaps, memory, the build."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.cpu import build, swap_feature
from embeddings.kernels.cpu.buffers import MAX_BUFFERS, BufferPool
from embeddings.kernels.cpu.kernel import Scratch
from embeddings.kernels.cpu.library import Batch, HeaderError, read_structures
from embeddings.optim import SGD, Adagrad, Adam, AdamAR, RMSprop, RMSpropAR, RowwiseAdagrad, RowwiseAdamAR
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.sse.swap import swap_draws, swap_in_numpy
from embeddings.tables.config import InitConfig, TableConfig

# Rows, state and outputs of a few steps with bags, weights, swaps and halves, as one hash.
TRAINING = """
import hashlib, torch
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig
from embeddings.optim import Adagrad, AdamAR, RowwiseAdam
from embeddings.embedding_tables import EmbeddingTables
digest = hashlib.sha256()
for optimizer in (AdamAR(alpha=1e-3), AdamAR(alpha=1e-3, eps_inside_root=True), RowwiseAdam(), Adagrad()):
    for dtype, dims in ((torch.float32, (64, 64)), (torch.float32, (17, 64)), (torch.float16, (20, 20)),
                        (torch.bfloat16, (16, 16)), (torch.float64, (33, 33))):
        tables = EmbeddingTables(
            [TableConfig(f"t{i}", 90, dim, (f"f{i}",), "mean", init=InitConfig("normal", 0.1))
             for i, dim in enumerate(dims)],
            optimizer, sse={"f0": SSEConfig(0.2)}, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, 6):
            ids = torch.randint(0, 90, (2 * 40 * 3,), generator=generator)
            weights = torch.rand(len(ids), generator=generator) if step % 2 else None
            output = tables(ids, torch.arange(0, len(ids) + 1, 3), weights)
            digest.update(output.detach().numpy().tobytes())
            output.backward(torch.randn(output.shape, generator=generator, dtype=output.dtype))
            tables.step(step)
        for part in (tables.layout.weights, tables.layout.vectors, tables.layout.row_values):
            digest.update(part.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.process
def test_every_level_of_instructions_gives_the_same_bits() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[-1].split("\n", 1)[0].split())
    runnable = [level for level, needed in build.levels().items() if set(needed) <= flags]
    found = {}
    for level in runnable:
        environment = os.environ | {build.LEVEL_VARIABLE: level}
        done = subprocess.run(
            [sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, check=True, timeout=300
        )
        found[level] = done.stdout.strip()
    assert len(found) == len(runnable)
    assert len(set(found.values())) == 1, found


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_gradients_of_a_row_are_summed_in_the_order_of_the_batch(data, seed):
    """Bit by bit, where many keys go through buckets and several passes, and where a few are inserted."""
    generator, threads = np.random.default_rng(seed), torch.get_num_threads()
    num_rows, batch_size = (data.draw(st.sampled_from(some)) for some in ([1, 2, 300, 200_000], [1, 40, 3000, 20_000]))
    tables = EmbeddingTables([TableConfig(f"t{t}", num_rows, 2, (f"f{t}",)) for t in range(2)], SGD(1.0))
    ids = np.minimum(generator.zipf(1.2, (2, batch_size)), num_rows) - 1
    grad = generator.standard_normal((batch_size, 4)).astype(np.float32)
    # Row after row, one gradient after the other.
    expected = np.zeros((2, num_rows, 2), dtype=np.float32)
    for t in range(2):
        np.add.at(expected[t], ids[t], grad[:, 2 * t : 2 * t + 2])
        expected[t, 0] = 0.0  # padding
    before = np.stack([tables.weight(f"t{t}").numpy().copy() for t in range(2)])
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
        tables(torch.from_numpy(ids.reshape(-1)), torch.arange(2 * batch_size + 1)).backward(torch.from_numpy(grad))
        tables.step(1)
    finally:
        torch.set_num_threads(threads)
    for t in range(2):
        assert np.array_equal(tables.weight(f"t{t}").numpy(), before[t] - expected[t])


def _train_large(tables: EmbeddingTables) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 4):
        ids = torch.randint(0, 5000, (4 * 3000,), generator=generator)
        output = tables(ids, torch.arange(len(ids) + 1))
        output.backward(torch.randn(output.shape, generator=generator))
        tables.step(step)
    return tables.layout.weights.clone()


def _large() -> EmbeddingTables:
    config = [TableConfig(f"t{t}", 5000, 32, (f"f{t}",), init=InitConfig("normal", 0.1)) for t in range(4)]
    return EmbeddingTables(config, AdamAR(alpha=1e-3))


def test_bits_are_the_same_for_any_number_of_threads():
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(_train_large(_large()))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.process
def test_a_forked_process_does_its_work_alone():
    """A fork copies no thread: OpenMP would wait for those of its parent."""
    threads, tables = torch.get_num_threads(), _large()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 5000, 4 * 3000))
    offsets = torch.arange(len(ids) + 1)
    try:
        torch.set_num_threads(2)
        expected = tables._kernel.forward(ids, offsets, None, 3000, None, None)[0].numpy()
        child = os.fork()
        if child == 0:
            found = tables._kernel.forward(ids, offsets, None, 3000, None, None)[0].numpy()
            os._exit(0 if np.array_equal(found, expected) else 1)
        assert np.array_equal(tables._kernel.forward(ids, offsets, None, 3000, None, None)[0].numpy(), expected)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("dim", "optimizer"),
    [
        (16, SGD()), (16, Adagrad()), (16, RowwiseAdagrad()),
        (16, RMSprop()), (32, RMSprop()), (128, RMSpropAR(alpha=1e-3)),
        (16, Adam(moments="lazy")), (64, AdamAR(alpha=1e-3)),
        (128, AdamAR(alpha=1e-3, moments="lazy")),
        (64, RowwiseAdamAR(alpha=1e-3)),
    ],
)  # fmt: skip
def test_code_for_one_dim_equals_code_for_any(dim, optimizer):
    """Bit by bit, rows, state and outputs: bags of one id, and of several with weights. The twin has a table of another
    dim, which no id is of."""
    config = [TableConfig(f"t{t}", 50, dim, (f"f{t}",)) for t in range(2)]
    one, any_dim = (
        EmbeddingTables(config, optimizer),
        EmbeddingTables([*config, TableConfig("o", 3, 5, ("o",))], optimizer),
    )
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 9):
        longest = 2 - step % 2
        ids = torch.randint(0, 50, (2 * 30 * longest,), generator=generator)
        offsets = torch.arange(0, len(ids) + 1, longest)
        weights = torch.rand(len(ids), generator=generator) if longest == 2 else None
        outputs = one(ids, offsets, weights), any_dim(ids, torch.cat([offsets, offsets[-1:].repeat(30)]), weights)
        assert torch.equal(outputs[0], outputs[1][:, : 2 * dim])
        grad = torch.randn(30, 2 * dim + 5, generator=generator)
        for tables, output in zip((one, any_dim), outputs, strict=True):
            output.backward(grad[:, : output.shape[1]])
            tables.step(step)
    for table in ("t0", "t1"):
        assert torch.equal(one.weight(table), any_dim.weight(table))
        states = one.state(table), any_dim.state(table)
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_swaps_equal_the_plain_ones(data, seed):
    generator = np.random.default_rng(seed)
    num_rows, first_live = data.draw(st.sampled_from([2, 40, 5_000_000, 3 << 29])), data.draw(st.sampled_from([0, 2]))
    table = TableConfig("t", num_rows, 1, ("f",), first_live_row=first_live)
    edges = generator.integers(0, num_rows, (2, 100))
    graph = Graph.from_edges(*edges, num_rows, first_live_row=first_live) if num_rows < 1000 else None
    config = data.draw(
        st.sampled_from(
            [SSEConfig(p, *more) for p in (0.01, 0.5, 1.0) for more in ((), (graph, 3.0), (graph, 1.0, 0.4))]
        )
        if graph is not None
        else st.sampled_from([SSEConfig(0.01), SSEConfig(1.0)])
    )
    batch_size, longest = data.draw(st.sampled_from([0, 1, 5, 700])), data.draw(st.sampled_from([1, 4]))
    lengths = np.ones(batch_size, int) if longest == 1 else generator.integers(0, longest + 1, batch_size)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    ids = torch.from_numpy(generator.integers(0, num_rows, int(offsets[-1])))
    place = {
        "step": int(generator.integers(1, 1000)),
        "sample_offset": int(generator.integers(0, 100)) + data.draw(st.sampled_from([0, 2**34 - 90])),
    }
    found = swap_feature(ids, offsets, swap_draws([(table, "f", config)], 7), **place)
    plain = swap_in_numpy(ids, offsets, table=table, feature="f", config=config, seed=7, **place)
    assert torch.equal(found, plain)


def test_offsets_that_do_not_cover_the_ids_are_refused():
    draws = swap_draws([(TableConfig("t", 9, 1, ("f",)), "f", SSEConfig(0.5))], 7)
    for offsets in ([0, 2, 1, 3], [0, 1, 2]):
        with pytest.raises(ValueError, match="offsets must not decrease and must end at the number of ids, 3"):
            swap_feature(torch.arange(3), torch.tensor(offsets), draws, 1, 0)


@pytest.mark.slow
def test_buffers_come_back_once_nothing_refers_to_them():
    pool = BufferPool()
    first = pool.take(100, 16, torch.float32)
    place, view = first.data_ptr(), first[3:5]
    assert place % 64 == 0
    del first
    second = pool.take(100, 16, torch.float32)
    assert second.data_ptr() != place, "a view still refers to it"
    array = view.numpy()
    del view
    assert pool.take(100, 16, torch.float32).data_ptr() != place, "an array still refers to it"
    del array
    gc.collect()
    kept = [pool.take(10, 16, torch.float32) for _ in range(MAX_BUFFERS + 3)]
    assert len({each.data_ptr() for each in kept}) == len(kept)
    del kept, second
    gc.collect()
    assert len(pool._free) == MAX_BUFFERS
    assert all(not made._free for made in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))))


def test_copies_of_scratch_space_are_their_own():
    scratch = Scratch()
    alive = [scratch, copy.deepcopy(scratch), pickle.loads(pickle.dumps(scratch))]
    assert len({each.handle for each in alive}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [AdamAR(0.01), AdamAR(0.01, moments="lazy")], ids=["dense", "lazy"])
def test_a_step_allocates_nothing(optimizer):
    """After some steps outputs and swapped ids lie where others lay, and Python and numpy allocate less than the ids.

    What they do allocate is the tables of what idleness does, which do not grow with the batch.
    """
    batch_size, dim = 8192, 16
    tables = EmbeddingTables(
        [TableConfig(f"t{t}", 5000, dim, (f"f{t}",), init=InitConfig("normal", 0.1)) for t in range(4)],
        optimizer,
        sse={"f0": SSEConfig(0.01)},
    )
    offsets = torch.arange(4 * batch_size + 1)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(batch_size, 4 * dim, generator=generator)
    places = []

    def step(ids: torch.Tensor) -> None:
        output = tables(ids, offsets)
        output.backward(grad)
        places.append((output.data_ptr(), tables._records[0].indices.data_ptr()))
        tables.step(tables.completed_steps + 1)

    batches = [torch.randint(2, 5000, (4 * batch_size,), generator=generator) for _ in range(12)]
    for ids in batches[:6]:
        step(ids)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for ids in batches[6:]:
            step(ids)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert len(set(places[6:])) == 1
    assert set(places[6:]) <= set(places[:6])
    assert peak - before < 4 * batch_size * 8, f"{peak - before} bytes"


def test_structures_are_those_of_the_header():
    one = "struct One {\n  const double* x;  // [n]\n  int64_t n, m;\n};\n"
    structures = read_structures(f"{one}\nstruct Two {{\n  const One* one;\n  One other;\n}};\n", "a.h")
    one = structures["One"](n=3, m=4)
    two = structures["Two"](one=ctypes.pointer(one), other=one)
    assert (two.one.contents.m, two.other.n, ctypes.sizeof(one)) == (4, 3, 24)
    with pytest.raises(AttributeError, match="num_bags"):
        Batch(num_bags=1)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("float x;", r"a\.h: struct One: type 'float' is not known"),
        ("int64_t x[2];", r"a\.h: struct One: write 'int64_t x\[2\]' as 'type name, name'"),
    ],
)
def test_a_structure_that_cannot_be_read_is_named(member, message):
    with pytest.raises(HeaderError, match=message):
        read_structures(f"struct One {{\n  {member}\n}};\n", "a.h")


def test_a_library_of_other_sources_is_not_loaded(tmp_path, monkeypatch):
    (tmp_path / "kernel.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    build.source_hash.cache_clear()
    try:
        with pytest.raises(
            RuntimeError,
            match=r"were not built, or their sources have changed since; run `python -m embeddings.kernels.cpu.build`",
        ):
            build.library_path()
    finally:
        build.source_hash.cache_clear()


@pytest.mark.process
def test_builds_what_is_missing_and_removes_what_is_old(tmp_path, monkeypatch):
    (tmp_path / "kernel.cpp").write_text('extern "C" int one() { return 1; }\n')
    (tmp_path / "kernel-old.so").write_text("")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    build.source_hash.cache_clear()
    try:
        made = build.build()
        assert sorted(tmp_path.glob("*.so")) == sorted(made)
        assert build.library_path() in made
        (tmp_path / "kernel.cpp").write_text("int one( {\n")
        build.source_hash.cache_clear()
        with pytest.raises(build.BuildError, match=r"(?s)kernel\.cpp.* failed:.*error"):
            build.build()
        assert sorted(tmp_path.glob("*.so")) == sorted(made), (
            "what was built stays where the new sources do not compile"
        )
    finally:
        build.source_hash.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "message"), [("", "no C\\+\\+ compiler: install g\\+\\+"), ("/not/there", "/not/there: .*CXX")]
)
@pytest.mark.process
def test_a_missing_compiler_is_named_with_the_remedy(tmp_path, monkeypatch, compiler, message):
    (tmp_path / "kernel.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    build.source_hash.cache_clear()
    try:
        with pytest.raises(build.BuildError, match=message):
            build.build()
    finally:
        build.source_hash.cache_clear()


def test_rows_longer_than_a_chunk_equal_the_reference():
    """Pairs of nodes are summed 128 elements at a time; eps inside the root takes that way on each step."""
    found = []
    for backend in ("cpu", "reference"):
        config = [TableConfig("t", 20, 300, ("f",), init=InitConfig("normal", 0.1))]
        tables = EmbeddingTables(config, AdamAR(alpha=1e-3, eps_inside_root=True), backend=backend, dtype=torch.float64)
        generator = torch.Generator().manual_seed(4)
        for step in range(1, 6):
            output = tables(torch.randint(0, 20, (6,), generator=generator), torch.arange(7))
            output.backward(torch.randn(output.shape, generator=generator, dtype=output.dtype))
            tables.step(step)
        found.append(
            torch.cat([output.detach().reshape(-1), tables(torch.arange(20), torch.arange(21)).detach().reshape(-1)])
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
