"""Tables under TorchRec, on 1, 2 and 4 ranks, table-wise and row-wise, against the same tables on one device."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.gathered import gather_table
from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD, Adagrad, AdamAR, RMSprop, RowwiseAdamAR
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.sse.swap import swap_in_numpy
from embeddings.tables.config import InitConfig, TableConfig

pytestmark = pytest.mark.xdist_group("ranks")

NORMAL = InitConfig("normal", 0.5)
KEYS = np.random.default_rng(8).integers(0, 2**64, 101, dtype=np.uint64)
# Two tables of one feature each, and one of two features that pool differently; 'tiny' leaves a rank without rows.
TABLES = (
    TableConfig("item", 57, 4, ("item", "history"), pooling=("sum", "mean"), init=NORMAL),
    TableConfig("user", 101, 8, ("user",), init=InitConfig("hash", 0.5), row_keys=KEYS),
    TableConfig("tiny", 1, 2, ("tiny",), pooling="mean", init=NORMAL, first_live_row=0),
)
FEATURES = ("user", "tiny", "history", "item")
PLANS = (
    {"item": "table_wise", "user": "table_wise", "tiny": "table_wise"},
    {"item": "row_wise", "user": "row_wise", "tiny": "row_wise"},
    {"item": "column_wise", "user": "column_wise", "tiny": "column_wise"},
    {"item": "data_parallel", "user": "data_parallel", "tiny": "data_parallel"},
    {"item": "row_wise", "user": "column_wise", "tiny": "data_parallel"},
    {"item": "column_wise", "user": "data_parallel", "tiny": "table_wise"},
)
PLAIN = SGD(learning_rate=1.0)
TABLE_OF = {feature: table for table in TABLES for feature in table.features}


def make_bags(num_samples, seed):
    """For each feature a list of ids per sample: empty bags, repeated ids, padding and unknown ids among them."""
    rng = np.random.default_rng(seed)
    return {
        feature: [
            [int(i) for i in rng.integers(0, TABLE_OF[feature].num_rows, rng.integers(0, 4))]
            for _ in range(num_samples)
        ]
        for feature in FEATURES
    }


def flatten(bags):
    """(indices, offsets) int64 of lists of ids."""
    lengths = torch.tensor([0, *(len(bag) for bag in bags)])
    return torch.tensor([i for bag in bags for i in bag], dtype=torch.int64), lengths.cumsum(0)


def local_features(bags, start, stop):
    """The samples [start, stop) as the KeyedJaggedTensor of a rank."""
    from torchrec import KeyedJaggedTensor

    chosen = [bag for feature in FEATURES for bag in bags[feature][start:stop]]
    indices, offsets = flatten(chosen)
    return KeyedJaggedTensor(list(FEATURES), indices, lengths=offsets.diff(), stride=stop - start)


def my_slice(sizes):
    import torch.distributed as dist

    rank = dist.get_rank()
    return sum(sizes[:rank]), sum(sizes[: rank + 1])


class Pooled(torch.nn.Module):
    """The smallest model: the pooled rows themselves."""

    def __init__(self, tables, pooling=None):
        from torchrec import PoolingType

        from embeddings.sharding import embedding_bag_collection

        super().__init__()
        self.embeddings = embedding_bag_collection(tables)
        if pooling is not None:
            for config in self.embeddings.embedding_bag_configs():
                config.pooling = PoolingType(pooling)

    def forward(self, features):
        return self.embeddings(features).to_dict()


def shard(tables, plan, sse=None, dtype="float64", backend="reference", pooling=None, optimizer=PLAIN):
    from trainer.distributed.sharded_model import PlanRequest, TableSettings, shard_model

    settings = TableSettings.of(tables, optimizer, sse or {}, seed=5, backend=backend, dtype=getattr(torch, dtype))
    return shard_model(Pooled(tables, pooling), settings, PlanRequest(plan))


def pool_once(plan, bags, sizes, backend="reference", pooling=None):
    """One step on the ranks: (pooled rows of this rank by feature, table rows after a step of SGD with eta = 1).

    The loss is sum over samples n of (n + 1) |pooled row|^2 / 2, so that samples can't be taken for each other.
    """
    sharded = shard(TABLES, plan, backend=backend, pooling=pooling)
    start, stop = my_slice(sizes)
    sharded.set_context(1, start, sum(sizes))
    blocks = sharded.module(local_features(bags, start, stop))
    weight = torch.arange(start + 1, stop + 1, dtype=torch.float64)[:, None]
    loss = sum((weight * block**2).sum() / 2 for block in blocks.values())
    loss.backward()
    sharded.step_tables(1)
    rows = [(held[0], held[2:], held.tables.weight(held.name).clone()) for held in sharded._sharded.local_pieces()]
    return {name: block.detach() for name, block in blocks.items()}, rows


def one_device(bags):
    """What :func:`pool_once` gives, without TorchRec."""
    num_samples = len(bags["item"])
    tables = EmbeddingTables(TABLES, PLAIN, seed=5, dtype=torch.float64)
    indices, offsets = flatten([bag for feature in tables.features for bag in bags[feature]])
    pooled = tables(indices, offsets)
    weight = torch.arange(1, num_samples + 1, dtype=torch.float64)[:, None]
    ((weight * pooled**2).sum() / 2).backward()
    tables.step(1)
    blocks = pooled.detach().split([TABLE_OF[feature].dim for feature in tables.features], dim=1)
    return dict(zip(tables.features, blocks, strict=True)), {t.name: tables.weight(t.name) for t in TABLES}


def assert_same(results, expected):
    """Ranks' slices and shards against one device. Only the order of float64 sums may differ."""
    blocks, rows = expected
    for feature in FEATURES:
        found = torch.cat([mine[feature] for mine, _ in results])
        torch.testing.assert_close(found, blocks[feature], rtol=0, atol=1e-13)
    for name, whole in rows.items():
        found = joined([held for _, held in results], name, whole.shape)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def joined(held_by_rank, name, shape):
    """The whole table of pieces (name, place, rows) of all ranks: each element once, or equal in every replica."""
    whole, count = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.int64)
    for held in held_by_rank:
        for piece, (row_start, row_count, column_start, column_count, replica), rows in held:
            if piece == name:
                place = slice(row_start, row_start + row_count), slice(column_start, column_start + column_count)
                assert replica == 0 or torch.equal(whole[place], rows)
                whole[place], count[place] = rows, count[place] + 1
    replicas = count.flatten()[0] if count.numel() else 1
    assert (count == replicas).all()
    assert replicas in (1, len(held_by_rank))
    return whole


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sizes", [[9], [5, 4], [8, 1], [9, 0], [0, 9], [3, 0, 5, 1]])
def test_pooled_rows_and_gradients_are_those_of_one_device(ranks, plan, sizes):
    bags = make_bags(9, 0)
    assert_same(ranks(len(sizes)).run(pool_once, plan, bags, sizes), one_device(bags))


@given(plan=st.sampled_from(PLANS), num_samples=st.integers(0, 12), cut=st.integers(0, 12), seed=st.integers(0, 2**16))
def test_any_batch_and_any_cut(ranks, plan, num_samples, cut, seed):
    sizes = [min(cut, num_samples), num_samples - min(cut, num_samples)]
    bags = make_bags(num_samples, seed)
    assert_same(ranks(2).run(pool_once, plan, bags, sizes), one_device(bags))


def test_the_compiled_kernel_gives_the_same(ranks):
    bags = make_bags(9, 1)
    for plan in PLANS[:2]:
        assert_same(ranks(2).run(pool_once, plan, bags, [5, 4], "cpu"), one_device(bags))


def train_some_steps(plan, backend, optimizer, sizes):
    """Pooled rows of each step, then rows and state of the shards of this rank, after steps with swaps and idle rows.

    The loss is that of :func:`pool_once`.
    """
    sse = {"item": SSEConfig(0.5), "user": SSEConfig(0.25)}
    sharded = shard(TABLES, plan, sse, backend=backend, optimizer=optimizer)
    start, stop = my_slice(sizes)
    weight = torch.arange(start + 1, stop + 1, dtype=torch.float64)[:, None]
    found = {}
    for step in range(1, 4):
        sharded.set_context(step, start, sum(sizes))
        blocks = sharded.module(local_features(make_bags(sum(sizes), step), start, stop))
        sum((weight * block**2).sum() / 2 for block in blocks.values()).backward()
        found |= {(step, name): block.detach() for name, block in blocks.items()}
        found[step, "norm"] = torch.tensor(sharded.gradient_squared_norm())
        sharded.step_tables(step, 0.5)
    for held in sharded._sharded.local_pieces():
        place = (held.name, *held[2:])
        found |= {(*place, name): value.clone() for name, value in held.tables.state(held.name).items()}
        found[(*place, "weight")] = held.tables.weight(held.name).clone()
    return {str(key): value for key, value in found.items()}


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        (PLANS[0], Adagrad(0.1)), (PLANS[1], RowwiseAdamAR(0.05, alpha=1e-3)), (PLANS[1], RMSprop(0.02)),
        (PLANS[2], AdamAR(0.05, alpha=1e-3)),
    ],
    ids=["table_wise-adagrad", "row_wise-rowwise_adam_ar", "row_wise-rmsprop", "column_wise-adam_ar"],
)  # fmt: skip
def test_triton_under_its_interpreter_gives_what_the_cpu_gives(ranks, plan, optimizer):
    """Tolerance: that of the contract of row optimizers."""
    ours, triton = (ranks(2).run(train_some_steps, plan, each, optimizer, [5, 4]) for each in ("cpu", "triton"))
    moved = 0
    for wanted, found in zip(ours, triton, strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-9, msg=lambda told, name=name: f"{name} {told}"
            )
            moved += int((value != 0).sum()) if "last_update_step" in name else 0
    assert moved > 50


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_pooling_is_the_table_configs_whatever_the_collection_says(ranks, pooling):
    bags = make_bags(9, 2)
    for plan in PLANS:
        assert_same(ranks(2).run(pool_once, plan, bags, [5, 4], "reference", pooling), one_device(bags))


# --- SSE -------------------------------------------------------------------------------------------------------------

# A row is its own number in one-hot form, so that a pooled row counts the ids that were looked up.
ONE_HOT = tuple(
    TableConfig(name, num_rows, num_rows, features, first_live_row=first)
    for name, num_rows, features, first in [("item", 57, ("item", "history"), 2), ("user", 101, ("user",), 2)]
)
RING = Graph.from_edges(np.arange(2, 57), np.roll(np.arange(2, 57), 3), 57)
STAR = Graph.from_edges(np.full(99, 2), np.arange(2, 101), 101)
SSE = {"item": SSEConfig(0.5), "history": SSEConfig(0.25, RING, 200.0), "user": SSEConfig(0.75, STAR, 40.0)}
ONE_HOT_FEATURES = ("user", "history", "item")


def draw(plan, bags, sizes, num_steps, training):
    """Counts of the looked-up ids of this rank's samples, by step and feature."""
    from torchrec import KeyedJaggedTensor

    sharded = shard(ONE_HOT, plan, SSE, "float32").train(training)
    num_rows = {table.name: table.num_rows for table in ONE_HOT}
    for held in sharded._sharded.local_pieces():
        rows, columns = (
            torch.arange(held.row_count) + held.row_start,
            torch.arange(held.column_count) + held.column_start,
        )
        held.tables.weight(held.name).copy_(torch.eye(num_rows[held.name])[rows][:, columns])
    start, stop = my_slice(sizes)
    indices, offsets = flatten([bag for feature in ONE_HOT_FEATURES for bag in bags[feature][start:stop]])
    features = KeyedJaggedTensor(list(ONE_HOT_FEATURES), indices, lengths=offsets.diff(), stride=stop - start)
    counts = []
    for step in range(1, num_steps + 1):
        sharded.set_context(step, start, sum(sizes))
        blocks = sharded.module(features)
        counts.append({feature: blocks[feature].detach().to(torch.int64) for feature in ONE_HOT_FEATURES})
        sharded.step_tables(step)
    return counts


def expected_counts(bags, feature, step, training):
    table = next(table for table in ONE_HOT if feature in table.features)
    ids, offsets = flatten(bags[feature])
    if training:
        ids = swap_in_numpy(ids, offsets, table=table, feature=feature, config=SSE[feature], seed=5, step=step)
    counts = torch.zeros(len(bags[feature]), table.num_rows, dtype=torch.int64)
    for sample in range(len(bags[feature])):
        for i in ids[offsets[sample] : offsets[sample + 1]]:
            # The padding row is never looked up.
            counts[sample, i] += int(i) != 0
    return counts, int((ids != flatten(bags[feature])[0]).sum())


@pytest.mark.parametrize(
    "plan",
    [
        {"item": "table_wise", "user": "row_wise"},
        {"item": "row_wise", "user": "column_wise"},
        {"item": "column_wise", "user": "data_parallel"},
        {"item": "data_parallel", "user": "table_wise"},
    ],
)
@pytest.mark.parametrize("sizes", [[13], [7, 6], [0, 13], [5, 2, 0, 6]])
def test_draws_are_bit_equal_in_every_plan_and_only_made_in_training(ranks, plan, sizes):
    bags = {feature: bags for feature, bags in make_bags(13, 3).items() if feature in ONE_HOT_FEATURES}
    check_draws(ranks(len(sizes)).run(draw, plan, bags, sizes, 3, True), bags, training=True)
    if sizes == [7, 6]:
        check_draws(ranks(len(sizes)).run(draw, plan, bags, sizes, 1, False), bags, training=False)


def check_draws(results, bags, training):
    num_swaps = 0
    for step in range(1, len(results[0]) + 1):
        for feature in ONE_HOT_FEATURES:
            expected, swaps = expected_counts(bags, feature, step, training)
            assert torch.equal(torch.cat([counts[step - 1][feature] for counts in results]), expected)
            num_swaps += swaps
    assert (num_swaps > 20) == training


# --- one feature, two tables -----------------------------------------------------------------------------------------


def two_tables_of_a_feature(plan):
    from torchrec import KeyedJaggedTensor

    tables = (
        TableConfig("item", 9, 4, ("item", "negative"), init=NORMAL),
        TableConfig("bias", 9, 1, ("item", "negative"), pooling="mean", init=NORMAL),
    )
    sharded = shard(tables, plan)
    features = KeyedJaggedTensor(["item", "negative"], torch.tensor([2, 3, 4, 5]), lengths=torch.tensor([1, 1, 2, 0]))
    sharded.set_context(1, 2 * torch.distributed.get_rank(), 2 * torch.distributed.get_world_size())
    found = {name: block.detach() for name, block in sharded.module(features).items()}
    rows = {}
    for name in ("item", "bias"):
        whole = gather_table(sharded, name)
        rows[name] = None if whole is None else whole.rows
    return found, rows


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "plan", [{"item": a, "bias": b} for a in ("table_wise", "row_wise") for b in ("table_wise", "row_wise")]
)
def test_a_feature_may_read_two_tables(ranks, plan, world_size):
    results = ranks(world_size).run(two_tables_of_a_feature, plan)
    item, bias = results[0][1]["item"].double(), results[0][1]["bias"].double()
    for found, _ in results:
        expected = {
            "item@item": item[[2, 3]],
            "negative@item": torch.stack([item[4] + item[5], torch.zeros(4, dtype=torch.float64)]),
            "item@bias": bias[[2, 3]],
            "negative@bias": torch.stack([(bias[4] + bias[5]) / 2, torch.zeros(1, dtype=torch.float64)]),
        }
        assert found.keys() == expected.keys()
        for name, block in expected.items():
            # gather_table gives float32
            torch.testing.assert_close(found[name], block, rtol=1e-6, atol=1e-7)


# --- what TorchRec sees, and what is refused -------------------------------------------------------------------------


def names_in_state_dict(plan):
    sharded = shard(TABLES, plan, dtype="float32")
    state = sharded.module.state_dict()
    shapes = {}
    for name, value in state.items():
        (local,) = value.local_shards() or [None]
        if local is not None:
            table = name.split(".")[-2]
            (held,) = (piece for piece in sharded._sharded.local_pieces() if piece.name == table)
            assert local.tensor.data_ptr() == held.tables.weight(table).data_ptr()
            shapes[name] = tuple(local.metadata.shard_sizes)
    return {name: tuple(value.size()) for name, value in state.items()}, shapes


def test_rows_are_sharded_tensors_under_torchrecs_names(ranks):
    results = ranks(2).run(names_in_state_dict, {"item": "row_wise", "user": "table_wise", "tiny": "table_wise"})
    for sizes, _ in results:
        assert sizes == {f"embeddings.embedding_bags.{t.name}.weight": (t.num_rows, t.dim) for t in TABLES}
    assert [shapes["embeddings.embedding_bags.item.weight"] for _, shapes in results] == [(29, 4), (28, 4)]


def refused(what, plan):
    """The message of what one rank refuses."""
    from torchrec import KeyedJaggedTensor

    try:
        if what == "tables":
            from trainer.distributed.sharded_model import PlanRequest, TableSettings, shard_model

            other = (dataclasses.replace(TABLES[0], num_rows=58), *TABLES[1:])
            shard_model(Pooled(TABLES), TableSettings.of(other, SGD()), PlanRequest(plan))
        sharded = shard(TABLES, plan)
        features = local_features(make_bags(3, 0), 0, 3)
        if what == "variable batch":
            features = KeyedJaggedTensor(
                list(FEATURES), torch.tensor([2, 0, 2, 2, 2]), lengths=torch.ones(5, dtype=torch.int64),
                stride_per_key_per_rank=[[2], [1], [1], [1]],
                inverse_indices=(list(FEATURES), torch.zeros(4, 2).long()),
            )  # fmt: skip
        else:
            features = KeyedJaggedTensor(
                list(FEATURES), torch.tensor([2, 0, what, 2]), lengths=torch.ones(4, dtype=torch.int64), stride=1
            )
        sharded.module(features)["item"].sum()
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("plan", PLANS[:2])
@pytest.mark.parametrize("bad", [57, 10**9, -1])
def test_an_id_outside_the_table_is_named(ranks, plan, bad):
    (told,) = ranks(1).run(refused, bad, plan)
    assert f"feature 'history': id {bad} is not a row of table 'item', which has 57 rows" in told


def test_a_batch_size_by_feature_is_refused(ranks):
    (told,) = ranks(1).run(refused, "variable batch", PLANS[0])
    assert "not available yet" in told


def test_tables_that_are_not_the_models_are_named(ranks):
    (told,) = ranks(1).run(refused, "tables", PLANS[0])
    assert "differ in tables ['item']" in told
