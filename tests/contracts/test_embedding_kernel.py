"""What every kernel owes: the reference's swaps bit for bit, its rows to rounding, the same bits for any threads.

A new backend joins by adding itself to CANDIDATES, with what it can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD, Adagrad, Adam, AdamAR, RMSpropAR, RowOptimizer, RowwiseAdagrad, RowwiseAdamAR
from embeddings.optim.registry import KINDS
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.tables.config import InitConfig, TableConfig
from tests.support.module_tables import ON_GPU, module_tables
from tests.support.pairwise import Case, cases

OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": SGD(0.1),
    "adagrad": Adagrad(0.1),
    "adam": Adam(0.01),
    "adam-lazy": Adam(0.01, moments="lazy"),
    "adam_ar": AdamAR(0.01, alpha=0.05),
    "adam_ar-lazy": AdamAR(0.01, alpha=0.05, moments="lazy"),
    "rowwise_adagrad": RowwiseAdagrad(0.1),
    "rmsprop_ar": RMSpropAR(0.01, alpha=0.05),
    "rowwise_adam_ar": RowwiseAdamAR(0.01, alpha=1e-4),
}

pytestmark = pytest.mark.slow


def test_each_rule_is_compared() -> None:
    assert {one.rule for one in OPTIMIZERS.values()} == {kind.optimizer.rule for kind in KINDS.values()}


@dataclass(frozen=True)
class Backend:
    """What a backend can do: names of OPTIMIZERS, and types of rows, of which ``stored`` are read but not compared.

    ``is_slow``: few and small problems. ``threads``: whether it runs on torch's. ``dims``: those that it takes.
    """

    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    stored: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    is_slow: bool = False
    threads: bool = True
    dims: tuple[int, ...] = (1, 2, 5, 8, 16, 17, 33, 48, 64)


FUSED = ("sgd", "adagrad", "rowwise_adagrad")
CANDIDATES = {
    "cpu": Backend(),
    "fbgemm": Backend(FUSED, (torch.float32,), ()),
    # FBGEMM's module, on a GPU where `make gpu-check` runs this, with tables that it holds and tables that it caches.
    "fbgemm_held": Backend(FUSED, (torch.float32,), (), threads=not ON_GPU, dims=(4, 8, 16, 20, 64)),
    "fbgemm_cached": Backend(FUSED, (torch.float32,), (), threads=not ON_GPU, dims=(4, 8, 16, 20, 64)),
    # Run by its interpreter, a tenth of a millisecond for an operation: tests/embeddings/kernels/test_triton.py has the
    # rest.
    "triton": Backend(("adagrad", "adam_ar", "rowwise_adam_ar"), is_slow=True, threads=False),
}
ON_THREADS = [name for name, backend in CANDIDATES.items() if backend.threads]
BOTH = [(name, optimizer) for name, backend in CANDIDATES.items() for optimizer in backend.optimizers]


@dataclass(frozen=True)
class Problem:
    """A group of tables and the batches of some steps: one (ids, offsets, weights) or several for each step."""

    tables: tuple[TableConfig, ...]
    sse: dict[str, SSEConfig]
    steps: tuple[tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], ...], ...]
    sample_offset: int
    bounds: Literal["fatal", "ignore"] = "fatal"

    def build(self, optimizer: RowOptimizer, backend: str, dtype: torch.dtype) -> EmbeddingTables:
        return tables_of(backend, self.tables, optimizer, sse=self.sse, seed=17, dtype=dtype, bounds=self.bounds)


def tables_of(candidate: str, tables: Sequence[TableConfig], optimizer: RowOptimizer, **settings) -> EmbeddingTables:
    if candidate in ("fbgemm_held", "fbgemm_cached"):
        return module_tables(tables, optimizer, cached=candidate == "fbgemm_cached", **settings)
    return EmbeddingTables(tables, optimizer, backend=candidate, **settings)


@st.composite
def problems(draw, backend: Backend, sequences: bool, bounds: Literal["fatal", "ignore"]) -> Problem:
    dims, most = backend.dims, 2 if backend.is_slow else 3
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables, sse = [], {}
    # 16 and 64 never alone: for tables that all have the one dim code is compiled apart, which takes minutes in all;
    # tests/embeddings/kernels/test_cpu_kernel.py has it give the bits of the code for any dims, of every kind.
    first_dims = [dim for dim in dims if dim not in (16, 64)]
    sequence_dim = draw(st.sampled_from(first_dims)) if sequences else 0
    beyond = 2 if bounds == "ignore" else 0
    for t in range(draw(st.integers(1, most))):
        features = tuple(f"f{t}{i}" for i in range(draw(st.integers(1, most))))
        poolings = tuple("none" if sequence_dim else draw(st.sampled_from(["sum", "mean"])) for _ in features)
        num_rows = draw(st.sampled_from([1, 3, 7, 40, 3000]))
        tables.append(
            TableConfig(
                f"t{t}", num_rows, sequence_dim or draw(st.sampled_from(dims if t else first_dims)),
                features, poolings,
                init=InitConfig("normal", 0.5), first_live_row=draw(st.sampled_from([0, 2])),
            )
        )  # fmt: skip
        graph = Graph.from_edges(
            *generator.integers(0, num_rows, (2, draw(st.sampled_from([0, 2, 60])))), num_rows,
            first_live_row=tables[t].first_live_row,
        )  # fmt: skip
        for feature in features:
            if p := draw(st.sampled_from([0.0, 0.1, 1.0])):
                kinds = [SSEConfig(p), SSEConfig(p, graph, 1.5), SSEConfig(p, graph, restart=0.3)]
                sse[feature] = draw(st.sampled_from(kinds))
    steps = []
    for _ in range(draw(st.integers(1, most + 1))):
        batches = []
        for _ in range(draw(st.integers(1, 2))):
            batch_size, longest = draw(st.sampled_from([0, 1, 3, 70])), draw(st.sampled_from([1, 2, 6]))
            ids, lengths = [], []
            for table in tables:
                for _ in table.features:
                    length = generator.integers(0, longest + 1, batch_size)
                    # Half of the ids among the first few rows: repeated within bags and between them.
                    few = min(table.num_rows, 4)
                    size = int(length.sum())
                    ids.append(
                        np.where(
                            generator.random(size) < 0.5, generator.integers(0, few, size),
                            generator.integers(-beyond, table.num_rows + beyond, size),
                        )
                    )  # fmt: skip
                    lengths.append(length)
            offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
            flat = torch.from_numpy(np.concatenate(ids).astype(np.int64))
            weights = None
            if draw(st.booleans()):
                values = generator.uniform(0.5, 2.0, len(flat)) * (generator.random(len(flat)) < 0.8)
                weights = torch.from_numpy(values.astype(np.float32))
            batches.append((flat, torch.from_numpy(offsets), weights))
        steps.append(tuple(batches))
    return Problem(tuple(tables), sse, tuple(steps), draw(st.integers(0, 5)), bounds)


def run(
    tables: EmbeddingTables, problem: Problem, index_dtype: torch.dtype = torch.int64
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Trains through all steps; the pooled outputs and the ids that were looked up."""
    outputs, used = [], []
    for k, batches in enumerate(problem.steps, start=1):
        tables.set_context(k, problem.sample_offset)
        for ids, offsets, weights in batches:
            batch = (ids.to(index_dtype), offsets, weights)
            pooled = tables(*(None if part is None else part.to(tables.layout.device) for part in batch))
            # A gradient of about 1 that is bounded away from 0, where Adam's first step would amplify rounding.
            (pooled.square() / 2 + 2.0 * pooled).sum().backward()
            outputs.append(pooled.detach().cpu())
        used += [record.indices.cpu() for record in tables._records]
        tables.step(k)
    return outputs, used


def may_be(case: Case) -> bool:
    return "subject" not in case or case.get("dtype") in (None, *CANDIDATES[case["subject"][0]].dtypes)


COMBINED = cases(
    {
        "subject": BOTH,
        "dtype": (torch.float32, torch.float64),
        "index_dtype": (torch.int32, torch.int64),
        "sequences": (False, True),
        "bounds": ("fatal", "ignore"),
    },
    may_be,
)


def name_of(case: Case) -> str:
    parts = (*case["subject"], case["dtype"], case["index_dtype"], "sequences" * case["sequences"], case["bounds"])
    return "-".join(str(part).removeprefix("torch.") for part in parts if part)


@pytest.mark.long
@pytest.mark.parametrize("case", COMBINED, ids=name_of)
def test_equals_the_reference(case: Case):
    """Every two of these choices together; the rest of a problem is drawn."""
    candidate, optimizer = case["subject"]
    backend, of_all = CANDIDATES[candidate], settings.default.max_examples

    @settings(max_examples=min(of_all // 12, 10) if backend.is_slow else min(of_all // 2, 100))
    @given(problem=problems(backend, case["sequences"], case["bounds"]))
    def check(problem: Problem) -> None:
        compare(candidate, OPTIMIZERS[optimizer], problem, case["dtype"], case["index_dtype"])

    check()


def compare(
    candidate: str, optimizer: RowOptimizer, problem: Problem, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    """float32: 1e-6 for each unit of size, as sums of up to some hundred rows round; float64: 1e-12."""
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    reference, other = (problem.build(optimizer, name, dtype) for name in ("reference", candidate))
    outputs, swaps = run(reference, problem)
    other_outputs, other_swaps = run(other, problem, index_dtype)
    for expected, got in zip(swaps, other_swaps, strict=True):
        assert got.dtype == index_dtype
        assert torch.equal(expected, got.long())
    for expected, got in zip(outputs, other_outputs, strict=True):
        scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
        torch.testing.assert_close(got, expected, rtol=tolerance * 10, atol=tolerance * scale)
    for table in problem.tables:
        expected, got = reference.read(table.name), other.read(table.name).cpu()
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(got, expected, rtol=tolerance * 10, atol=tolerance * scale)
        last = [each.state(table.name)["last_update_step"].cpu() for each in (reference, other)]
        assert torch.equal(*last)


def zipf_steps(candidate: str, num_steps: int = 3) -> Problem:
    """Large enough for several stripes, blocks and threads, with a row that occurs thousands of times (hundreds where
    the backend is slow)."""
    batch_size = 200 if CANDIDATES[candidate].is_slow else 2000
    dim = 5 if 5 in CANDIDATES[candidate].dims else 8
    generator = np.random.default_rng(1)
    tables = (
        TableConfig("a", 50_000, 16, ("a",), init=InitConfig("normal", 0.5)),
        TableConfig("b", 300, dim, ("b", "c"), ("sum", "mean"), init=InitConfig("normal", 0.5)),
    )
    steps = []
    for _ in range(num_steps):
        lengths = generator.integers(0, 12, (3, batch_size))
        ids = [np.minimum(generator.zipf(1.3, lengths[f].sum()), rows - 1) for f, rows in enumerate((50_000, 300, 300))]
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        steps.append(((torch.from_numpy(np.concatenate(ids)), offsets, None),))
    return Problem(tables, {"a": SSEConfig(0.1), "b": SSEConfig(0.1)}, tuple(steps), 0)


@pytest.mark.parametrize(("candidate", "dtype"), [(name, each) for name, b in CANDIDATES.items() for each in b.stored])
@pytest.mark.parametrize("pooling", ["mean", "none"])
def test_half_rows_are_read_as_they_are(candidate, dtype, pooling):
    """Converting a half to float32 is exact, so the lookup differs from the reference by the rounding of sums alone."""
    tables = [TableConfig("a", 50, 19, ("a", "b"), pooling, init=InitConfig("normal", 1.0))]
    ids, offsets = torch.arange(2, 50).repeat(2)[:90], torch.tensor([0, 1, 30, 60, 60, 75, 90])
    reference, other = (
        EmbeddingTables(tables, SGD(0.1), backend=name, dtype=dtype) for name in ("reference", candidate)
    )
    assert torch.equal(other.weight("a"), reference.weight("a"))
    assert other.weight("a").dtype == dtype
    got = other(ids, offsets)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, reference(ids, offsets), rtol=0.0, atol=0.0 if pooling == "none" else 1e-6)
    assert torch.equal(other.read("a"), reference.weight("a").float())


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_per_sample_weights_have_no_gradient(candidate):
    tables = tables_of(candidate, [TableConfig("a", 5, 4, ("a",))], SGD(0.1))
    with pytest.raises(ValueError, match=r"need no gradient.*weights\.detach\(\)"):
        tables(torch.tensor([2]), torch.tensor([0, 1]), torch.ones(1, requires_grad=True))


@pytest.mark.parametrize(
    ("candidate", "optimizer"), [each for each in BOTH if each[0] in ON_THREADS and not each[1].endswith("-lazy")]
)
def test_bits_do_not_depend_on_the_number_of_threads(candidate, optimizer):
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            tables = zipf_steps(candidate).build(OPTIMIZERS[optimizer], candidate, torch.float32)
            outputs, _ = run(tables, zipf_steps(candidate))
            results.append((outputs[-1], tables.layout.weights, tables.layout.vectors, tables.layout.row_values))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_many_duplicates_equal_the_reference(candidate):
    """Sums of thousands of gradients in another order: relative rounding times their number."""
    backend, problem = CANDIDATES[candidate], zipf_steps(candidate, 2)
    dtype, optimizer = backend.dtypes[-1], OPTIMIZERS[backend.optimizers[-1]]
    reference, other = (problem.build(optimizer, each, dtype) for each in ("reference", candidate))
    run(reference, problem)
    run(other, problem)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    for name in "ab":
        torch.testing.assert_close(other.read(name).cpu(), reference.read(name), rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("candidate", ON_THREADS)
def test_the_number_of_torch_threads_is_left_alone(candidate):
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            problem = zipf_steps(candidate, 1)
            run(problem.build(OPTIMIZERS["sgd"], candidate, torch.float32), problem)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
