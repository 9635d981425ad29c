"""A sharded model trains like one device: same draws, weights and losses on 1 and 2 ranks, in every plan."""

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.support.gathered import gather_table
from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import SGD, AdamAR, RMSprop, RowwiseAdagrad, RowwiseAdam
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig
from tests.support import models
from trainer.checkpoint.format import Checkpoint, CheckpointError, latest_valid

pytestmark = pytest.mark.xdist_group("ranks")

DIM = 8
INIT = InitConfig("normal", 0.3)
TABLES = (
    TableConfig("user", 101, DIM, ("user",), init=INIT),
    TableConfig("item", 57, DIM, ("item", "history"), pooling=("sum", "mean"), init=INIT),
    TableConfig("context", 23, DIM, ("context",), init=INIT),
)
FEATURES = ("user", "item", "history", "context")
SSE = {"item": SSEConfig(0.2), "history": SSEConfig(0.1), "user": SSEConfig(0.1)}
OPTIMIZER = AdamAR(learning_rate=0.01, alpha=1e-3)
# Whole batches, an uneven one, and one of a single sample: then one of two ranks has none.
BATCH_SIZES = (32, 32, 32, 7, 32, 32, 1)

TABLE_WISE = {"user": "table_wise", "item": "table_wise", "context": "table_wise"}
ROW_WISE = {"user": "row_wise", "item": "row_wise", "context": "row_wise"}
MIXED = {"user": "row_wise", "item": "table_wise", "context": "row_wise"}
COLUMN_WISE = {"user": "column_wise", "item": "column_wise", "context": "column_wise"}
DATA_PARALLEL = {"user": "data_parallel", "item": "data_parallel", "context": "data_parallel"}
ALL_KINDS = {"user": "data_parallel", "item": "row_wise", "context": "column_wise"}
PLANS = (TABLE_WISE, ROW_WISE, MIXED, COLUMN_WISE, DATA_PARALLEL, ALL_KINDS)


def make_batch(step):
    """(ids by feature as (indices, offsets), labels) of the global batch of this step."""
    rng = np.random.default_rng((11, step))
    size = BATCH_SIZES[step % len(BATCH_SIZES)]
    rows = {feature: table.num_rows for table in TABLES for feature in table.features}
    features = {}
    for feature in FEATURES:
        lengths = rng.integers(0, 5, size) if feature == "history" else np.ones(size, dtype=np.int64)
        # Few rows of each table are common and many are rare, so that some lie idle for long.
        ids = (rows[feature] * rng.random(lengths.sum()) ** 3).astype(np.int64)
        features[feature] = torch.from_numpy(ids), torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    return features, torch.from_numpy((rng.random(size) < 0.3).astype(np.float32))


def cut(batch, start, stop):
    """The samples [start, stop) of a batch as (KeyedJaggedTensor, labels)."""
    from torchrec import KeyedJaggedTensor

    features, labels = batch
    ids, lengths = [], []
    for feature in FEATURES:
        indices, offsets = features[feature]
        ids.append(indices[offsets[start] : offsets[stop]])
        lengths.append(offsets[start : stop + 1].diff())
    kjt = KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=torch.cat(lengths), stride=stop - start)
    return kjt, labels[start:stop]


def my_range(size):
    import torch.distributed as dist

    edges = [-(-size * rank // dist.get_world_size()) for rank in (dist.get_rank(), dist.get_rank() + 1)]
    return edges[0], edges[1]


def make_model(plan, dtype, backend, sse=SSE, optimizer=OPTIMIZER, seed=0):
    from trainer.distributed.sharded_model import PlanRequest, TableSettings, embedding_bag_collection, shard_model

    dtype = getattr(torch, dtype)
    model = dnn(embedding_bag_collection(TABLES), seed, dtype)
    settings = TableSettings.of(TABLES, optimizer, sse, seed=3, backend=backend, dtype=dtype)
    return shard_model(model, settings, PlanRequest(plan))


def dnn(embeddings, seed=0, dtype=torch.float32, hidden=16):
    return models.make_model("dnn", embeddings, FEATURES, embedding_dim=DIM, hidden=(hidden,), seed=seed, dtype=dtype)


def make_dense_optimizer(sharded):
    return torch.optim.Adam([parameter for _, parameter in sharded.dense_parameters()], lr=0.01)


def run_steps(sharded, dense, first, last):
    """Steps first, ..., last; this rank's part of each loss."""
    losses = []
    for step in range(first, last + 1):
        batch = make_batch(step)
        size = len(batch[1])
        start, stop = my_range(size)
        features, labels = cut(batch, start, stop)
        sharded.set_context(step, start, size)
        logits = sharded.module(features)
        loss = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").sum() / size
        dense.zero_grad()
        loss.backward()
        sharded.all_reduce_gradients()
        assert sharded.non_finite_tables() == []
        dense.step()
        sharded.step_tables(step)
        losses.append(loss.item())
    return losses


def snapshot(sharded):
    """This rank's pieces of tables with their state, and the dense tensors, as plain copies."""
    pieces = [
        (piece.name, piece[2:], {"weight": piece.tables.weight(piece.name).clone()}
         | {name: value.clone() for name, value in piece.tables.state(piece.name).items()})
        for piece in sharded._sharded.local_pieces()
    ]  # fmt: skip
    return pieces, {name: value.clone() for name, value in sharded.state_for_checkpoint()[1].items()}


def train(plan, num_steps, dtype, backend):
    """(loss parts, rows and dense tensors, live shares) after ``num_steps`` on this rank."""
    sharded = make_model(plan, dtype, backend)
    losses = run_steps(sharded, make_dense_optimizer(sharded), 1, num_steps)
    return losses, snapshot(sharded), sharded.shares()


def whole(snapshots):
    """Tables of several ranks put together: {table: {weight, m, v, last_update_step}}.

    What several ranks hold of it (replicas; state by row in column shards) must have the same bits everywhere.
    """
    joined, filled = {}, {}
    for pieces, _ in snapshots:
        for name, (row_start, row_count, column_start, column_count, replica), tensors in pieces:
            num_rows = max(place[0] + place[1] for parts, _ in snapshots for other, place, _ in parts if other == name)
            for part, value in tensors.items():
                shape = (num_rows, DIM) if value.dim() == 2 else (num_rows,)
                target = joined.setdefault(name, {}).setdefault(part, value.new_zeros(shape))
                once = filled.setdefault(name, {}).setdefault(part, torch.zeros(shape, dtype=torch.bool))
                place = (slice(row_start, row_start + row_count), slice(column_start, column_start + column_count))
                place = place[: value.dim()]
                if replica or (value.dim() == 1 and column_start):
                    assert torch.equal(target[place], value)
                else:
                    assert not once[place].any()
                target[place], once[place] = value, True
    assert all(once.all() for parts in filled.values() for once in parts.values())
    return joined


class OneDevice:
    """The same training without TorchRec, process group or sharding: tables, a DNN and a plain loop."""

    def __init__(self, dtype, backend):
        self.tables = EmbeddingTables(TABLES, OPTIMIZER, sse=SSE, seed=3, backend=backend, dtype=dtype)
        tower = dnn(torch.nn.Identity(), dtype=dtype).tower
        self.tower, self.optimizer = tower, torch.optim.Adam(tower.parameters(), lr=0.01)

    def run(self, num_steps):
        losses = []
        for step in range(1, num_steps + 1):
            features, labels = make_batch(step)
            order = self.tables.features
            indices = torch.cat([features[name][0] for name in order])
            lengths = torch.cat([features[name][1].diff() for name in order])
            self.tables.set_context(step)
            pooled = self.tables(indices, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
            blocks = dict(zip(order, pooled.split(DIM, dim=1), strict=True))
            logits = self.tower(torch.cat([blocks[name] for name in FEATURES], dim=1)).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.tables.step(step)
            losses.append(loss.item())
        return losses

    def rows(self):
        return {t.name: {"weight": self.tables.weight(t.name), **self.tables.state(t.name)} for t in TABLES}


def train_one_device(num_steps, dtype, backend):
    run = OneDevice(getattr(torch, dtype), backend)
    return run.run(num_steps), run.rows(), [parameter.detach() for parameter in run.tower.parameters()]


@pytest.fixture(scope="module")
def one_device_float64(ranks):
    return ranks(1).run(train_one_device, 100, "float64", "reference")[0]


@pytest.fixture(scope="module")
def one_device_float32(ranks):
    return ranks(1).run(train_one_device, 100, "float32", "cpu")[0]


def assert_really_split(shares, plan, world_size):
    """Live shares: tables cut into equal blocks or on one rank whole, and those not all on the same."""
    for table in TABLES:
        kind, whole_table = plan[table.name], (0, table.num_rows, 0, DIM)
        held = shares[table.name]
        if kind == "row_wise":
            block = -(-table.num_rows // world_size)
            starts = range(0, table.num_rows, block)
            assert held == [[(start, min(block, table.num_rows - start), 0, DIM)] for start in starts]
        elif kind == "column_wise":
            # TorchRec's shards of columns are multiples of four wide.
            width = max(4, DIM // world_size)
            shards = [(0, table.num_rows, left, width) for left in range(0, DIM, width)]
            assert sorted(piece for of_rank in held for piece in of_rank) == shards
            assert all(len(of_rank) <= 1 for of_rank in held)
        elif kind == "data_parallel":
            assert held == [[whole_table]] * world_size
        else:
            assert sorted(held) == [*[[]] * (world_size - 1), [whole_table]]
    if world_size == 2 and plan == TABLE_WISE:
        assert all(any(held[rank] for held in shares.values()) for rank in (0, 1))


@pytest.mark.parametrize(("world_size", "plan"), [(1, ALL_KINDS), *((2, plan) for plan in PLANS), (4, ALL_KINDS)])
def test_float64_weights_after_100_steps_are_those_of_one_device(ranks, one_device_float64, plan, world_size):
    expected_losses, expected_rows, expected_dense = one_device_float64
    results = ranks(world_size).run(train, plan, 100, "float64", "reference")
    assert_really_split(results[0][2], plan, world_size)
    rows = whole([snapshot for _, snapshot, _ in results])
    for table in TABLES:
        # Bit-equal: the rows that each step touched, and with them every SSE draw.
        assert torch.equal(rows[table.name]["last_update_step"], expected_rows[table.name]["last_update_step"])
        for part in ("weight", "m", "v"):
            torch.testing.assert_close(rows[table.name][part], expected_rows[table.name][part], rtol=0, atol=1e-10)
    for _, (_, dense), _ in results:
        for found, expected in zip(dense.values(), expected_dense, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    losses = np.sum([losses for losses, _, _ in results], axis=0)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-10)
    # It learns, or the comparison would prove little.
    assert np.mean(expected_losses[-30:]) < np.mean(expected_losses[:30]) - 0.02


@pytest.mark.parametrize(("world_size", "plan"), [(1, TABLE_WISE), (2, MIXED), (2, ALL_KINDS)])
def test_float32_loss_curves_are_those_of_one_device(ranks, one_device_float32, plan, world_size):
    expected_losses, expected_rows, _ = one_device_float32
    results = ranks(world_size).run(train, plan, 100, "float32", "cpu")
    assert_really_split(results[0][2], plan, world_size)
    losses = np.sum([losses for losses, _, _ in results], axis=0)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5)
    rows = whole([snapshot for _, snapshot, _ in results])
    for table in TABLES:
        assert torch.equal(rows[table.name]["last_update_step"], expected_rows[table.name]["last_update_step"])


# --- plans -----------------------------------------------------------------------------------------------------------


def make_shares(plan):
    sharded = make_model(plan, "float32", "reference")
    return sharded.plan(), sharded.shares()


def test_the_planner_decides_for_tables_left_out_and_keeps_to_the_rest(ranks):
    for kind in ("table_wise", "row_wise", "column_wise", "data_parallel"):
        first, second = ranks(2).run(make_shares, {"item": kind})
        assert first == second
        assert first[0].keys() == {table.name for table in TABLES}
        assert first[0]["item"] == kind
        assert_really_split(first[1], first[0], 2)


def plan_of(wanted, memory_bytes):
    """The plan of a large, a middling and a tiny table, or why there is none."""
    from trainer.distributed.sharded_model import (
        PlanRequest,
        TableSettings,
        Workload,
        embedding_bag_collection,
        shard_model,
    )

    tables = [TableConfig(name, rows, 16, (name,)) for name, rows in [("large", 20_000), ("middle", 5000), ("tiny", 3)]]
    model = torch.nn.ModuleDict({"bags": embedding_bag_collection(tables)})
    workload = Workload(samples_per_rank=64, ids_per_sample={"middle": 8.0})
    try:
        sharded = shard_model(
            model, TableSettings.of(tables, OPTIMIZER, backend="reference"), PlanRequest(wanted, workload, memory_bytes)
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    held = sharded.shares()
    return sharded.plan(), [[sum(piece.row_count for piece in of_rank) for of_rank in held[t.name]] for t in tables]


def test_a_table_that_fits_no_rank_is_split_by_rows(ranks):
    # A row of 16 columns: float32 weight, m and v, and the step of its last touch: 196 bytes.
    roomy, _ = ranks(2).run(plan_of, {}, 10_000_000)
    assert roomy[0]["large"] == "table_wise", roomy
    (tight, shares), _ = ranks(2).run(plan_of, {}, 3_200_000)
    assert tight["large"] == "row_wise"
    assert shares[0] == [10_000, 10_000]
    assert tight["middle"] in ("table_wise", "row_wise")


def test_what_fits_in_no_plan_is_refused_with_its_arithmetic(ranks):
    for told in ranks(2).run(plan_of, {"middle": "data_parallel"}, 2_000_000):
        assert "the tables do not fit: 5,880,588 bytes over 2 ranks are 2,940,294 each at best, and a rank has" in told
        assert (
            "2,000,000 for them (large: 20,000 rows x 196 bytes = 3,920,000; middle: 5,000 rows x 196 bytes x 2" in told
        )
    for told in ranks(2).run(plan_of, {"large": "table_wise"}, 3_200_000):
        assert "large: 20,000 rows x 196 bytes = 3,920,000 (table_wise)" in told
        assert "leave `sharding` out where it forbids splitting a table" in told


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [SGD(), OPTIMIZER, RowwiseAdagrad(), RMSprop(), RowwiseAdam()])
def test_the_planner_is_told_the_bytes_that_tables_take(optimizer, dtype):
    from embeddings.sharding import TableSettings
    from trainer.distributed.shard_cost import row_bytes

    table = TableConfig("item", 64, 16, ("item",))
    tables = EmbeddingTables([table], optimizer, dtype=dtype, backend="reference")
    kept = [tables.weight("item"), *tables.state("item").values()]
    told = row_bytes(TableSettings({"item": table}, optimizer, {}, dtype=dtype), "item", 16)
    assert sum(value.numel() * value.element_size() for value in kept) == 64 * told


def column_refusal(optimizer):
    try:
        make_model(COLUMN_WISE, "float32", "reference", optimizer=optimizer)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (SGD(clip_row_norm=1.0), "tables user, item, context: clip_row_norm needs the gradient of a whole row"),
        (RowwiseAdagrad(), "tables user, item, context: RowwiseAdagrad keeps one number for a whole row"),
        (RowwiseAdam(), "tables user, item, context: RowwiseAdam keeps one number for a whole row"),
    ],
)
def test_columns_are_not_split_where_the_optimizer_needs_whole_rows(ranks, optimizer, message):
    for told in ranks(2).run(column_refusal, optimizer):
        assert told.startswith(message)


def refuse(what):
    from torch import nn

    from trainer.distributed.sharded_model import PlanRequest, TableSettings, embedding_bag_collection, shard_model

    try:
        if what == "two collections":
            model = nn.ModuleList([embedding_bag_collection(TABLES), embedding_bag_collection(TABLES)])
            shard_model(model, TableSettings.of(TABLES, SGD()), PlanRequest(TABLE_WISE))
        elif what == "three columns":
            model = nn.ModuleList([embedding_bag_collection(TABLES)])
            shard_model(model, TableSettings.of(TABLES, SGD()), PlanRequest(COLUMN_WISE, shard_columns={"item": 3}))
        elif isinstance(what, dict):
            make_model(what, "float32", "reference")
        else:
            make_model(TABLE_WISE, "float32", "reference").set_context(*what)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"itme": "row_wise"}, "sharding.itme: no such table (there are context, item, user)"),
        ({"item": "diagonal"}, "sharding.item: diagonal is not available yet: use one of table_wise, row_wise"),
        ((2, 0, 8), "step 2 does not follow 0 completed steps"),
        ((1, 9, 8), "sample_offset 9 does not lie in a batch of 8"),
        (
            "three columns",
            "shard_columns.item: 3 columns are no equal shards of 8: use a multiple of 4 that divides it",
        ),
        ("two collections", "the model must hold each table once, in an EmbeddingBagCollection or an"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(ranks, what, message):
    (told,) = ranks(1).run(refuse, what)
    assert told.startswith(message)


def test_without_a_process_group_the_remedy_is_named():
    with pytest.raises(RuntimeError, match="init_process_group"):
        make_model(TABLE_WISE, "float32", "reference")


# --- dense parameters and single calls -------------------------------------------------------------------------------


def dense_parts():
    """What a rank has of dense parameters and of their summed gradients, one of which it never computed."""
    import torch.distributed as dist

    sharded = make_model(ROW_WISE, "float32", "reference", seed=dist.get_rank())
    parameters = dict(sharded.dense_parameters())
    for number, parameter in enumerate(parameters.values()):
        if (number, dist.get_rank()) != (1, 1):
            parameter.grad = torch.full_like(parameter, 10.0 * (number + 1) + dist.get_rank())
    sharded.all_reduce_gradients()
    return {name: (p.detach().clone(), p.grad.unique().tolist()) for name, p in parameters.items()}


def test_dense_parameters_are_rank_0s_and_their_gradients_are_summed(ranks):
    first, second = ranks(2).run(dense_parts)
    expected = dnn(torch.nn.Identity())
    assert list(first) == [name for name, _ in expected.named_parameters()]
    for name, parameter in expected.named_parameters():
        assert torch.equal(first[name][0], parameter)
        assert torch.equal(second[name][0], parameter)
    assert [sums for _, sums in first.values()] == [[21.0], [20.0], [61.0], [81.0]]
    assert [sums for _, sums in second.values()] == [[21.0], [20.0], [61.0], [81.0]]


def discard_then_step(poison):
    """Rows before and after a step whose gradients were dropped, and the tables that had one that is not finite."""
    sharded = make_model(MIXED, "float32", "reference")
    before, _ = snapshot(sharded)
    features, _ = cut(make_batch(1), *my_range(32))
    sharded.set_context(1, my_range(32)[0], 32)
    loss = sharded.module(features).sum()
    (loss * float("nan") if poison else loss).backward()
    bad = sharded.non_finite_tables()
    sharded.discard()
    sharded.step_tables(1)
    after, _ = snapshot(sharded)
    same = all(
        torch.equal(values[part], value)
        for (_, _, values), (_, _, old) in zip(after, before, strict=True)
        for part, value in old.items()
    )
    return same, bad, sorted(name for name, _, _ in before), sharded.completed_steps


def test_discarded_gradients_change_nothing_and_bad_ones_are_named(ranks):
    for poison in (False, True):
        for same, bad, held, completed in ranks(2).run(discard_then_step, poison):
            assert same
            assert bad == (held if poison else [])
            assert completed == 1


def gathered(plan, num_steps):
    sharded = make_model(plan, "float32", "reference")
    run_steps(sharded, make_dense_optimizer(sharded), 1, num_steps)
    tables = {(t.name, decay): gather_table(sharded, t.name, decay=decay) for t in TABLES for decay in (True, False)}
    return {key: None if found is None else tuple(found) for key, found in tables.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_tables_are_the_rows_as_of_now(ranks, world_size):
    run = OneDevice(torch.float32, "reference")
    run.run(40)
    for plan in (TABLE_WISE, MIXED):
        first, *others = ranks(world_size).run(gathered, plan, 40)
        for table in TABLES:
            for decay in (True, False):
                rows, last_update_step = first[table.name, decay]
                # float32 training in another order of sums.
                torch.testing.assert_close(rows, run.tables.read(table.name, decay=decay), rtol=1e-3, atol=1e-4)
                assert torch.equal(last_update_step, run.tables.state(table.name)["last_update_step"].long())
            assert not torch.equal(first[table.name, True][0], first[table.name, False][0])
        for other in others:
            assert set(other.values()) == {None}


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_after(plan, num_steps, directory):
    """Trains, saves; this rank's rows and dense tensors, with those of the dense optimizer."""
    sharded = make_model(plan, "float32", "reference")
    dense = make_dense_optimizer(sharded)
    run_steps(sharded, dense, 1, num_steps)
    sharded.save(directory, dense_optimizer=dense, extra={"position": {"step": num_steps}})
    return snapshot(sharded)[0], sharded.state_for_checkpoint(dense)[1]


def load_and_go_on(plan, directory, last):
    """Loads in this plan; rows, dense tensors and extra as loaded, and the same after steps up to ``last``."""
    sharded = make_model(plan, "float32", "reference", seed=9)
    dense = make_dense_optimizer(sharded)
    checkpoint = latest_valid(directory)
    sharded.load_from(checkpoint, dense_optimizer=dense)
    loaded = snapshot(sharded)[0], {k: v.clone() for k, v in sharded.state_for_checkpoint(dense)[1].items()}
    run_steps(sharded, dense, sharded.completed_steps + 1, last)
    return loaded, checkpoint.extra, (snapshot(sharded)[0], sharded.state_for_checkpoint(dense)[1])


def assert_bit_equal(found, expected):
    """(tables, dense) of all ranks, whatever their plans."""
    rows, expected_rows = whole(found), whole(expected)
    for table in TABLES:
        assert rows[table.name].keys() == expected_rows[table.name].keys() == {"weight", "m", "v", "last_update_step"}
        for part, value in expected_rows[table.name].items():
            assert torch.equal(rows[table.name][part], value)
    for _, dense in found:
        assert dense.keys() == expected[0][1].keys()
        assert any(name.startswith("optimizer/") for name in dense)
        for name, value in expected[0][1].items():
            assert torch.equal(dense[name], value)


@pytest.mark.parametrize("saved_by", [(1, TABLE_WISE), (2, MIXED), (2, COLUMN_WISE), (2, ALL_KINDS)])
def test_what_one_plan_saves_every_plan_loads_bit_for_bit(ranks, tmp_path, saved_by):
    world_size, plan = saved_by
    saved = ranks(world_size).run(save_after, plan, 12, str(tmp_path))
    for other in (1, 2):
        for other_plan in PLANS:
            results = ranks(other).run(load_and_go_on, other_plan, str(tmp_path), 12)
            assert_bit_equal([loaded for loaded, _, _ in results], saved)
            for _, extra, _ in results:
                assert (extra["completed_steps"], extra["position"]) == (12, {"step": 12})


@pytest.mark.parametrize(("world_size", "plan"), [(1, TABLE_WISE), (2, MIXED)])
def test_a_resumed_run_ends_with_the_same_bits(ranks, tmp_path, world_size, plan):
    uninterrupted = ranks(world_size).run(save_after, plan, 30, str(tmp_path / "whole"))
    ranks(world_size).run(save_after, plan, 13, str(tmp_path / "cut"))
    results = ranks(world_size).run(load_and_go_on, plan, str(tmp_path / "cut"), 30)
    assert_bit_equal([end for _, _, end in results], uninterrupted)
    # A row that was idle across the cut, with decay pending there, is among them.
    steps = whole(uninterrupted)["user"]["last_update_step"]
    assert ((steps > 0) & (steps < 8)).any()


def load_into(changes, directory, parents=None):
    """The error of loading into tables of other sizes, or (rows as loaded, rows as initial) of this rank. ``parents``:
    of a warm start, by table the checkpoint's rows that go on."""
    import dataclasses

    from trainer.distributed.sharded_model import PlanRequest, TableSettings, embedding_bag_collection, shard_model

    tables = [dataclasses.replace(t, num_rows=changes.get(t.name, t.num_rows), row_count=-1) for t in TABLES]
    hidden = changes.get("hidden", 16)

    def make():
        model = dnn(embedding_bag_collection(tables), hidden=hidden)
        return shard_model(
            model, TableSettings.of(tables, OPTIMIZER, seed=3, backend="reference"), PlanRequest(ROW_WISE)
        )

    sharded, initial = make(), make()
    rows = None
    if parents is not None:
        rows = {t.name: torch.full((t.num_rows,), -1) for t in tables}
        for name, kept in parents.items():
            rows[name][: len(kept)] = torch.tensor(kept)
    try:
        sharded.load_from(Checkpoint(directory), parent_rows=rows)
    except CheckpointError as error:
        return str(error)
    return snapshot(sharded)[0], snapshot(initial)[0]


def test_a_warm_start_keeps_known_rows_and_leaves_new_ones(ranks, tmp_path):
    saved = whole(ranks(2).run(save_after, MIXED, 5, str(tmp_path)))
    # With 220 rows rank 1 holds rows from 110 on alone, none of which goes on. Of items some go, and those behind them
    # close the ranks.
    kept = {table.name: list(range(table.num_rows)) for table in TABLES}
    kept["item"] = [row for row in kept["item"] if row < 2 or row % 3]
    arguments = {"user": 220, "item": 70}, str(tmp_path / "step-000000000005"), kept
    for world_size in (1, 2):
        results = ranks(world_size).run(load_into, *arguments)
        loaded, initial = (whole([(result[number], {}) for result in results]) for number in (0, 1))
        for table in TABLES:
            rows = kept[table.name]
            for part, value in saved[table.name].items():
                found = loaded[table.name][part]
                assert torch.equal(found[: len(rows)], value[rows])
                assert torch.equal(found[len(rows) :], initial[table.name][part][len(rows) :])
        assert (len(loaded["user"]["weight"]), len(loaded["item"]["weight"])) == (220, 70)


@pytest.mark.parametrize(
    ("changes", "parents", "message"),
    [
        ({"user": 220}, None, "it holds tables"),
        ({}, {"user": [3, 3]}, "parent_rows of table 'user' must have"),
        ({}, {"user": [10_000]}, "parent_rows of table 'user' must have"),
        ({"hidden": 8}, None, "the dense parts differ from the model's in model/tower.0.bias, model/tower.0.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(ranks, tmp_path, changes, parents, message):
    ranks(2).run(save_after, MIXED, 1, str(tmp_path))
    for told in ranks(2).run(load_into, changes, str(tmp_path / "step-000000000001"), parents):
        assert message in told


def test_a_damaged_file_is_found_before_loading(ranks, tmp_path):
    ranks(2).run(save_after, ROW_WISE, 1, str(tmp_path))
    path = tmp_path / "step-000000000001"
    file = max(path.glob("table-*rank-00001*"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    for told in ranks(2).run(load_into, {}, str(path)):
        assert f"{file} was changed" in told
