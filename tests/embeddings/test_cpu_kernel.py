"""The CPU kernel's parts: the sort, memory that is used again, and compiled code on disk."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.config import InitConfig, SSEConfig, TableConfig
from embeddings.kernels.cpu import compiled as compiling
from embeddings.kernels.cpu.arena import MAX_BUFFERS, Arena, Room
from embeddings.kernels.cpu.geometry import special_dim
from embeddings.kernels.layout import Record
from embeddings.optim import SGD, Adagrad, Adam, AdamAR, RMSprop, RMSpropAR, RowwiseAdagrad, RowwiseAdamAR
from embeddings.tables import EmbeddingTables


@pytest.mark.process
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_entries_are_sorted_by_table_and_row_and_stay_in_order(data, seed):
    """Against Python's stable sort: several records, weights, large buckets, ids that touch nothing."""
    generator, threads = np.random.default_rng(seed), torch.get_num_threads()
    tables = []
    for t in range(data.draw(st.integers(1, 3))):
        features = tuple(f"f{t}{i}" for i in range(data.draw(st.integers(1, 2))))
        num_rows, first_live_row = (data.draw(st.sampled_from(some)) for some in ([1, 2, 300, 200_000], [0, 2]))
        tables.append(TableConfig(f"t{t}", num_rows, 4, features, first_live_row=first_live_row))
    whole = EmbeddingTables(tables, SGD(), bounds="ignore")
    slots, records, expected, first_output = whole.layout.slots, [], [], 0
    for _ in range(data.draw(st.integers(1, 2))):
        batch_size = data.draw(st.sampled_from([0, 1, 40, 2000]))
        longest = data.draw(st.sampled_from([1, 3]))
        lengths = (
            np.ones(len(slots) * batch_size, int) if longest == 1 else generator.integers(0, 4, len(slots) * batch_size)
        )
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.minimum(generator.zipf(1.2, offsets[-1]), 10**6) - 2
        weights = (generator.random(len(ids)) < 0.7).astype(np.float32) if data.draw(st.booleans()) else None
        for slot in slots:
            table = tables[slot.table]
            for b in range(batch_size):
                bag = slot.number * batch_size + b
                for i in range(offsets[bag], offsets[bag + 1]):
                    live = table.padding_row < ids[i] < table.num_rows and ids[i] >= 0
                    if live and (weights is None or weights[i]):
                        place = (first_output + b) * whole.layout.total_dim + slot.column
                        expected.append((slot.table, int(ids[i]), place))
        first_output += batch_size
        scales = None if weights is None else torch.from_numpy(weights)
        grad = torch.zeros(batch_size, whole.layout.total_dim)
        records.append(Record(torch.from_numpy(ids), torch.from_numpy(offsets), scales, grad))
    expected.sort(key=lambda entry: entry[:2])
    try:
        torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
        keys, runs, place_bits, direct, places, _, tasks, num_tasks, _ = whole._kernel._entries(records).sorted
    finally:
        torch.set_num_threads(threads)
    found = []
    for t, first, end, _, num_rows in tasks[:num_tasks]:
        assert first == len(found)
        rows = [key >> place_bits for key in keys[first:end].tolist()]
        ends = [first + i + 1 for i in range(len(rows)) if rows[i : i + 1] != rows[i + 1 : i + 2]]
        assert runs[first : first + num_rows].tolist() == ends
        assert not found or (int(t), int(keys[first]) >> place_bits) != found[-1][:2], "a row is in two tasks"
        for key in keys[first:end].tolist():
            low = key & ((1 << place_bits) - 1)
            found.append((int(t), key >> place_bits, low if direct else int(places[low])))
    assert found == expected


@pytest.mark.parametrize(
    ("dim", "optimizer", "dtype"),
    [
        (16, SGD(), torch.float32), (16, Adagrad(), torch.float32), (16, RowwiseAdagrad(), torch.float32),
        (16, RMSprop(), torch.float32), (32, RMSprop(), torch.float32), (128, RMSpropAR(alpha=1e-3), torch.float32),
        (16, Adam(moments="lazy"), torch.float32), (64, AdamAR(alpha=1e-3), torch.float32),
        (64, AdamAR(alpha=1e-3), torch.float64), (128, AdamAR(alpha=1e-3, moments="lazy"), torch.float32),
        (64, RowwiseAdamAR(alpha=1e-3), torch.float32),
    ],
)  # fmt: skip
def test_code_for_one_dim_equals_code_for_any(dim, optimizer, dtype):
    """Bit by bit, rows, state and outputs: bags of one id, and of several with weights; sequences. Every kind of update
    that is compiled apart, and of lookup: the code for any dims has the contract suite."""
    for pooling in ("sum", "none"):
        config = [TableConfig(f"t{t}", 50, dim, (f"f{t}",), pooling) for t in range(2)]
        twins = [EmbeddingTables(config, optimizer, dtype=dtype) for _ in range(2)]
        assert twins[0]._kernel._one_dim == dim
        twins[1]._kernel._one_dim = 0
        generator = torch.Generator().manual_seed(0)
        for step in range(1, 9):
            longest = 2 - step % 2
            ids = torch.randint(0, 50, (2 * 30 * longest,), generator=generator)
            offsets, weights = torch.arange(0, len(ids) + 1, longest), None
            if longest == 2:
                weights = torch.rand(len(ids), generator=generator)
            outputs = [twin(ids, offsets, weights) for twin in twins]
            grad = torch.randn(outputs[0].shape, generator=generator, dtype=dtype)
            assert torch.equal(*outputs)
            for twin, output in zip(twins, outputs, strict=True):
                output.backward(grad)
                twin.step(step)
        for part in ("weights", "vectors", "row_values", "last_steps"):
            assert torch.equal(*(getattr(twin.layout, part) for twin in twins)), part


def test_tables_of_several_dims_have_no_code_of_their_own():
    assert [special_dim(dims) for dims in ([64, 64], [16, 64], [17], [128])] == [64, 0, 0, 128]


def test_buffers_are_used_again_once_nothing_refers_to_them():
    arena = Arena()
    first = arena.take(100, 16, torch.float32)
    place, view = first.data_ptr(), first[3:5]
    assert place % 64 == 0
    del first
    second = arena.take(100, 16, torch.float32)
    assert second.data_ptr() != place, "a view still refers to it"
    array = view.numpy()
    del view
    assert arena.take(100, 16, torch.float32).data_ptr() != place, "an array still refers to it"
    del array
    assert arena.take(50, 16, torch.float64).data_ptr() == place
    kept = [arena.take(10, 16, torch.float32) for _ in range(MAX_BUFFERS + 3)]
    assert len({each.data_ptr() for each in kept}) == len(kept)
    assert len(arena._buffers) <= MAX_BUFFERS
    del kept
    del second
    arena.take(1000, 16, torch.float32)
    assert len(arena._buffers) == 1, "unused ones that are too small are given up"
    for made in (copy.deepcopy(arena), pickle.loads(pickle.dumps(arena))):
        assert not made._buffers
    assert copy.deepcopy(Room())("keys", 3, np.int64).shape == (3,)


@pytest.mark.parametrize("optimizer", [AdamAR(0.01), AdamAR(0.01, moments="lazy")], ids=["dense", "lazy"])
def test_a_step_allocates_nothing(optimizer):
    """After some steps outputs and swapped ids lie where others lay, and Python and numpy allocate less than the ids.

    What they do allocate is the tables of what idleness does, which do not grow with the batch.
    """
    batch_size, dim = 2048, 16
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


SCRIPT = """
import sys
import numpy as np
from embeddings.kernels.cpu import compiled
from embeddings.kernels.cpu.philox import lane_of
assert lane_of((np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)), 2) == 3
print(sum(lane_of.stats.cache_hits.values()), sum(lane_of.stats.cache_misses.values()), compiled.cache_folder())
"""


def start(cache: Path | str, **more: str) -> subprocess.Popen[str]:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)} | more
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return output.split()


@pytest.mark.process
def test_compiled_code_is_kept_for_the_next_process(tmp_path):
    """Two that compile at once, one that finds it, one whose file was cut short, one that may not write."""
    both = [start(tmp_path) for _ in range(2)]
    assert all(finish(process)[2] == str(compiling_folder(tmp_path)) for process in both)
    assert finish(start(tmp_path))[:2] == ["1", "0"]
    (file,) = compiling_folder(tmp_path).glob("philox.lane_of-*.bin")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert finish(start(tmp_path))[:2] == ["0", "1"]
    assert len(file.read_bytes()) == len(whole)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert finish(start(blocked)) == ["0", "1", "None"]


def compiling_folder(root: Path) -> Path:
    return root / f"evenkeel-{compiling.source_hash()}"


def test_a_change_of_any_source_is_another_folder(tmp_path, monkeypatch):
    for name in ("lookup.py", "simd.py"):
        (tmp_path / name).write_text("a = 1\n")
    monkeypatch.setattr(compiling, "PACKAGE", tmp_path)
    monkeypatch.setattr(compiling, "CONSTANTS", ())
    found = [compiling.source_hash.__wrapped__()]
    (tmp_path / "simd.py").write_text("a = 2\n")
    found.append(compiling.source_hash.__wrapped__())
    (tmp_path / "simd.py").rename(tmp_path / "vectors.py")
    found.append(compiling.source_hash.__wrapped__())
    assert len(set(found)) == 3


def test_folders_of_old_sources_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for age in range(7):
        old = tmp_path / f"evenkeel-{age}"
        old.mkdir()
        os.utime(old, (1000 - age, 1000 - age))
    (tmp_path / "somebody-else").mkdir()
    assert compiling.cache_folder.__wrapped__() == compiling_folder(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    kept = {f"evenkeel-{age}" for age in range(compiling.KEPT_FOLDERS - 1)}
    assert left == {"somebody-else", compiling_folder(tmp_path).name} | kept
