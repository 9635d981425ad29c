"""FBGEMM's module as a backend: what its operators do, also where others read or write rows in between.

Over host memory, with and without a cache that keeps rows to itself; `make gpu-check` runs the same on a GPU.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels.fbgemm import module as fbgemm_module
from embeddings.kernels.fbgemm.module import FbgemmModuleKernel
from embeddings.kernels.fbgemm.placement import place
from embeddings.optim import SGD, Adagrad, RowwiseAdagrad
from embeddings.optim.lr_schedules import LinearWarmup
from embeddings.perturbation import perturb
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig
from tests.support.module_tables import ON_GPU, module_tables

INIT = InitConfig("normal", 0.5)
OPTIMIZERS = {"sgd": SGD(0.1), "adagrad": Adagrad(0.1, eps=1e-8), "rowwise_adagrad": RowwiseAdagrad(0.1, eps=1e-8)}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
each_place = pytest.mark.parametrize("cached", [False, True], ids=["held", "cached"])
BAGS = (
    TableConfig("a", 40, 16, ("f", "h"), ("sum", "mean"), init=INIT),
    TableConfig("b", 9, 4, ("g",), init=INIT),
    TableConfig("c", 1, 8, ("c",), init=INIT),
)
SEQUENCES = (
    TableConfig("a", 40, 8, ("f", "h"), "none", init=INIT),
    TableConfig("b", 9, 8, ("g",), "none", init=INIT),
)
each_pooling = pytest.mark.parametrize("configs", [BAGS, SEQUENCES], ids=["bags", "sequences"])


def pair(configs, optimizer, cached, **settings) -> tuple[EmbeddingTables, EmbeddingTables]:
    """Tables of the operators, and the same of the module."""
    operators = EmbeddingTables(configs, optimizer, seed=3, backend="fbgemm", **settings)
    return operators, module_tables(configs, optimizer, cached=cached, seed=3, **settings)


def draw(configs, seed, weighted=False, batch_size=5):
    """(ids, offsets, weights): empty bags, repeated ids, padding, and weights of which some are 0."""
    generator = np.random.default_rng(seed)
    ids, lengths = [], []
    for table in configs:
        for _ in table.features:
            length = generator.integers(0, 4, batch_size)
            ids.append(generator.integers(0, table.num_rows, length.sum()))
            lengths.append(length)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))
    flat = torch.from_numpy(np.concatenate(ids))
    weights = generator.uniform(0.5, 2.0, len(flat)) * (generator.random(len(flat)) < 0.7)
    return flat, offsets, torch.from_numpy(weights.astype(np.float32)) if weighted else None


def looked_up(tables, batch):
    return tables(*(None if part is None else part.to(tables.layout.device) for part in batch))


def backward(tables, batch):
    found = looked_up(tables, batch)
    (found.square() / 2 + 2.0 * found).sum().backward()
    return found.detach().cpu()


def close(one, other):
    """float32 in the same order of sums on a CPU, in another on a GPU."""
    torch.testing.assert_close(other.cpu(), one.cpu(), rtol=1e-5, atol=1e-5)


def same(operators, module):
    """Rows and state, as every reader gets them."""
    for table in operators.layout.tables:
        close(operators.read(table.name), module.read(table.name))
        close(operators.weight(table.name), module.weight(table.name))
        theirs = module.state(table.name)
        for name, value in operators.state(table.name).items():
            close(value, theirs[name])


@each_place
@each_pooling
@each_optimizer
def test_it_does_what_the_operators_do(optimizer, configs, cached):
    """Two backwards a step, swaps, weights, clipping by a scale; a copy goes on from the middle with its own rows."""
    operators, module = pair(configs, optimizer, cached, sse={"f": SSEConfig(0.3)})
    for k in range(1, 7):
        for part in range(2):
            batch = draw(configs, (k, part), k % 2 == 0, batch_size=5 + part)
            close(backward(operators, batch), backward(module, batch))
            assert torch.equal(operators._records[-1].indices, module._records[-1].indices.cpu())
        assert module.gradient_squared_norm() == pytest.approx(operators.gradient_squared_norm(), rel=1e-5)
        if k == 3:
            left, module = module, copy.deepcopy(module)
            left.discard()
            left.step(k)
            left.reset(k)
        operators.step(k, 0.5)
        module.step(k, 0.5)
    same(operators, module)


@each_place
def test_rows_that_are_read_or_written_between_steps_are_those_of_the_next(cached):
    operators, module = pair(BAGS, Adagrad(0.1), cached)
    for k, change in enumerate((None, "view", "load", "reset", "eval"), start=1):
        for each in (operators, module):
            backward(each, draw(BAGS, k))
            each.step(k)
            # Rows that were just trained, so that the cache has them.
            looked_up(each, draw(BAGS, k))
            if change == "view":
                each.weight("a")[2:] *= 2.0
            elif change == "load":
                zeros = {name: torch.zeros_like(value) for name, value in each.state("a").items()}
                each.load("a", 3 * each.weight("a").clone(), zeros)
            elif change == "reset":
                each.reset(k)
            elif change == "eval":
                with torch.no_grad():
                    looked_up(each.eval(), draw(BAGS, 9))
                each.train()
            each.discard()
        same(operators, module)
        close(looked_up(operators, draw(BAGS, 8)), looked_up(module, draw(BAGS, 8)))


@each_place
@each_pooling
def test_rows_that_were_moved_for_a_lookup_are_put_back(configs, cached):
    """SAM: what is read while they are moved, and what the step then starts from."""
    operators, module = pair(configs, SGD(0.1), cached)
    for k in range(1, 4):
        for each in (operators, module):
            before = {table.name: each.read(table.name) for table in configs}
            backward(each, draw(configs, k))
            restore = perturb(each, 0.05)
            each.discard()
            backward(each, draw(configs, k))
            restore()
            assert all(torch.equal(each.read(name), rows) for name, rows in before.items())
            each.step(k)
        same(operators, module)


@each_place
def test_the_rate_is_that_of_the_step(cached):
    tables = module_tables(BAGS, SGD(0.1, schedule=LinearWarmup(2, start_factor=0.5)), cached=cached)
    before = tables.weight("b")[2].clone()
    for k, factor in ((1, 0.5), (2, 0.75), (3, 1.0)):
        looked_up(tables, (torch.tensor([2]), torch.tensor([0, 0, 0, 1, 1]), None)).sum().backward()
        tables.step(k)
        before -= 0.1 * factor
        close(before, tables.weight("b")[2])


@each_place
@each_pooling
def test_no_ids_and_no_samples_are_zeros_and_no_step(configs, cached):
    operators, module = pair(configs, Adagrad(0.1), cached)
    for num_samples in (0, 3):
        offsets = torch.zeros(sum(len(table.features) for table in configs) * num_samples + 1, dtype=torch.int64)
        nothing = torch.zeros(0, dtype=torch.int64), offsets, None
        for each in (operators, module):
            found = looked_up(each, nothing)
            assert not found.any()
            found.sum().backward()
        close(looked_up(operators, nothing), looked_up(module, nothing))
    for each in (operators, module):
        each.step(1)
    same(operators, module)


def test_dims_that_are_no_multiples_of_four_are_refused_with_the_remedy():
    odd = [TableConfig("a", 9, 17, ("f",)), TableConfig("b", 9, 8, ("g",))]
    with pytest.raises(ValueError, match=r"multiples of 4, not those of tables 'a' \(17\): use such a dim, or another"):
        module_tables(odd, SGD())


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU, and `make gpu-check`")
def test_a_gpu_holds_tables_or_caches_them():
    """5,000 rows of 64 columns: held in its memory, or in unified memory with one set of a cache."""
    tables = [TableConfig("a", 5000, 64, ("f",), init=INIT)]
    held, cached = (module_tables(tables, Adagrad(0.1), cached=cached)._kernel._module for cached in (False, True))
    assert (held.weights_dev.numel(), held.weights_uvm.numel(), held.lxu_cache_weights.numel()) == (320_000, 0, 0)
    assert (cached.weights_dev.numel(), cached.weights_uvm.numel()) == (0, 320_000)
    assert cached.momentum1_uvm.numel() == 320_000
    assert cached.lxu_cache_weights.shape == (32, 64)


# --- where tables go -------------------------------------------------------------------------------------------------


def test_tables_that_fit_lie_on_the_gpu():
    """1,000 rows x (16 columns x 4 bytes x 2 for Adagrad + 4 for the step)."""
    assert place([(1000, 16)], 1, 0, 132_000) == (0, 132_000, 0)
    assert place([(1000, 16)], 1, 0, 131_999).cache_sets > 0


def test_of_tables_that_do_not_fit_a_fifth_of_the_rows_is_cached():
    """30,000 and 2,000 rows: 6,400 cached in sets of 32, each row as wide as the widest; 8 bytes for each row there is,
    and 4 more for the sum of rowwise Adagrad; rows, and vectors of state, in the host's memory."""
    cached = 32 * (64 * 4 + 16)
    shapes = [(30_000, 64), (2_000, 16)]
    wide = (30_000 * 64 + 2_000 * 16) * 4
    assert place(shapes, 1, 0, 10**7) == (200, 32_000 * 8 + 200 * cached, 2 * wide)
    assert place(shapes, 0, 1, 4 * 10**6) == (200, 32_000 * 12 + 200 * cached, wide)


def test_less_is_cached_where_less_fits_and_a_set_at_least():
    cached = 32 * (64 * 4 + 16)
    few = place([(32_000, 64)], 0, 0, 32_000 * 8 + 7 * cached + 5)
    assert few == (7, 32_000 * 8 + 7 * cached, 32_000 * 64 * 4)
    least = place([(32_000, 64)], 0, 0, 1000)
    assert (least.cache_sets, least.gpu_bytes) == (1, 32_000 * 8 + cached)


@pytest.mark.parametrize(("free", "location", "sets"), [(332_001, "DEVICE", 0), (331_000, "MANAGED_CACHING", 7)])
def test_a_fifth_of_the_gpu_is_left_to_others(monkeypatch, free, location, sets):
    """1,000 rows of 132 bytes, Adagrad, where 200,000 of a GPU of 1,000,000 bytes are not for tables."""
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1_000_000))
    monkeypatch.setattr(
        fbgemm_module, "module_of", lambda *of: asked.append([part.name for part in of[2:4]] + [*of[4:]])
    )
    monkeypatch.setattr(FbgemmModuleKernel, "_adopt", lambda self: None)
    layout = EmbeddingTables([TableConfig("a", 1000, 16, ("f",))], Adagrad(0.1), backend="fbgemm").layout
    FbgemmModuleKernel(layout, torch.device("cuda", 0))
    assert asked == [[location, "CUDA", sets]]
