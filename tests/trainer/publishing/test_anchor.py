"""publish.anchor: rows of items are drawn to where consumers know them, in the job's own basis, and no others are."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.refresh.settings import Gate, Settings
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors, unit_rows
from trainer.checkpoint.format import latest_valid
from trainer.data.batches.keys import keys_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.launch.worker import use_threads
from trainer.publishing.anchor import ANCHOR_FILE, AnchorPenalty, _anchored, write_targets
from trainer.publishing.publish import item_vectors
from trainer.runs.directory import read_run
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.publish import Anchor
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

DIM = 4
BPR = {"kind": "bpr", "loss": "bpr", "embedding_dim": DIM, "init": {"kind": "hash", "std": 0.3}}
ADAM = {"kind": "adam", "learning_rate": 0.1}
FREE = {"collection": "items", "feature": "item", "ema": None, "gate": {"mode": "off"}}
ANCHORED = FREE | {"anchor": {"strength": 3.0}}
JOB: dict[str, Any] = {"model": BPR, "optimizer": ADAM, "sse": {}, "batch_size": 100}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    use_threads(1)


# --- the penalty -----------------------------------------------------------------------------------------------------

NUM_ROWS = 6
# Rows 0 and 1 are padding and unknown; row 4 is an item that the version has not.
TARGETS = np.random.default_rng(0).standard_normal((NUM_ROWS, DIM)).astype(np.float32)
TARGETS[[0, 1, 4]] = 0.0
LISTS = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=3), min_size=1, max_size=4)


def penalty_by_loops(table, ids_of_samples, strength):
    found = []
    for ids in ids_of_samples:
        total = 0.0 * table.sum()  # also without a term it is a function of the table
        for number in ids:
            if TARGETS[number].any():
                total = total + ((table[number, :DIM] - torch.from_numpy(TARGETS[number])) ** 2).sum()
        found.append(strength * total)
    return torch.stack(found)


def compare(penalty: torch.Tensor, plain: torch.Tensor, table: torch.Tensor) -> None:
    torch.testing.assert_close(penalty, plain)
    ours, theirs = (torch.autograd.grad(one.sum() + 0.0 * table.sum(), table)[0] for one in (penalty, plain))
    torch.testing.assert_close(ours, theirs)
    assert not ours[[0, 1, 4]].any()
    assert not ours[:, DIM:].any()


@given(LISTS, st.floats(0.01, 10))
def test_a_sequence_pays_for_each_of_its_items_that_the_version_has(samples, strength):
    table = torch.randn(NUM_ROWS, 2 * DIM, requires_grad=True)
    values = torch.tensor([number for ids in samples for number in ids], dtype=torch.int64)
    lengths = torch.tensor([len(ids) for ids in samples])
    # Targets and negatives of a sequence are looked up for what stands beside the vector.
    keys = ["item", "item__target", "item__negative"]
    features = KeyedJaggedTensor(keys, values.repeat(3), lengths=lengths.repeat(3))
    rows = SimpleNamespace(looked_up=lambda asked: {key: JaggedTensor(table[values], lengths=lengths) for key in keys})
    penalty = AnchorPenalty(Anchor(strength=strength), TARGETS, ["item"], DIM)
    compare(penalty(SimpleNamespace(features=features), rows), penalty_by_loops(table, samples, strength), table)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5), st.floats(0.01, 10))
def test_a_pair_pays_for_its_item_and_for_its_negative(pairs, strength):
    table = torch.randn(NUM_ROWS, DIM + 1, requires_grad=True)  # the last column is a bias, which is free
    both = torch.tensor(pairs)
    features = KeyedJaggedTensor(
        ["user", "item", "item__negative"],
        torch.cat([torch.zeros(len(both), dtype=torch.int64), both[:, 0], both[:, 1]]),
        lengths=torch.ones(3 * len(both), dtype=torch.int64),
    )
    blocks = torch.cat([torch.zeros(len(both), DIM), table[both[:, 0]], table[both[:, 1]]], dim=1)
    found = KeyedTensor(["user", "item", "item__negative"], [DIM, DIM + 1, DIM + 1], blocks)
    penalty = AnchorPenalty(Anchor(strength=strength), TARGETS, ["item", "item__negative"], DIM)
    rows = SimpleNamespace(looked_up=lambda asked: found)
    compare(penalty(SimpleNamespace(features=features), rows), penalty_by_loops(table, pairs, strength), table)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("dcnv2", ["item", "previous"]),
        ("din", ["item", "previous", "past"]),
        ("bpr", ["item", "previous", "past", "item__negative"]),
        ("sasrec", ["item"]),
    ],
)
def test_all_that_reads_the_table_is_anchored_but_pooled_lists(kind, names):
    """din and sasrec look up each row of a list by itself."""
    item = {"type": "id"}
    features = {"user": item, "item": item, "previous": item | {"shares": "item"}}
    features["past"] = {"type": "id_list", "shares": "item"} if kind != "bpr" else item | {"shares": "item"}
    document = {"name": "d", "uri": "rows.parquet", "features": features, "label": {"column": "y"}, "order": "time"}
    model = {"kind": kind, "embedding_dim": DIM, "init": {"kind": "hash", "std": 0.3}}
    job = parse_job({"name": "j", "dataset": {"name": "d"}, "model": model, "publish": ANCHORED})
    data = SimpleNamespace(keys=keys_of(parse_dataset(document), job))
    assert _anchored(job, data) == names


# --- what rows are drawn to ------------------------------------------------------------------------------------------


def published(run: Any, basis: np.ndarray | None = None) -> ItemVectors:
    """The run's rows, in another basis, as the first version of its collection."""
    found = item_vectors(run, latest_valid(run.checkpoints))
    turned = ItemVectors(
        found.keys,
        np.asarray(found.vectors) @ (np.eye(DIM, dtype=np.float32) if basis is None else basis),
        norms=found.norms,
        evidence=found.evidence,
        counts=found.counts,
    )
    store = open_store(run.store_url)
    off = Settings(align=False, ema=None, gate=Gate("off"))
    publish_candidate(store, "items", RefreshRequest(turned, off, parent_version=None, model="bpr"))
    return found


@pytest.fixture
def first(trained_run: Any) -> Any:
    return trained_run("first", **JOB, publish=FREE | {"collection": "elsewhere"}, epochs=1)


def test_targets_are_served_vectors_with_their_norms_in_the_basis_that_the_job_starts_in(
    make_run, first, small, tmp_path
):
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((DIM, DIM)))[0].astype(np.float32)
    own = published(first, basis)
    served = open_store(first.store_url).collection("items").open()
    version = served.version
    # Items from 40 on: some are new, some of the version's are gone.
    uri = small.write_rows(tmp_path / "others.parquet", seed=5, num_items=200)
    parents, compass = unit_rows(np.asarray(own.vectors))[0], {"frozen_context": {"items": "fresh"}}
    for name, parent, expected, held in (
        ("scratch", None, np.asarray(served.vectors), {}),
        ("warm", latest_valid(first.checkpoints), parents, {}),
        # Rows of items begin anew, but what they are trained against is the parent's: so is the basis.
        ("frozen_context", latest_valid(first.checkpoints), parents, compass),
    ):
        start = {} if parent is None else {"init_from": {"job": first.run_id}}
        run = make_run(name, uri=uri, **JOB, **start, publish=ANCHORED | held, parent_version=version)
        base = None if parent is None else {"item": first_ids(first, "item"), "user": first_ids(first, "user")}
        data = prepare(run.dataset, run.job, run.data, base_vocabulary=base)
        assert "anchored to" in write_targets(run, data, parent)
        targets = np.load(run.data / ANCHOR_FILE)
        rows = {id_: row for row, id_ in enumerate(served.ids.to_pylist())}
        wanted = np.zeros_like(targets)
        for number, id_ in enumerate(data.vocabulary("item").to_pylist(), 2):
            if id_ in rows:
                wanted[number] = expected[rows[id_]] * served.norms[rows[id_]]
        assert 0 < (~wanted.any(axis=1)).sum() - 2 < len(wanted) - 50  # some are new
        np.testing.assert_allclose(targets, wanted, atol=2e-6)


def first_ids(run: Any, table: str) -> Any:
    return PreparedData.open(run.data).id_map(table)


def mean_cosine(run: Any, version: Any) -> float:
    found = item_vectors(run, latest_valid(run.checkpoints))
    status, served = version.lookup(found.keys)
    return float(np.sum(unit_rows(np.asarray(found.vectors))[0] * unit_rows(served)[0], axis=1)[status > 0].mean())


def test_a_retrain_with_another_seed_stays_where_it_is_served_and_resumes_to_the_bit(make_run, first):
    published(first)
    version = open_store(first.store_url).collection("items").open()
    settings = {**JOB, "seed": 7, "parent_version": version.version}
    free = make_run("free", **settings, publish=FREE | {"collection": "elsewhere"})
    whole = make_run("whole", **settings, publish=ANCHORED)
    for run in (free, whole):
        assert execute(run, start_ranks) == 0
    assert mean_cosine(free, version) < 0.5
    assert mean_cosine(whole, version) > 0.9
    # A run that goes on is drawn to the same rows, also when nothing is left of the version.
    parts = make_run("parts", **settings, publish=ANCHORED, epochs=1)
    assert execute(parts, start_ranks) == 0
    shutil.rmtree(parts.store_url)
    parts = make_run("parts", **settings | {"parent_version": None}, publish=ANCHORED, epochs=2, attempt=2)
    assert execute(parts, start_ranks) == 0
    for table in ("item", "user"):
        ours, theirs = (latest_valid(run.checkpoints).read_rows(table)[0] for run in (parts, whole))
        assert torch.equal(ours, theirs)


def test_another_strength_is_another_job(make_run, first, small):
    published(first)
    settings = {**JOB, "parent_version": "v000001", "epochs": 1}
    run = make_run("run", **settings, publish=ANCHORED)
    assert execute(run, start_ranks) == 0
    stronger = ANCHORED | {"anchor": {"strength": 2.5}}
    run = make_run("run", **{**settings, "epochs": 2}, publish=stronger, attempt=2)
    assert execute(run, start_ranks) != 0
    assert "another publish.anchor" in small.events(run.directory, "error")[-1]["message"]


def trained(directory: str, number: int) -> list[tuple[str, int, torch.Tensor]]:
    """After so many steps, in float64 by plain torch: what this rank holds."""
    use_threads(1)
    run = read_run(directory)
    data = PreparedData.open(run.data)
    sharded = build(run.job, data, alpha=None, backend="reference", dtype=torch.float64)
    trainer = Trainer(run.job, data, sharded, dense_optimizer(run.job, sharded))
    sharded.train()
    batches = trainer.batches()
    for _ in range(number):
        trainer.train_step(next(batches))
    batches.close()
    return [(piece.name, piece.row_start, piece.tables.read(piece.name)) for piece in sharded.local_pieces()]


def joined(of_ranks: list[Any]) -> dict[str, torch.Tensor]:
    pieces = sorted((piece for of_rank in of_ranks for piece in of_rank), key=lambda piece: piece[:2])
    return {name: torch.cat([rows for other, _, rows in pieces if other == name]) for name in ("item", "user")}


def test_two_ranks_are_drawn_to_where_one_is(make_run, first, ranks):
    published(first)
    run = make_run("one", **JOB, publish=ANCHORED, parent_version="v000001")
    write_targets(run, prepare(run.dataset, run.job, run.data), None)
    with single_rank_group():
        one = joined([trained(str(run.directory), 4)])
    split = {"resources": {"num_workers": 2}, "sharding": {"item": "row_wise", "user": "table_wise"}}
    make_run("one", **JOB, **split, publish=ANCHORED, parent_version="v000001", micro_batches=2)
    two = joined(ranks(2).run(trained, str(run.directory), 4))
    for name, rows in one.items():
        # float64 sums in another order, over some steps.
        torch.testing.assert_close(two[name], rows, rtol=1e-9, atol=1e-10)


# --- it follows ------------------------------------------------------------------------------------------------------

NUM_CLUSTERS, PER_CLUSTER = 6, 20
MOVED = np.array([0, 5, 12, 19])
ITEMS = np.arange(NUM_CLUSTERS * PER_CLUSTER)
HOMES = ITEMS // PER_CLUSTER


def clustered(path: Any, day: int) -> Any:
    """Users who take items of one cluster, head and tail of it. From day 1 on four of the first are of the second."""
    rng, place = np.random.default_rng(day), HOMES.copy()
    place[MOVED] = 1 if day else 0
    weights = (1.0 + ITEMS % PER_CLUSTER) ** -0.7
    users, items = [], []
    for user in range(120):
        chances = np.where(place == user % NUM_CLUSTERS, weights, 0.02 * weights)
        items += rng.choice(len(ITEMS), 18, replace=False, p=chances / chances.sum()).tolist()
        users += [user] * 18
    pq.write_table(pa.table({"user": users, "item": items, "click": np.ones(len(users), np.int64)}), path)
    return path


@pytest.mark.slow
def test_items_that_move_to_another_cluster_are_followed_and_the_others_stay(make_run, tmp_path):
    """Retrains from scratch, each with its own seed, through the whole stage. Measured beside it: without an anchor the
    others have a cosine of .86 to the day before, and with ten times the strength the moved ones stay behind (.2)."""
    job = {
        "model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 8, "init": {"kind": "hash", "std": 0.1}},
        "optimizer": {"kind": "adamw", "learning_rate": 0.03, "weight_decay": 0.05},
        "sse": {}, "epochs": 8, "batch_size": 128,
    }  # fmt: skip
    publish = {"collection": "items", "feature": "item", "gate": {"mode": "report"}}
    version, before, stays = None, None, np.setdiff1d(ITEMS, MOVED)
    for day in range(3):
        anchor = {"anchor": Anchor().model_dump()} if day else {}
        uri = clustered(tmp_path / f"{day}.parquet", day)
        run = make_run(f"day-{day}", uri=uri, **job, seed=day, parent_version=version, publish=publish | anchor)
        assert execute(run, start_ranks) == 0
        current = open_store(run.store_url).collection("items").open()
        version, served = current.version, unit_rows(current.lookup(ITEMS)[1])[0]
        if before is not None:
            assert np.sum(served[stays] * before[stays], axis=1).mean() > 0.95
        before = served
    centre = unit_rows(served[np.setdiff1d(np.flatnonzero(HOMES == 1), MOVED)].mean(axis=0, keepdims=True))[0]
    assert (served[MOVED] @ centre.T).mean() > 0.6


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sse", ["item", "label"])
def test_sse_of_the_items_is_refused(small, sse):
    with pytest.raises(SpecError, match=r"publish.anchor: sse would pull rows .* leave sse"):
        small.job(**JOB | {"sse": {sse: {"probability": 0.1}}}, publish=ANCHORED)
    small.job(**JOB | {"sse": {"user": {"probability": 0.1}}}, publish=ANCHORED)


def test_sse_of_what_else_reads_the_table_is_refused():
    """Swapped rows would be drawn to the targets of the ids that they stand for."""
    features = {"user": {}, "item": {}, "previous": {"shares": "item"}}
    dataset = parse_dataset({"name": "d", "uri": "rows.parquet", "features": features, "label": {"column": "y"}})
    document = {"name": "j", "dataset": {"name": "d"}, "model": {"kind": "dcnv2", "init": {"kind": "hash"}}}
    document |= {"publish": ANCHORED}
    parse_job(document | {"sse": {"user": {"probability": 0.1}, "previous": {"probability": 0.0}}}).against(dataset)
    with pytest.raises(ValueError, match=r"publish.anchor: sse of 'previous', which reads the table of 'item', would"):
        parse_job(document | {"sse": {"previous": {"probability": 0.1}}}).against(dataset)


def test_a_version_of_another_dim_is_refused(make_run, first):
    published(first)
    wider = JOB | {"model": BPR | {"embedding_dim": 2 * DIM}}
    run = make_run("wider", **wider, publish=ANCHORED, parent_version="v000001")
    with pytest.raises(ValueError, match=r"publish.anchor: .* has 4 coordinates, the job's rows 8: leave the anchor"):
        write_targets(run, prepare(run.dataset, run.job, run.data), None)


def test_without_a_version_there_is_nothing_to_be_drawn_to(make_run):
    run = make_run("first", **JOB, publish=ANCHORED)
    data = prepare(run.dataset, run.job, run.data)
    assert "no version yet" in write_targets(run, data, None)
    assert not (run.data / ANCHOR_FILE).exists()
