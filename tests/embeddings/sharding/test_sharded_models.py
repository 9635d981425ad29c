"""Any model, plan and cut of the batch trains as on one device: bags and sequences, weighted, with SSE and AdamAR."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import AdamAR
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import InitConfig, TableConfig

pytestmark = pytest.mark.xdist_group("ranks")

BAG_KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
SEQUENCE_DIM = 8
OPTIMIZER = AdamAR(learning_rate=0.05, alpha=1e-2)


class Case(NamedTuple):
    """A model, where its tables are, and the samples of each rank in each step."""

    tables: tuple[TableConfig, ...]
    plan: dict[str, str]
    steps: tuple[tuple[int, ...], ...]
    weighted: bool = False
    probability: float = 0.0
    bounds: str = "fatal"
    seed: int = 0

    def of(self, pooled):
        return [table for table in self.tables if ("none" not in table.pooling) == pooled]


def batch_of(case, step, pooled):
    """{feature: (ids per sample, weights per sample)} of the global batch: empty bags, padding, repeated ids."""
    rng = np.random.default_rng((case.seed, step, pooled))
    size = sum(case.steps[step - 1])
    found = {}
    for table in case.of(pooled):
        low, high = (-2, table.num_rows + 3) if case.bounds == "ignore" else (0, table.num_rows)
        for feature in table.features:
            lengths = rng.integers(0, 4, size) * (rng.random() < 0.8)
            ids = [rng.integers(low, high, n) for n in lengths]
            found[feature] = ids, [rng.integers(0, 3, n) / 2 for n in lengths]
    return found


def flatten(batch, features, start, stop):
    """(indices, lengths, weights) of the samples [start, stop), feature by feature."""
    ids = [bag for feature in features for bag in batch[feature][0][start:stop]]
    weights = [bag for feature in features for bag in batch[feature][1][start:stop]]
    return (
        torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ids])),
        torch.tensor([len(bag) for bag in ids], dtype=torch.int64),
        torch.from_numpy(np.concatenate([np.empty(0), *weights])),
    )


def loss_of(outputs, first):
    """Sum of squares with a factor for each row of each output, so that none can be taken for another."""
    total = torch.zeros((), dtype=torch.float64)
    for number, name in enumerate(sorted(outputs)):
        rows = outputs[name]
        factor = 1.0 + number + torch.arange(first[name], first[name] + len(rows), dtype=torch.float64) / 16
        total = total + (factor[:, None] * (rows + 0.25) ** 2).sum()
    return total


def sse_of(case):
    return {f: SSEConfig(case.probability) for t in case.tables for f in t.features if case.probability}


def on_ranks(case):
    """This rank's losses and outputs by step, and its pieces of the tables with their state."""
    import torch.distributed as dist
    from torchrec import KeyedJaggedTensor

    from embeddings.sharding import embedding_bag_collection, embedding_collection
    from trainer.distributed.sharded_model import PlanRequest, TableSettings, shard_model

    model = torch.nn.ModuleDict()
    if case.of(True):
        model["bags"] = embedding_bag_collection(case.of(True), is_weighted=case.weighted)
    if case.of(False):
        model["sequences"] = embedding_collection(case.of(False))
    settings = TableSettings.of(
        case.tables, OPTIMIZER, sse_of(case), seed=7, backend="reference", dtype=torch.float64, bounds=case.bounds
    )
    sharded = shard_model(model, settings, PlanRequest(case.plan, shard_columns={"narrow": 4}))
    losses, outputs = [], []
    for step, sizes in enumerate(case.steps, start=1):
        start, stop = sum(sizes[: dist.get_rank()]), sum(sizes[: dist.get_rank() + 1])
        sharded.set_context(step, start, sum(sizes))
        found, first = {}, {}
        for part, module in sharded.module.items():
            batch = batch_of(case, step, part == "bags")
            indices, lengths, weights = flatten(batch, list(batch), start, stop)
            weights = weights if case.weighted and part == "bags" else None
            blocks = module(KeyedJaggedTensor(list(batch), indices, weights, lengths=lengths, stride=stop - start))
            if part == "bags":
                found |= blocks.to_dict()
                first |= dict.fromkeys(batch, start)
            else:
                found |= {feature: blocks[feature].values() for feature in batch}
                first |= {feature: sum(map(len, batch[feature][0][:start])) for feature in batch}
        loss = loss_of(found, first)
        loss.backward()
        sharded.step_tables(step)
        losses.append(loss.item())
        outputs.append({name: value.detach().clone() for name, value in found.items()})
    pieces = [
        (held.name, held[2:], {"weight": held.tables.weight(held.name).clone()}
         | {name: value.clone() for name, value in held.tables.state(held.name).items()})
        for held in sharded._sharded.local_pieces()
    ]  # fmt: skip
    return losses, outputs, pieces


def on_one_device(case):
    """The same of EmbeddingTables alone, without TorchRec or process groups."""
    parts = {
        pooled: EmbeddingTables(
            case.of(pooled), OPTIMIZER, seed=7, backend="reference", dtype=torch.float64, bounds=case.bounds,
            sse={f: config for f, config in sse_of(case).items() if any(f in t.features for t in case.of(pooled))},
        )
        for pooled in (True, False)
        if case.of(pooled)
    }  # fmt: skip
    losses, outputs = [], []
    for step, sizes in enumerate(case.steps, start=1):
        found = {}
        for pooled, tables in parts.items():
            batch = batch_of(case, step, pooled)
            indices, lengths, weights = flatten(batch, tables.features, 0, sum(sizes))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            tables.set_context(step)
            rows = tables(indices, offsets, weights if case.weighted and pooled else None)
            if pooled:
                dims = [table.dim for table in case.of(True) for _ in table.features]
                found |= dict(zip(tables.features, rows.split(dims, dim=1), strict=True))
            else:
                counts = [sum(map(len, batch[feature][0])) for feature in tables.features]
                found |= dict(zip(tables.features, rows.split(counts), strict=True))
        loss = loss_of(found, dict.fromkeys(found, 0))
        loss.backward()
        for tables in parts.values():
            tables.step(step)
        losses.append(loss.item())
        outputs.append({name: value.detach() for name, value in found.items()})
    whole = {}
    for tables in parts.values():
        for table in tables.layout.tables:
            whole[table.name] = {"weight": tables.weight(table.name), **tables.state(table.name)}
    return losses, outputs, whole


def check(ranks, case, run=on_ranks):
    """Losses, outputs and rows of ranks against one device: float64, sums in another order. Returns what ranks have."""
    results = ranks(len(case.steps[0])).run(run, case)
    losses, outputs, whole = on_one_device(case)
    np.testing.assert_allclose(np.sum([mine for mine, _, _ in results], axis=0), losses, rtol=1e-12, atol=1e-12)
    for step, expected in enumerate(outputs):
        for name, rows in expected.items():
            found = torch.cat([mine[step][name] for _, mine, _ in results])
            torch.testing.assert_close(found, rows, rtol=1e-12, atol=1e-12)
    count = {(name, part): torch.zeros(value.shape) for name, parts in whole.items() for part, value in parts.items()}
    first = {}
    for _, _, pieces in results:
        for name, (row_start, row_count, column_start, column_count, _), parts in pieces:
            for part, value in parts.items():
                place = (slice(row_start, row_start + row_count), slice(column_start, column_start + column_count))
                place = place[: value.dim()]
                count[name, part][place] += 1
                if part == "last_update_step":
                    assert torch.equal(value, whole[name][part][place])
                torch.testing.assert_close(value, whole[name][part][place], rtol=1e-12, atol=1e-12)
                # Replicas, and state by row in column shards: the same bits.
                same = first.setdefault((name, part, row_start, column_start if value.dim() == 2 else 0), value)
                assert torch.equal(same, value)
    for (name, _), times in count.items():
        copies = {"data_parallel": len(results)}.get(case.plan.get(name))
        assert (times == copies).all() if copies else (times > 0).all()
    return results


NORMAL = InitConfig("normal", 0.5)


def bag(name, num_rows, dim, *features, pooling="sum", first=2):
    return TableConfig(name, num_rows, dim, features or (name,), pooling=pooling, init=NORMAL, first_live_row=first)


MODEL = (
    bag("item", 37, 8, "item", "history", pooling=("sum", "mean")),
    bag("narrow", 11, 12, first=0),
    bag("tiny", 1, 4, pooling="mean", first=0),
    bag("word", 23, SEQUENCE_DIM, "text", "title", pooling="none"),
    bag("tag", 5, SEQUENCE_DIM, pooling="none", first=0),
)
# Uneven, empty on one rank, empty on all.
STEPS = {1: ((5,), (0,), (4,)), 2: ((3, 2), (0, 4), (0, 0), (5, 0)), 4: ((2, 0, 1, 3), (0, 0, 0, 1), (3, 3, 3, 3))}


@pytest.mark.parametrize("kind", BAG_KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_kind_of_table_in_every_sharding(ranks, kind, world_size):
    plan = {table.name: kind for table in MODEL}
    check(ranks, Case(MODEL, plan, STEPS[world_size], weighted=world_size == 2, probability=0.3))


@pytest.mark.parametrize("kind", BAG_KINDS)
def test_ids_outside_a_table_count_as_padding_where_bounds_are_ignored(ranks, kind):
    check(ranks, Case(MODEL, {table.name: kind for table in MODEL}, STEPS[2], probability=0.3, bounds="ignore"))


def by_network(case):
    """As :func:`on_ranks`, no two of them sharing memory."""
    from tests.support.by_network import exchanges_by_network

    with exchanges_by_network():
        return on_ranks(case)


def assert_same_bits(found, expected):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict | list | tuple):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same_bits(found[key], expected[key])
    else:
        assert found == expected


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", BAG_KINDS)
def test_ranks_with_and_without_shared_memory_train_to_the_same_bits(ranks, kind, world_size):
    case = Case(MODEL, {table.name: kind for table in MODEL}, STEPS[world_size], weighted=True, probability=0.3)
    assert_same_bits(ranks(world_size).run(on_ranks, case), ranks(world_size).run(by_network, case))


def on_hosts_of_two_by_network(case):
    from tests.support.by_network import exchanges_by_network

    with exchanges_by_network():
        return on_hosts_of_two(case)


def on_hosts_of_two(case):
    """As :func:`on_ranks`, four ranks being two hosts."""
    import os

    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        return on_ranks(case)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


@pytest.mark.parametrize("kind", ["table_row_wise", "table_column_wise", "grid"])
def test_shardings_that_know_hosts(ranks, kind):
    bags = tuple(table for table in MODEL if "none" not in table.pooling)
    case = Case(bags, {table.name: kind for table in bags}, STEPS[4], True, probability=0.3)
    results = check(ranks, case, on_hosts_of_two)
    assert_same_bits(results, ranks(4).run(on_hosts_of_two_by_network, case))
    held = [[place[:4] for name, place, _ in pieces if name == "item"] for _, _, pieces in results]
    rows, columns = [(0, 19), (19, 18)], [(0, 4), (4, 4)]
    if kind == "grid":
        assert held == [[(*row, *column)] for column in columns for row in rows]
    else:
        pair = (
            [[(*row, 0, 8)] for row in rows] if kind == "table_row_wise" else [[(0, 37, *column)] for column in columns]
        )
        assert held in ([*pair, [], []], [[], [], *pair], [*pair[::-1], [], []], [[], [], *pair[::-1]])


@st.composite
def cases(draw):
    names = [f"t{number}" for number in range(draw(st.integers(1, 4)))]
    tables, plan = [], {}
    for name in names:
        features = tuple(f"{name}_{number}" for number in range(draw(st.integers(1, 2))))
        pooling = draw(st.sampled_from(["sum", "mean", "none"]))
        dim = SEQUENCE_DIM if pooling == "none" else draw(st.sampled_from([1, 4, 8, 16]))
        first = draw(st.sampled_from([0, 1, 2]))
        tables.append(bag(name, draw(st.integers(1, 30)), dim, *features, pooling=pooling, first=first))
        plan[name] = draw(st.sampled_from(BAG_KINDS))
    world_size = draw(st.sampled_from([1, 2, 4]))
    sizes = st.tuples(*[st.integers(0, 4)] * world_size)
    steps = draw(st.lists(sizes, min_size=1, max_size=4))
    weighted, probability = draw(st.booleans()), draw(st.sampled_from([0.0, 0.5]))
    return Case(tuple(tables), plan, tuple(steps), weighted, probability, seed=draw(st.integers(0, 2**16)))


@given(case=cases())
def test_any_model_plan_and_cut(ranks, case):
    check(ranks, case)


# --- bad input on one rank --------------------------------------------------------------------------------------------


def go_on_after_bad_input(plan, bad_ranks, sizes):
    """(error of a forward in which some ranks have an id that is no row, the loss of a good step after it)."""
    import torch.distributed as dist
    from torchrec import KeyedJaggedTensor

    from embeddings.sharding import embedding_bag_collection, embedding_collection
    from trainer.distributed.sharded_model import PlanRequest, TableSettings, shard_model

    model = torch.nn.ModuleDict(
        {"bags": embedding_bag_collection(MODEL[:3]), "sequences": embedding_collection(MODEL[3:])}
    )
    sharded = shard_model(model, TableSettings.of(MODEL, OPTIMIZER, seed=7, backend="reference"), PlanRequest(plan))
    size = sizes[dist.get_rank()]
    told = []
    for part in ("bags", "sequences"):
        features = [
            feature for table in MODEL for feature in table.features if (table in MODEL[:3]) == (part == "bags")
        ]
        for bad in (True, False):
            ids = torch.zeros(len(features) * size, dtype=torch.int64)
            if bad and dist.get_rank() in bad_ranks:
                ids[-1 if part == "bags" else 0] = 99
            sharded.set_context(sharded.completed_steps + 1, sum(sizes[: dist.get_rank()]), sum(sizes))
            batch = KeyedJaggedTensor(features, ids, lengths=torch.ones(len(ids), dtype=torch.int64), stride=size)
            try:
                found = sharded.module[part](batch)
                rows = found.values() if part == "bags" else torch.cat([found[name].values() for name in features])
                rows.sum().backward()
                sharded.step_tables(sharded.completed_steps + 1)
                told.append("went on")
            except (ValueError, RuntimeError) as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


def go_on_after_bad_input_by_network(*arguments):
    from tests.support.by_network import exchanges_by_network

    with exchanges_by_network():
        return go_on_after_bad_input(*arguments)


@pytest.mark.parametrize("run", [go_on_after_bad_input, go_on_after_bad_input_by_network])
@pytest.mark.parametrize("kind", BAG_KINDS)
def test_no_rank_waits_for_one_whose_input_is_bad(ranks, kind, run):
    """Without the vote the good rank waits for the bad one in a collective, until the process group's timeout."""
    plan = {table.name: kind for table in MODEL}
    for bad_ranks, sizes in [((1,), (3, 2)), ((0, 1), (1, 1)), ((0,), (2, 0))]:
        for rank, told in enumerate(ranks(2).run(run, plan, bad_ranks, sizes)):
            assert told[1] == told[3] == "went on"
            if rank in bad_ranks:
                assert told[0].startswith(
                    "ValueError: feature 'tiny': id 99 is not a row of table 'tiny', which has 1 "
                )
                assert told[2].startswith(
                    "ValueError: feature 'text': id 99 is not a row of table 'word', which has 23"
                )
            else:
                expected = f"OtherRankFailed: rank {bad_ranks[-1]} refused its input, so no rank goes on"
                assert told[0].startswith(expected)
                assert told[2].startswith(expected)
