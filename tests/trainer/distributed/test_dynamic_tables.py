"""Jobs whose tables grow: as ones that know all ids, on ranks, resumed, warm-started, predicted, exported, refused."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from benchmarks.support.gathered import gather_table
from embeddings.store import open_store
from tests.support import forked
from tests.support.trained_runs import lead, run_of
from tests.trainer.trainings import trainer_of
from trainer.checkpoint import format as checkpoint_format
from trainer.checkpoint.format import CheckpointError, latest_valid
from trainer.checkpoint.record import Position
from trainer.checkpoint.warm_start import id_maps, rows_of_parent
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed import materialize
from trainer.distributed.build import build
from trainer.distributed.dynamic_tables import DynamicRows, states, taken_rows
from trainer.generalization.trainings import comparable
from trainer.inference.export import export
from trainer.inference.exported_model import Exported
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.publishing.publish import item_vectors
from trainer.sizing.estimate import estimate
from trainer.sizing.memory import COUNTERS_PER_ROW_BYTES, MAP_ROW_BYTES, rank_memory
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.training.hooks import Resumed

# Whole jobs.
pytestmark = pytest.mark.slow

NUM_ROWS = 3000
TIGHT = {"capacity": 40, "admission_threshold": 2, "ttl_steps": 9}


def write_rows(path, first_item=0, seed=0):
    """Items come and go with time: at any one about sixty of them; three recent ones of each row in a list."""
    rng = np.random.default_rng(seed)
    position = np.arange(NUM_ROWS)
    item = first_item + position // 25 + (rng.random(NUM_ROWS) ** 2 * 60).astype(np.int64)
    recent = [[f"i{one}" for one in item[max(0, i - rng.integers(0, 4)) : i]] for i in range(NUM_ROWS)]
    rows = {
        "user": rng.integers(0, 60, NUM_ROWS), "item": [f"i{one}" for one in item], "recent": pa.array(recent),
        "pos": position, "click": (rng.random(NUM_ROWS) < np.array([0.1, 0.4, 0.9])[item % 3]).astype(np.int64),
    }  # fmt: skip
    pq.write_table(pa.table(rows), path)
    return path


def dataset_of(path):
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "recent": {"type": "id_list", "shares": "item"}}
    return parse_dataset(
        {"name": "log", "uri": str(path), "features": features, "label": {"column": "click"}, "order": "pos"}
    )


def job_of(tables=None, **changes):
    document = {
        "name": "growing", "dataset": {"name": "log"}, "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8]},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.05, "alpha": 0.001},
        "dense_optimizer": {"learning_rate": 0.02}, "epochs": 2, "batch_size": 96,
        "evaluation": {"split": {"kind": "time", "validation": 0.1, "test": 0.1}},
        "tables": {"item": TIGHT} if tables is None else tables,
    }  # fmt: skip
    return parse_job(document | changes)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return dataset_of(write_rows(tmp_path_factory.mktemp("log") / "rows.parquet"))


def by_id(data, trainer, decay=True):
    """What each item that has a row has in it."""
    table = gather_table(trainer.sharded, "item", decay)
    if table is None:
        return None
    if "item" not in trainer.dynamic_rows.ids:
        return dict(zip(data.vocabulary("item").to_pylist(), table.rows[2:], strict=True))
    names = dict(
        zip(data.row_keys("item").view(np.int64)[2:].tolist(), data.vocabulary("item").to_pylist(), strict=True)
    )
    entries, raw = trainer.dynamic_rows.ids["item"].ids()
    return {names[one]: table.rows[2 + entry] for one, entry in zip(raw.tolist(), entries.tolist(), strict=True)}


@pytest.mark.parametrize("init", ["zero", "hash"])
def test_with_room_for_all_it_trains_as_one_that_knows_all_ids(log, tmp_path, init):
    """The same bits of every row, for every item. With init hash that of unknown ids starts otherwise."""
    model = {"kind": "dnn", "embedding_dim": 4, "hidden": [8], "init": {"kind": init}}
    found = {}
    for name, tables in (("known", {}), ("growing", {"item": {"capacity": 500}})):
        job = job_of(tables, model=model, epochs=1)
        data = prepare(log, job, tmp_path / name)
        with single_rank_group():
            trainer = trainer_of(job, data)
            trainer.train()
            found[name] = by_id(data, trainer), trainer.history
    rows, known = found["growing"][0], found["known"][0]
    assert len(rows) == data.tables["item"].num_rows - 2 > 100
    assert all(torch.equal(rows[name], known[name]) for name in rows)
    if init == "zero":
        assert found["growing"][1] == found["known"][1]
        assert found["known"][1][-1]["auc"] > 0.55


def train_on_ranks(directory, job, num_steps):
    data = PreparedData.open(directory)
    trainer = trainer_of(job, data, backend="reference", dtype=torch.float64)
    trainer.sharded.train()
    for parts, _ in zip(trainer.batches(), range(num_steps), strict=False):
        trainer.train_step(parts)
    rows, metrics = by_id(data, trainer), trainer.evaluate("test")
    state = trainer.dynamic_rows.ids["item"].state()
    return (rows, metrics, state) if dist.get_rank() == 0 else state


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise", "data_parallel"])
def test_two_ranks_give_the_same_ids_the_same_rows(log, ranks, tmp_path, sharding):
    """Also with micro-batches, whose ids belong to one step, and with SSE."""
    sse = {"item": {"probability": 0.2}, "recent": {"probability": 0.1}}
    job = job_of(sse=sse)
    data = prepare(log, job, tmp_path / "data")
    with single_rank_group():
        expected, metrics, state = train_on_ranks(data.directory, job, data.steps_per_epoch + 3)
    split = job_of(sharding={"item": sharding}, micro_batches=2, sse=sse)
    (found, scored, mine), other = ranks(2).run(train_on_ranks, data.directory, split, data.steps_per_epoch + 3)
    for name, value in state.items():
        assert np.array_equal(value, mine[name]), name
        assert np.array_equal(value, other[name]), name
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for name, value in expected.items():
        # float64 sums in another order, over some steps of AdamAR.
        assert float((found[name] - value).abs().max()) < 1e-7, name
    assert scored == pytest.approx(metrics, rel=1e-6)
    # Ids went, and others came in their place.
    assert int(state["numbers"][0]) == 40 < data.tables["item"].num_rows


def test_sse_swaps_for_every_id_that_has_a_row_and_for_no_other(log, tmp_path):
    """A chi-square test of equation 5 over the ids that have a row; the others, unknown, are not swapped."""
    probability = 0.5
    job = job_of({"item": {"capacity": 30, "eviction_policy": "refuse"}}, sse={"item": {"probability": probability}})
    plain = job_of({"item": {"capacity": 30, "eviction_policy": "refuse"}})
    data = prepare(log, job, tmp_path / "data")
    with single_rank_group():
        swapping, other = trainer_of(job, data).dynamic_rows, trainer_of(plain, data).dynamic_rows
        trainer = trainer_of(plain, data)
        counts, hits, total = np.zeros(32), 0, 0
        for step, parts in zip(range(1, data.steps_per_epoch + 1), trainer.batches(), strict=False):
            (swapped,), (known,) = swapping.admit(parts, step - 1, step), other.admit(parts, step - 1, step)
            if step > 4:
                rows, before = (one.features["item"].values().numpy() for one in (swapped, known))
                changed = rows != before
                assert not changed[before == 1].any()
                assert torch.equal(swapped.features["recent"].values(), known.features["recent"].values())
                counts += np.bincount(rows[changed], minlength=32)
                hits, total = hits + int(changed.sum()), total + int((before > 1).sum())
    assert total > 500
    assert abs(hits / total - probability) < 5 * (probability * (1 - probability) / total) ** 0.5
    assert not counts[:2].any()
    # Each of the other 29 equally often, whichever id is swapped; 29 degrees of freedom, five standard deviations.
    expected = hits / 30
    assert ((counts[2:] - expected) ** 2 / expected).sum() < 29 + 5 * 58**0.5


def test_stopping_and_resuming_changes_no_bit(log, tmp_path):
    """In the middle of an epoch, after rows changed hands; with the checkpoint of a run, and of its dynamic tables."""
    job = job_of()
    data = prepare(log, job, tmp_path / "data")

    def train(folder, stops):
        position, history = None, []
        for stop in [*stops, None]:
            trainer = trainer_of(job, data, resumed=position and Resumed(position, history))
            newest = latest_valid(folder)
            if newest is not None:
                trainer.sharded.load_from(newest, dense_optimizer=trainer.dense_optimizer)
                trainer.dynamic_rows.load(newest)
            if stop is None:
                trainer.train()
                return by_id(data, trainer), trainer.history, trainer.dynamic_rows.ids["item"].state()
            trainer.sharded.train()
            for parts in trainer.batches():
                trainer.train_step(parts)
                trainer.evaluate_if_due()
                if trainer.position.step == stop:
                    break
            attached = trainer.dynamic_rows.write(folder / "scratch")
            trainer.sharded.save(
                folder, dense_optimizer=trainer.dense_optimizer, extra={}, keep_last=1, attached=attached
            )
            position, history = Position(**asdict(trainer.position)), trainer.history
        raise AssertionError

    with single_rank_group():
        whole, parts = train(tmp_path / "whole", []), train(tmp_path / "parts", [7, data.steps_per_epoch + 4])
    assert whole[1] == parts[1]
    assert whole[0].keys() == parts[0].keys()
    assert all(torch.equal(whole[0][name], parts[0][name]) for name in whole[0])
    assert all(np.array_equal(whole[2][name], parts[2][name]) for name in whole[2])


@pytest.fixture(scope="module")
def run(log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    job = job_of({"item": TIGHT, "user": {"capacity": 70}}, checkpoint={"every_steps": 7, "keep_last": 20})
    run = run_of(folder, "run", job, log)
    assert execute(run, start_ranks) == 0
    return run


def logits_of(run, split):
    """By the sharded model that trained, with the rows as they lie."""
    data, newest = PreparedData.open(run.data), latest_valid(run.checkpoints)
    with single_rank_group(), torch.no_grad():
        sharded = build(run.job, data, alpha=newest.extra["alpha"]).eval()
        sharded.load_from(newest)
        growing = DynamicRows(run.job, data, sharded)
        growing.load(newest)
        batches = map(growing.known, data.eval_batches(split))
        return torch.cat([sharded.module.evaluate(batch)[0] for batch in batches]).numpy()


def test_a_run_says_how_full_its_tables_are_and_its_scores_are_those_of_predict_and_export(run, small, tmp_path):
    said = [event["message"] for event in small.events(run.directory, "info")]
    (line,) = (one for one in said if one.startswith("after epoch 2: item: "))
    assert " of 40 rows taken, " in line
    assert line.endswith(" occurrences found none free; user: 60 of 70 rows taken")
    rows = pq.read_table(run.dataset.uri)
    test = rows.slice(NUM_ROWS - 300, 300)
    logits = logits_of(run, "test")
    predictor = Predictor(run.directory)
    np.testing.assert_allclose(predictor.predict(test)["logit"].to_numpy(), logits, rtol=1e-5, atol=1e-6)
    ids = {name: one.ids.to_pylist() for name, one in id_maps(latest_valid(run.checkpoints)).items()}
    assert len(ids["item"]) == len(set(ids["item"])) == int(line.split()[4])
    assert len(predictor.tables.weight("item")) == len(ids["item"]) + 2
    export(run.directory, tmp_path / "export")
    found = Exported(tmp_path / "export").predict(test)
    np.testing.assert_allclose(found["logit"].to_numpy(), logits, rtol=1e-4, atol=1e-5)


def test_checkpoints_have_the_ids_of_their_step(log, tmp_path, monkeypatch):
    """Though the run goes on while they are written, slowly."""
    attach = checkpoint_format._attach

    def slowly(*arguments):
        time.sleep(0.1)
        return attach(*arguments)

    monkeypatch.setattr(checkpoint_format, "_attach", slowly)
    run = run_of(tmp_path, "run", job_of(checkpoint={"every_steps": 7, "keep_last": 20}, epochs=1), log)
    assert execute(run, start_ranks) == 0
    found = {}
    for path in checkpoint_format.checkpoints_in(run.checkpoints):
        one = checkpoint_format.Checkpoint(path)
        found[one.step] = int(states(one, ["item"])["item"]["numbers"][-1])
        assert len(id_maps(one)["item"].ids) == len(taken_rows(one, "item")) - 2
    assert all(step == of for step, of in found.items())
    assert len(found) == 4


def test_tables_are_read_a_chunk_at_a_time(run, monkeypatch):
    whole = Predictor(run.directory).tables.weight("item").clone()
    monkeypatch.setattr(materialize, "CHUNK_ROWS", 7)
    assert torch.equal(Predictor(run.directory).tables.weight("item"), whole)
    assert bool((whole[2:] != 0).any(dim=1).all())


@pytest.mark.process
def test_a_killed_run_goes_on_with_the_same_bits(log, tmp_path):
    """The whole way: kill -9 while it trains and a checkpoint is written now and then, and led again."""
    settings = {"checkpoint": {"every_steps": 7}}
    run = run_of(tmp_path, "killed", job_of(epochs=1000, **settings), log)
    process = forked.start(lead, run.directory, log=tmp_path / "log.txt")
    while len(checkpoint_format.checkpoints_in(run.checkpoints)) < 3:
        assert process.exitcode is None, (tmp_path / "log.txt").read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    kept = latest_valid(run.checkpoints).step
    epochs = kept // PreparedData.open(run.data).steps_per_epoch + 2
    found = []
    for name, attempt in (("killed", 2), ("whole", 1)):
        run = run_of(tmp_path, name, job_of(epochs=epochs, **settings), log, attempt=attempt)
        assert execute(run, start_ranks) == 0
        newest = latest_valid(run.checkpoints)
        found.append((Predictor(run.directory).tables.weight("item"), states(newest, ["item"])["item"], newest.step))
    (rows, state, step), (expected, wanted, same) = found
    assert step == same > kept
    assert torch.equal(rows, expected)
    assert all(np.array_equal(state[name], wanted[name]) for name in wanted)


def test_a_warm_start_goes_on_with_ids_rows_and_steps(run, small, tmp_path):
    rows = dataset_of(write_rows(tmp_path / "next.parquet", first_item=NUM_ROWS // 25, seed=1))
    job = run.job.model_copy(update={"name": "next", "epochs": 1})
    after = run_of(tmp_path, "next", job, rows, init_checkpoint=str(run.checkpoints))
    assert execute(after, start_ranks) == 0, small.events(after.directory, "error")
    before, now = latest_valid(run.checkpoints), latest_valid(after.checkpoints)
    data = PreparedData.open(after.data)
    with single_rank_group():
        sharded = build(job, data, alpha=before.extra["alpha"])
        maps = []
        for one in (before, now):
            growing = DynamicRows(job, data, sharded)
            growing.load(one)
            maps.append(growing.ids["user"])
        # What the child begins with is the parent's, row by row.
        first = []
        for parent_rows in (None, rows_of_parent(job, data)):
            begun = build(job, data, alpha=before.extra["alpha"])
            begun.load_from(before, parent_rows=parent_rows)
            first.append(gather_table(begun, "item").rows)
        assert torch.equal(*first)
        assert first[0].any()
    assert maps[1].step == maps[0].step + data.steps_per_epoch == int(now.extra["completed_steps"])
    # Nobody's row moved who was not too long without an example.
    assert all(map(np.array_equal, maps[0].ids(), maps[1].ids()))
    assert len(maps[0]) == 60
    other = run_of(
        tmp_path, "other", job_of({"item": {**TIGHT, "capacity": 60}, "user": {"capacity": 70}}, epochs=1), rows,
        init_checkpoint=str(run.checkpoints),
    )  # fmt: skip
    assert execute(other, start_ranks) != 0
    message = small.events(other.directory, "error")[-1]["message"]
    assert "tables.item.capacity: the parent's table has capacity 40, the job asks for 60" in message


def test_items_that_lost_their_rows_are_not_served_any_more(small, tmp_path):
    """Three days of a two-tower, of which the second publishes nothing: what is served are the items that have a row,
    with what is in it; who lost it on either day leaves, and who is new comes."""
    store = open_store(str(tmp_path / "store"))
    model = {"kind": "two_tower", "embedding_dim": 4, "hidden": [8], "init": {"kind": "hash", "std": 0.1}}
    gate = {"mode": "off"}
    settings = {
        "model": model, "epochs": 1, "publish": {"collection": "items", "feature": "item", "views": [], "gate": gate},
    }  # fmt: skip
    served, runs = [], []
    for day in range(3):
        path = tmp_path / f"day-{day}.parquet"
        rows = pq.read_table(write_rows(path, first_item=60 * day, seed=day))
        pq.write_table(rows.drop_columns(["recent"]), path)
        dataset = dataset_of(path).model_dump(mode="json")
        del dataset["features"]["recent"]
        changes = {} if day != 1 else {"publish": None}
        job = job_of({"item": {"capacity": 90, "ttl_steps": 16}}, **{**settings, **changes})
        places = {"init_checkpoint": str(runs[-1].checkpoints)} if runs else {}
        if day == 2:
            places["parent_version"] = store.collection("items").current()
        run = run_of(tmp_path, f"day-{day}", job, parse_dataset(dataset), **places)
        assert execute(run, start_ranks) == 0, small.events(run.directory, "error")
        runs.append(run)
        newest = latest_valid(run.checkpoints)
        ids = id_maps(newest)["item"]
        if day == 1:
            continue
        found = item_vectors(run, newest)
        predictor = Predictor(run.directory)
        order = np.argsort(np.array(ids.ids.to_pylist()), kind="stable")
        norms = predictor.tables.weight("item")[2:].norm(dim=1).numpy()[order]
        np.testing.assert_allclose(found.norms, norms, rtol=1e-5, atol=1e-7)
        assert found.arrow_ids().to_pylist() == sorted(ids.ids.to_pylist())
        # As often as they occur in this day's training rows.
        times = Counter(read_training_items(run))
        assert found.counts.tolist() == [times[name] for name in sorted(ids.ids.to_pylist())]
        served.append(set(store.collection("items").open().ids.to_pylist()))
        assert served[-1] <= set(ids.ids.to_pylist())
    assert len(served[0] - served[1]) > 20 < len(served[1] - served[0])
    lost = {name for run in runs for name in id_maps(latest_valid(run.checkpoints))["item"].retired.to_pylist()}
    assert lost >= served[0] - served[1]


def read_training_items(run):
    data = PreparedData.open(run.data)
    key = next(key for key in data.keys if key.name == "item")
    return data.vocabulary("item").take(pa.array(data.column("train", key) - 2)).to_pylist()


def test_the_best_epoch_comes_back_with_its_ids(log, small, tmp_path):
    """Epochs after the first only harm: a learning rate that destroys what was learned."""
    stopping = {"early_stopping": {"patience": 1, "keep": "best"}}
    optimizer = {"kind": "adam_ar", "learning_rate": 0.05, "alpha": 0.001}
    optimizer["schedule"] = {"kind": "step", "every_steps": 100, "gamma": 1.0}
    run = run_of(tmp_path, "run", job_of(epochs=6, regularizers=stopping, optimizer=optimizer), log)
    assert execute(run, start_ranks) == 0, small.events(run.directory, "error")
    best = max(small.metrics(run.directory, "validation"), key=lambda metric: metric["auc"])
    logits = logits_of(run, "validation")
    labels = PreparedData.open(run.data).labels("validation")
    order = np.argsort(np.argsort(logits, kind="stable"))
    positives = int(labels.sum())
    auc = (order[labels == 1].sum() - positives * (positives - 1) / 2) / (positives * (len(labels) - positives))
    assert auc == pytest.approx(best["auc"], abs=0.01)  # ties


def test_a_checkpoint_of_tables_that_did_not_grow_is_refused(log, tmp_path):
    job = job_of({})
    run = run_of(tmp_path, "run", job, log)
    assert execute(run, start_ranks) == 0
    with single_rank_group():
        growing = DynamicRows(job_of(), PreparedData.open(run.data), None)
        with pytest.raises(CheckpointError, match="table 'item' was not dynamic when it was written"):
            growing.load(latest_valid(run.checkpoints))


def test_memory_is_that_of_the_rows_there_can_be(log):
    counted, ids = {"item": 10_000_000, "user": 100}, {"item": 1.0, "user": 1.0}
    known = rank_memory(job_of({}), counted, ids)
    grown = rank_memory(job_of({"item": {"capacity": 100_000}}), counted, ids)
    assert grown.by_table["item"].rows == 100_002
    assert grown.ids == 100_000 * MAP_ROW_BYTES + 8 * 10_000_000
    assert known.ids == 0
    assert known.total - grown.total > 500 << 20
    counting = rank_memory(job_of({"item": {"capacity": 100_000, "admission_threshold": 2}}), counted, ids)
    assert counting.ids - grown.ids == 100_000 * COUNTERS_PER_ROW_BYTES
    found = estimate(job_of(), log)
    assert found["tables"]["item"]["rows"] == 42
    assert any("owner of each row" in line for line in found["arithmetic"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": {"item": {"ttl_steps": 5}}}, "ttl_steps is for dynamic tables: set capacity"),
        ({"tables": {"item": {"admission_threshold": 2}}}, "admission_threshold is for dynamic tables: set capacity"),
        ({"tables": {"item": {"capacity": 0}}}, "greater than or equal to 1"),
        (
            {"model": {"kind": "bpr", "loss": "bpr", "embedding_dim": 4}},
            "tables.item.capacity: tables of bpr are not dynamic yet",
        ),
        (
            {"model": {"kind": "dnn", "embedding_dim": 4, "init": {"kind": "normal"}}},
            "its initial values must depend on the id: use model.init hash or zero",
        ),
        (
            {"model": {"kind": "two_tower", "embedding_dim": 4, "loss": "sampled_softmax"}},
            "sampled_softmax weighs items by how often their row occurs",
        ),
        (
            {"model": {"kind": "two_tower", "embedding_dim": 4}, "evaluation": {"metrics": ["recall_20_full"]}},
            "items that share a row cannot be ranked yet",
        ),
        (
            {
                "model": {"kind": "two_tower", "embedding_dim": 4},
                "publish": {"collection": "items", "feature": "item", "anchor": {"strength": 0.1}},
            },
            "publish.anchor and publish.frozen_context need rows that keep their ids",
        ),
        ({"regularizers": {"meda": True}}, "regularizers.meda resets rows, not which ids have them"),
        (
            {"init_from": {"collection": "items", "retire_after_runs": 2}},
            "dynamic tables retire ids by ttl_steps: leave init_from.retire_after_runs out",
        ),
        ({"evaluation": {"metrics": ["auc", "frequency_buckets"]}}, "frequency_buckets needs a row for each item"),
        ({"sse": {"recent": {"probability": 0.1, "graph": "alike"}}}, "sse.recent.graph: table 'item' is dynamic"),
        ({"sse": {"recent": {"include_unknown": True}}}, "sse.recent.include_unknown: table 'item' is dynamic"),
    ],
)
def test_what_has_no_meaning_is_refused(log, changes, message):
    with pytest.raises((SpecError, ValueError), match=message):
        job_of(**changes).against(log)


def test_the_generalization_report_is_of_known_ids(log):
    with pytest.raises(SpecError, match=r"tables.item.capacity: the report compares rows of known ids"):
        comparable(log, job_of())
