"""The fbgemm backend: what FBGEMM's fused optimizers make of a row, and what it cannot do, refused by name."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD, Adagrad, Adam, AdamAR, RowwiseAdagrad
from embeddings.optim.lr_schedules import LinearWarmup
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig

INIT = InitConfig("normal", 0.5)
# Dims that FBGEMM's own module refuses, one table for two features, a mean, and a table of padding alone.
TABLES = (
    TableConfig("a", 40, 17, ("f", "h"), ("sum", "mean"), init=INIT),
    TableConfig("b", 9, 4, ("g",), init=INIT),
    TableConfig("c", 1, 8, ("c",), init=INIT),
)
OPTIMIZERS = {"sgd": SGD(0.1), "adagrad": Adagrad(0.1, eps=1e-8), "rowwise_adagrad": RowwiseAdagrad(0.1, eps=1e-8)}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def build(optimizer, backend="fbgemm", tables=TABLES, **settings) -> EmbeddingTables:
    return EmbeddingTables(tables, optimizer, seed=3, backend=backend, **settings)


def draw(generator, batch_size, weighted, tables=TABLES, kind=np.int64):
    """(ids, offsets, weights): empty bags, repeated ids, padding, and weights of which some are 0."""
    ids, lengths = [], []
    for table in tables:
        for _ in table.features:
            length = generator.integers(0, 4, batch_size)
            ids.append(generator.integers(0, table.num_rows, length.sum()))
            lengths.append(length)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(kind)
    flat = torch.from_numpy(np.concatenate(ids).astype(kind))
    weights = None
    if weighted:
        values = generator.uniform(0.5, 2.0, len(flat)) * (generator.random(len(flat)) < 0.7)
        weights = torch.from_numpy(values.astype(np.float32))
    return flat, torch.from_numpy(offsets), weights


def backward(tables, batch):
    pooled = tables(*batch)
    (pooled.square() / 2 + 2.0 * pooled).sum().backward()
    return pooled.detach()


class Loop:
    """Every row by hand, in float64: the three update rules and nothing else."""

    def __init__(self, like: EmbeddingTables, optimizer) -> None:
        self.optimizer = optimizer
        self.rows = {table.name: like.weight(table.name).double().numpy().copy() for table in TABLES}
        rowwise = isinstance(optimizer, RowwiseAdagrad)
        self.sums = {name: np.zeros(len(rows) if rowwise else rows.shape) for name, rows in self.rows.items()}
        self.gradients: dict[tuple[str, int], np.ndarray] = {}

    def backward(self, batch) -> np.ndarray:
        ids, offsets, weights = (None if part is None else part.numpy().astype(np.float64) for part in batch)
        ids, offsets, outputs, number = ids.astype(int), offsets.astype(int), [], 0
        batch_size = (len(offsets) - 1) // sum(len(table.features) for table in TABLES)
        for table in TABLES:
            for pooling in table.pooling:
                block = np.zeros((batch_size, table.dim))
                bags = []
                for b in range(batch_size):
                    places = range(offsets[number * batch_size + b], offsets[number * batch_size + b + 1])
                    real = [i for i in places if ids[i] != table.padding_row]
                    shares = {i: (1.0 if weights is None else weights[i]) for i in real}
                    if pooling == "mean":
                        shares = {i: share / len(real) for i, share in shares.items()}
                    for i, share in shares.items():
                        block[b] += share * self.rows[table.name][ids[i]]
                    bags.append(shares)
                for b, shares in enumerate(bags):
                    for i, share in shares.items():
                        if share:
                            key = (table.name, ids[i])
                            self.gradients[key] = self.gradients.get(key, 0.0) + share * (block[b] + 2.0)
                outputs.append(block)
                number += 1
        return np.concatenate(outputs, axis=1)

    def step(self) -> None:
        for (name, row), grad in self.gradients.items():
            theta, eta = self.rows[name], self.optimizer.learning_rate
            if isinstance(self.optimizer, SGD):
                theta[row] -= eta * grad
                continue
            self.sums[name][row] += (grad**2).mean() if isinstance(self.optimizer, RowwiseAdagrad) else grad**2
            theta[row] -= eta * grad / (np.sqrt(self.sums[name][row]) + self.optimizer.eps)
        self.gradients.clear()


@each_optimizer
def test_equals_a_plain_float64_loop_over_two_backwards_a_step(optimizer):
    """1e-5 of the largest row: float32 sums of some ten gradients, over 12 steps."""
    generator = np.random.default_rng(5)
    tables = build(optimizer)
    loop = Loop(tables, optimizer)
    padding = tables.weight("a")[0].clone()
    for k in range(1, 13):
        for part in range(2):
            batch = draw(generator, 6 + part, weighted=k % 2 == 0)
            torch.testing.assert_close(
                backward(tables, batch).double(), torch.from_numpy(loop.backward(batch)), rtol=0, atol=2e-5
            )
        expected = sum(float((grad**2).sum()) for grad in loop.gradients.values())
        assert tables._kernel.squared_norm(tables._records) == pytest.approx(expected, rel=1e-5)
        tables.step(k)
        loop.step()
    for name, rows in loop.rows.items():
        torch.testing.assert_close(tables.weight(name).double(), torch.from_numpy(rows), rtol=0, atol=1e-5)
        if "sum" in tables.state(name):
            found = tables.state(name)["sum"].double()
            torch.testing.assert_close(found, torch.from_numpy(loop.sums[name]), rtol=1e-5, atol=1e-6)
    assert torch.equal(tables.weight("a")[0], padding)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1)], ids=["sgd", "adagrad"])
def test_equals_the_cpu_backend_with_swaps(optimizer):
    """float32 with two orders of summation: 1e-5 of rows about 1."""
    sse = {"f": SSEConfig(0.3), "g": SSEConfig(1.0)}
    ours, theirs = (build(optimizer, backend, sse=sse) for backend in ("cpu", "fbgemm"))
    for k in range(1, 8):
        batch = draw(np.random.default_rng(k), 9, weighted=k % 2 == 0)
        for tables in (ours, theirs):
            tables.set_context(k, 5)
        torch.testing.assert_close(backward(theirs, batch), backward(ours, batch), rtol=0, atol=2e-5)
        assert torch.equal(ours._records[0].indices, theirs._records[0].indices)
        ours.step(k)
        theirs.step(k)
    for table in TABLES:
        torch.testing.assert_close(theirs.read(table.name), ours.read(table.name), rtol=0, atol=1e-5)
        last = [tables.state(table.name)["last_update_step"] for tables in (ours, theirs)]
        assert torch.equal(*last)


@each_optimizer
@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_int32_ids_out_of_bounds_and_sequences_equal_the_reference(optimizer, pooling):
    """float32 with two orders of summation: 1e-5 of rows about 1."""
    tables = [
        TableConfig("a", 40, 12, ("f", "h"), pooling, init=INIT),
        TableConfig("b", 9, 12, ("g",), pooling, init=INIT),
    ]
    sse = {"f": SSEConfig(0.5)}
    pair = [build(optimizer, backend, tables, sse=sse, bounds="ignore") for backend in ("reference", "fbgemm")]
    for k in range(1, 6):
        for part in range(2):
            batch = draw(np.random.default_rng((k, part)), 5, k % 2 == 0, tables, np.int32)
            batch[0][::7], batch[0][3::7] = 60, -4
            outputs = [backward(each, batch) for each in pair]
            torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-5)
            assert torch.equal(*(each._records[-1].indices for each in pair))
        for each in pair:
            each.step(k)
    for name in "ab":
        torch.testing.assert_close(pair[1].read(name), pair[0].read(name), rtol=0, atol=1e-5)
        assert torch.equal(*(each.state(name)["last_update_step"] for each in pair))


@each_optimizer
def test_a_copy_and_a_reload_go_on_with_the_same_bits(optimizer):
    tables = build(optimizer)
    backward(tables, draw(np.random.default_rng(0), 8, weighted=True))
    tables.step(1)
    twin, loaded = copy.deepcopy(tables), build(optimizer)
    for table in TABLES:
        state = {name: value.clone() for name, value in tables.state(table.name).items()}
        loaded.load(table.name, tables.weight(table.name).clone(), state)
    loaded.completed_steps = 1
    for each in (tables, twin, loaded):
        backward(each, draw(np.random.default_rng(1), 8, weighted=False))
        each.step(2)
    for other in (twin, loaded):
        for table in TABLES:
            assert torch.equal(tables.weight(table.name), other.weight(table.name))
            for name, value in tables.state(table.name).items():
                assert torch.equal(value, other.state(table.name)[name])


@each_optimizer
def test_two_backwards_are_one_step_and_not_two(optimizer):
    """FBGEMM's module would step twice; the halves of a batch must be the batch."""
    whole, halves = build(optimizer), build(optimizer)
    ids, ones = torch.arange(2, 8), torch.arange(25)
    batch = ids.repeat(4).clamp(max=8), ones, None
    batch[0][12:18], batch[0][18:24] = 5, 0
    backward(whole, batch)
    for part in (slice(0, 3), slice(3, 6)):
        few = batch[0].view(4, 6)[:, part].reshape(-1), torch.arange(13), None
        backward(halves, few)
    assert halves.num_records == 2
    whole.step(1)
    halves.step(1)
    for table in TABLES:
        torch.testing.assert_close(halves.weight(table.name), whole.weight(table.name), rtol=0, atol=1e-6)
    assert (whole.weight("a")[2:8] != build(optimizer).weight("a")[2:8]).any()


def test_a_row_that_is_left_out_is_not_even_read():
    """0 times a broken row is not 0: padding and weight 0 must not reach FBGEMM."""
    tables = build(Adagrad(0.1))
    tables.weight("b")[[0, 3]] = float("nan")
    ids, offsets = torch.tensor([5, 0, 3, 5, 0]), torch.tensor([0, 0, 0, 4, 5])
    weights = torch.tensor([1.0, 1.0, 0.0, 2.0, 1.0])
    pooled = tables(ids, offsets, weights)
    assert torch.equal(pooled[:, 34:38], 3 * tables.weight("b")[5:6])
    pooled.backward(torch.full_like(pooled, float("inf")))
    tables.step(1)
    touched = tables.state("b")["last_update_step"].nonzero().flatten().tolist()
    assert touched == [5]


@pytest.mark.parametrize("optimizer", [Adam(), AdamAR()], ids=["adam", "adam_ar"])
def test_what_fbgemm_cannot_do_is_refused_with_the_remedy(optimizer):
    with pytest.raises(ValueError, match=rf"no fused {type(optimizer).__name__} on CPU: use backend 'cpu'"):
        build(optimizer)
    for settings in ({"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"state_dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match=r"use torch\.float32, or backend 'cpu'"):
            build(Adagrad(), **settings)


@pytest.mark.parametrize("option", [{"eps_inside_root": True}, {"weight_decay": 0.1}, {"clip_row_norm": 1.0}])
def test_an_option_that_fbgemm_does_not_have_is_refused_by_name(option):
    with pytest.raises(ValueError, match=f"fused Adagrad has no {next(iter(option))}: use backend 'cpu'"):
        build(Adagrad(0.1, **option))


def test_the_schedule_is_that_of_the_step():
    tables = build(SGD(0.1, schedule=LinearWarmup(2, start_factor=0.5)))
    before = tables.weight("b")[2].clone()
    for k, factor in ((1, 0.5), (2, 0.75), (3, 1.0)):
        pooled = tables(torch.tensor([2]), torch.tensor([0, 0, 0, 1, 1]))
        pooled.backward(torch.ones_like(pooled))
        tables.step(k)
        before -= 0.1 * factor
        torch.testing.assert_close(tables.weight("b")[2], before, rtol=0, atol=1e-6)


def test_rowwise_adagrad_is_refused_where_rows_are_split():
    columns = TableConfig("a", 40, 8, ("f",), init=INIT, column_start=8, total_dim=16)
    with pytest.raises(ValueError, match="table 'a': RowwiseAdagrad takes the mean over all columns"):
        build(RowwiseAdagrad(), tables=[columns])


@pytest.mark.parametrize("bad", [-1, 9])
def test_an_id_outside_its_table_is_named(bad):
    tables = build(SGD())
    with pytest.raises(ValueError, match=rf"feature 'g': id {bad} is not a row of table 'b', which has 9 rows"):
        tables(torch.tensor([2, bad]), torch.tensor([0, 1, 1, 2, 2]))


# --- under TorchRec --------------------------------------------------------------------------------------------------


def on_ranks(plans, names):
    """The largest difference from the reference of any row and state on this rank, for each plan and optimizer."""
    import torch.distributed as dist
    from torchrec import KeyedJaggedTensor

    from trainer.distributed.sharded_model import PlanRequest, TableSettings, embedding_bag_collection, shard_model

    tables = [
        TableConfig("a", 41, 8, ("f", "h"), ("sum", "mean"), init=INIT),
        TableConfig("b", 9, 4, ("g",), init=INIT),
    ]
    rank, ranks, features = dist.get_rank(), dist.get_world_size(), ["f", "h", "g"]
    worst = []
    for plan in plans:
        for name in names:
            pair = [
                shard_model(
                    torch.nn.ModuleDict({"bags": embedding_bag_collection(tables)}),
                    TableSettings.of(tables, OPTIMIZERS[name], {"f": SSEConfig(0.3)}, backend=backend),
                    PlanRequest({table.name: plan for table in tables}),
                )
                for backend in ("reference", "fbgemm")
            ]  # fmt: skip
            for step in range(1, 6):
                # The second rank's batch is empty at step 3.
                size = 0 if rank == 1 and step == 3 else 6
                ids, offsets, _ = draw(np.random.default_rng((step, rank)), size, False, tables)
                batch = KeyedJaggedTensor(features, ids, lengths=offsets.diff(), stride=size)
                for sharded in pair:
                    sharded.set_context(step, 6 * rank, 6 * ranks - (6 if step == 3 else 0))
                    values = sharded.module["bags"](batch).values()
                    (values.square() / 2 + 2.0 * values).sum().backward()
                    sharded.step_tables(step)
            for held in zip(*(sharded.state_for_checkpoint()[0] for sharded in pair), strict=True):
                parts = [{"weight": each.weight, **each.state} for each in held]
                assert parts[0].keys() == parts[1].keys()
                worst += [
                    float((parts[0][part].double() - parts[1][part].double()).abs().max())
                    for part in parts[0]
                    if parts[0][part].numel()
                ]
    return max(worst)


@pytest.mark.parametrize(
    ("plans", "names"),
    [(("table_wise", "row_wise", "data_parallel"), tuple(OPTIMIZERS)), (("column_wise",), ("sgd", "adagrad"))],
    ids=["whole_rows", "columns"],
)
def test_shards_of_every_plan_equal_those_of_the_reference(ranks, plans, names):
    """float32 sums of some ten gradients of about 5 in two orders: state of some hundred to 1e-3, rows far closer."""
    assert max(ranks(2).run(on_ranks, plans, names)) < 1e-3
