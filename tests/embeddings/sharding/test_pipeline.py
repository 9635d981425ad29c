"""Our sharders in TorchRec's TrainPipelineSparseDist: the bits of steps without it, and the same errors."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from embeddings.optim import AdamAR
from embeddings.sse.config import SSEConfig
from embeddings.sse.graph import Graph
from embeddings.tables.config import InitConfig, TableConfig

pytestmark = pytest.mark.xdist_group("ranks")

NORMAL = InitConfig("normal", 0.5)
BAGS = (
    TableConfig("item", 57, 4, ("item", "history"), pooling=("sum", "mean"), init=NORMAL),
    TableConfig("user", 101, 8, ("user",), init=NORMAL),
)
TEXTS = (TableConfig("word", 31, 4, ("text",), pooling="none", init=NORMAL),)
RING = Graph.from_edges(np.arange(2, 57), np.roll(np.arange(2, 57), 3), 57)
SSE = {"item": SSEConfig(0.5, RING, 50.0), "history": SSEConfig(0.3), "user": SSEConfig(0.3), "text": SSEConfig(0.4)}
NUM_STEPS = 10
KINDS = ("table_wise", "row_wise", "data_parallel")


def bounds(step, world_size):
    """Where the slices of the ranks begin, and the last one ends: other sizes in each step, also none."""
    cuts = np.random.default_rng([3, step, world_size]).integers(0, 8 + step, world_size - 1)
    return [0, *sorted(cuts.tolist()), 7 + step]


def features_of(step, rank, world_size):
    """This rank's samples of the batch of a step."""
    from torchrec import KeyedJaggedTensor

    start, stop = bounds(step, world_size)[rank : rank + 2]
    rng = np.random.default_rng([5, step])
    ids, lengths = [], []
    for table in BAGS + TEXTS:
        for _ in table.features:
            bags = [rng.integers(0, table.num_rows, rng.integers(0, 4)) for _ in range(7 + step)][start:stop]
            ids += bags
            lengths += [len(bag) for bag in bags]
    names = [feature for table in BAGS + TEXTS for feature in table.features]
    values = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *ids]))
    return KeyedJaggedTensor(names, values, lengths=torch.tensor(lengths, dtype=torch.int64), stride=stop - start)


class Model(torch.nn.Module):
    """Bags and sequences: (a loss in which no two samples count the same, what was looked up)."""

    def __init__(self):
        from embeddings.sharding import embedding_bag_collection, embedding_collection

        super().__init__()
        self.bags, self.texts = embedding_bag_collection(BAGS), embedding_collection(TEXTS)

    def forward(self, batch):
        pooled, rows = self.bags(batch.features), self.texts(batch.features)["text"].values()
        blocks = [pooled[feature] for table in BAGS for feature in table.features]
        losses = [(batch.counts[:, None] * block**2).sum() for block in blocks]
        return sum(losses) + (rows**2).sum(), [*blocks, rows]


class Training:
    """A sharded model, and the batches of this rank: each sets where it is as it comes from the iterator."""

    def __init__(self, kind):
        import torch.distributed as dist
        from torchrec.streamable import Pipelineable

        from embeddings.sharding import ModelTables
        from trainer.distributed.sharded_model import PlanRequest, TableSettings, shard_model

        @dataclasses.dataclass
        class Batch(Pipelineable):
            features: object
            counts: torch.Tensor

            def to(self, device, non_blocking=False):
                return self

            def record_stream(self, stream):
                raise AssertionError("there is no stream on the CPU")

        settings = TableSettings.of(
            BAGS + TEXTS, AdamAR(0.05, alpha=1e-3), SSE, seed=5, backend="reference", dtype=torch.float64
        )
        self.model = shard_model(Model(), settings, PlanRequest({table.name: kind for table in BAGS + TEXTS})).parallel
        self.tables = ModelTables(self.model.module)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.completed, self._batch = 0, Batch

    def batches(self, bad_step=None, late=False):
        for step in range(self.completed + 1, NUM_STEPS + 1):
            features, start = features_of(step, self.rank, self.world_size), bounds(step, self.world_size)[self.rank]
            if step == bad_step and self.rank == self.world_size - 1:
                features.values()[-1] = 99
            if not late:
                self.tables.set_context(step, start)
            yield self._batch(features, torch.arange(start, start + features.stride()) + 1.0)

    def zero_grad(self):
        pass

    def step(self):
        self.completed += 1
        self.tables.step(self.completed)

    def pipeline(self, **keywords):
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

        return TrainPipelineSparseDist(self.model, self, torch.device("cpu"), **keywords)

    def rows(self):
        """Rows and state that this rank holds."""
        found = {}
        for piece in self.tables.local_pieces():
            for what, value in {"weight": piece.tables.weight(piece.name), **piece.tables.state(piece.name)}.items():
                found[f"{piece.name}, {what} from {piece.row_start}"] = value.clone()
        return found


def plain(training):
    for batch in training.batches():
        loss, looked_up = training.model(batch)
        loss.backward()
        training.step()
        yield looked_up


def pipelined(training, **keywords):
    pipeline, batches = training.pipeline(**keywords), training.batches()
    with contextlib.suppress(StopIteration):
        while True:
            yield pipeline.progress(batches)
    pipeline.detach()


def clearing_inputs(training):
    from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

    before = PipelinedForward._use_main_stream_for_dist_init
    try:
        yield from pipelined(training, clear_data_dist_inputs=True)
    finally:
        PipelinedForward._use_main_stream_for_dist_init = before


def train(kind, way, by_network):
    """What each step looked up, then rows and state in the end."""
    from tests.support.by_network import exchanges_by_network

    training = Training(kind)
    with exchanges_by_network() if by_network else contextlib.nullcontext():
        found = {}
        for step, blocks in enumerate(way(training), 1):
            found |= {f"block {number} of step {step}": block.detach() for number, block in enumerate(blocks)}
    return found | training.rows()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "by_network"), [(1, False), (2, False), (2, True)])
def test_the_pipeline_trains_to_the_bits_of_steps_without_it(ranks, kind, world_size, by_network):
    wanted = ranks(world_size).run(train, kind, plain, by_network)
    for mine, theirs in zip(ranks(world_size).run(train, kind, pipelined, by_network), wanted, strict=True):
        assert mine.keys() == theirs.keys()
        assert f"block 3 of step {NUM_STEPS}" in mine
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_a_pipeline_that_frees_what_was_sent_trains_to_the_same_bits(ranks):
    found, wanted = (ranks(2).run(train, "row_wise", way, False) for way in (clearing_inputs, plain))
    for mine, theirs in zip(found, wanted, strict=True):
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


def shared_exchanges(kind):
    """How often ids went through memory that ranks share, in the pipeline and without."""
    from embeddings.sharding.exchange.shm_transport import HostMemory

    exchange, names = HostMemory.exchange, []
    HostMemory.exchange = lambda shared, what, *parts: names.append(what) or exchange(shared, what, *parts)
    try:
        counts = []
        for way in (plain, pipelined):
            names.clear()
            train(kind, way, False)
            counts.append(names.count("ids"))
        return counts
    finally:
        HostMemory.exchange = exchange


def test_ids_go_through_shared_memory_in_the_pipeline_too(ranks):
    assert ranks(2).run(shared_exchanges, "row_wise") == [[2 * NUM_STEPS, 2 * NUM_STEPS]] * 2


def go_on_after_bad_input(kind, by_network):
    """(the error of step 4, whose last rank has a bad id, and whether the steps after it ended as without it)."""
    from tests.support.by_network import exchanges_by_network

    with exchanges_by_network() if by_network else contextlib.nullcontext():
        training = Training(kind)
        pipeline, batches = training.pipeline(), training.batches(bad_step=4)
        for _ in range(3):
            pipeline.progress(batches)
        try:
            pipeline.progress(batches)
            told = "went on"
        except (ValueError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
        # What was under way is dropped, and comes again.
        pipeline.reset()
        batches = training.batches()
        with contextlib.suppress(StopIteration):
            while True:
                pipeline.progress(batches)
        found, wanted = training.rows(), train(kind, plain, by_network)
        return told, [name for name, value in found.items() if not torch.equal(value, wanted[name])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "by_network"), [(1, False), (2, False), (2, True)])
def test_a_bad_id_in_the_pipeline_is_named_and_no_rank_waits(ranks, kind, world_size, by_network):
    *others, (told, differ) = ranks(world_size).run(go_on_after_bad_input, kind, by_network)
    assert told.startswith("ValueError: feature 'text': id 99 is not a row of table 'word', which has 31 rows")
    assert differ == []
    for told, differ in others:
        assert told.startswith("OtherRankFailed: rank 1 refused its input, so no rank goes on")
        assert differ == []


def set_late(kind, where):
    """The error of a pipeline whose batches' places are set nowhere, or before each call of it."""
    training = Training(kind)
    pipeline, batches = training.pipeline(), training.batches(late=True)
    try:
        for step in range(1, 4):
            if where == "before progress":
                training.tables.set_context(step, bounds(step, training.world_size)[training.rank])
            pipeline.progress(batches)
    except ValueError as error:
        return training.completed, str(error)
    return training.completed, "went on"


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_is_not_the_batchs_is_refused(ranks, kind):
    for completed, told in ranks(2).run(set_late, kind, "nowhere"):
        assert completed == 0
        assert told.startswith("SSE draws by step and sample, and these are not set: call set_context")
    # A rank without a table has no steps to compare, and would wait for the others.
    if kind != "table_wise":
        for completed, told in ranks(2).run(set_late, kind, "before progress"):
            assert completed == 1
            assert told.startswith("a batch distributed for step 1 does not follow 1 completed steps: call set_context")
