"""Jobs of one pass: the bits of a prepared one, on ranks, killed, with files that go bad; what uses them."""

from __future__ import annotations

import os
import signal

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
from trainer.checkpoint.format import latest_valid
from trainer.checkpoint.warm_start import id_maps
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import hashes_of
from trainer.data.one_pass import windows
from trainer.data.one_pass.data import OnePassData
from trainer.data.one_pass.position import Place
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.distributed.dynamic_tables import DynamicRows, states
from trainer.inference.export import export
from trainer.inference.exported_model import Exported
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.spec import parse_dataset, parse_job
from trainer.training.loop import Trainer

# Whole jobs.
pytestmark = pytest.mark.slow

NUM_FILES, FILE_ROWS = 10, 300


def write_rows(folder, seed=0, first_item=0):
    """Files of users (integers) and items (strings) that come and go with time."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for number in range(NUM_FILES):
        item = first_item + number * 12 + (rng.random(FILE_ROWS) ** 2 * 60).astype(np.int64)
        recent = [[f"i{one}" for one in item[max(0, i - rng.integers(0, 4)) : i]] for i in range(FILE_ROWS)]
        rows = {
            "user": pa.array(rng.integers(-30, 30, FILE_ROWS), mask=rng.random(FILE_ROWS) < 0.02),
            "item": [f"i{one}" for one in item], "recent": pa.array(recent, pa.list_(pa.string())),
            "side": np.full(FILE_ROWS, number == NUM_FILES - 1),
            "click": (rng.random(FILE_ROWS) < np.array([0.1, 0.4, 0.9])[item % 3]).astype(np.int64),
        }  # fmt: skip
        pq.write_table(pa.table(rows), folder / f"{number}.parquet")
    return folder


def dataset_of(path):
    features = {"user": {"type": "id"}, "item": {"type": "id"}, "recent": {"type": "id_list", "shares": "item"}}
    return parse_dataset({"name": "log", "uri": str(path), "features": features, "label": {"column": "click"}})


def job_of(one_pass=True, **changes):
    document = {
        "name": "one-pass", "dataset": {"name": "log", "one_pass": one_pass},
        "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8]},
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.05, "alpha": 0.001, "decay": "at_read"},
        "dense_optimizer": {"learning_rate": 0.02}, "batch_size": 32,
        "tables": {"item": {"capacity": 40, "admission_threshold": 2, "ttl_steps": 9}, "user": {"capacity": 50}},
    }  # fmt: skip
    return parse_job(document | changes)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return dataset_of(write_rows(tmp_path_factory.mktemp("log") / "rows"))


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(windows, "WINDOW_ROWS", 400)


def left_by(run):
    """Rows and ids of its last checkpoint, the step, and its metrics."""
    newest = latest_valid(run.checkpoints)
    tables = {name: newest.read_rows(name) for name in newest.tables}
    rows = {f"{name}.weight": weight for name, (weight, _) in tables.items()}
    rows |= {f"{name}.{key}": value for name, (_, state) in tables.items() for key, value in state.items()}
    maps = states(newest, newest.tables)
    ids = {f"{table}.{key}": value for table, state in maps.items() for key, value in state.items()}
    return rows | dict(newest.read_dense()), ids, newest.step, newest.extra["history"]


def assert_same_bits(found, expected):
    assert found[2:] == expected[2:]
    for ours, theirs, same in zip(found[:2], expected[:2], (torch.equal, np.array_equal), strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not same(ours[name], theirs[name])] == []


def test_where_one_window_holds_all_it_trains_as_a_prepared_job(log, tmp_path):
    """The same bits of every row, and the same metrics."""
    found = []
    for one_pass in (True, False):
        run = run_of(tmp_path, f"one-pass-{one_pass}", job_of(one_pass), log)
        assert execute(run, start_ranks) == 0
        found.append(left_by(run))
    assert_same_bits(*found)
    assert found[0][3][-1]["auc"] > 0.55
    # Ids went, and others came in their place.
    assert found[0][1]["item.numbers"][0] == 40


def train_on_ranks(directory, dataset, job, num_steps):
    windows.WINDOW_ROWS = 400
    data = OnePassData.of(directory, dataset, job)
    trainer = trainer_of(job, data, backend="reference", dtype=torch.float64)
    trainer.sharded.train()
    for parts, _ in zip(trainer.batches(), range(num_steps), strict=False):
        trainer.train_step(parts)
    rows = {name: gather_table(trainer.sharded, name) for name in data.tables}
    metrics = trainer.evaluate("test")
    state = {name: ids.state() for name, ids in trainer.dynamic_rows.ids.items()}
    place = trainer.position.place
    if dist.get_rank() == 0:
        return {name: one.rows for name, one in rows.items()}, metrics, state, place
    return state, place


def test_two_ranks_give_the_same_ids_the_same_rows(log, ranks, tmp_path, small_windows):
    """Also with micro-batches and SSE, over windows; the metrics are of all held-out rows."""
    sse = {"item": {"probability": 0.2}, "recent": {"probability": 0.1}}
    job = job_of(sse=sse, batch_size=80)
    directory = prepare(log, job, tmp_path / "data").directory
    with single_rank_group():
        expected, metrics, state, place = train_on_ranks(directory, log, job, 10_000)
    assert place["is_end"]
    assert metrics["examples"] == place["examples"][2]
    split = job_of(sse=sse, batch_size=80, micro_batches=2, sharding={"item": "row_wise", "user": "column_wise"})
    (found, scored, mine, there), (other, also) = ranks(2).run(train_on_ranks, directory, log, split, 10_000)
    assert place == there == also
    for table, of_table in state.items():
        for name, value in of_table.items():
            assert np.array_equal(value, mine[table][name]), name
            assert np.array_equal(value, other[table][name]), name
    for name, value in expected.items():
        # float64 sums in another order, over some steps of AdamAR.
        assert float((found[name] - value).abs().max()) < 1e-7, name
    assert scored == pytest.approx(metrics, rel=1e-6)


def lead_and_die(directory, step):
    """The run with small windows, until it has taken so many steps, which kills the process."""
    windows.WINDOW_ROWS = 400
    original = Trainer.train_step

    def deadly(trainer, parts):
        original(trainer, parts)
        if trainer.position.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer.train_step = deadly
    return lead(directory)


@pytest.mark.process
def test_a_killed_run_goes_on_with_the_same_bits(log, tmp_path, small_windows):
    """Killed with -9 in three windows, and led again each time."""
    settings = {"checkpoint": {"every_steps": 3, "keep_last": 2}}
    whole = run_of(tmp_path, "whole", job_of(**settings), log)
    assert execute(whole, start_ranks) == 0
    expected = left_by(whole)
    cuts = []
    for attempt, step in enumerate((11, 40, 70), start=1):
        run = run_of(tmp_path, "killed", job_of(**settings), log, attempt=attempt)
        process = forked.start(lead_and_die, run.directory, step, log=tmp_path / "log.txt")
        process.join()
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
        cuts.append(latest_valid(run.checkpoints))
        # The last one may not have been written to its end.
        assert step - 6 <= cuts[-1].step <= step
    assert expected[2] > 70
    assert len({cut.extra["position"]["place"]["window"] for cut in cuts}) == 3
    run = run_of(tmp_path, "killed", job_of(**settings), log, attempt=4)
    assert execute(run, start_ranks) == 0
    assert_same_bits(left_by(run), expected)


def spoil(path):
    """Overwrite the rows of a Parquet file, not its footer; return what brings it back with its time."""
    original, stat = path.read_bytes(), path.stat()

    def restore(time_of_change=stat.st_mtime_ns):
        path.write_bytes(original)
        os.utime(path, ns=(stat.st_atime_ns, time_of_change))

    path.write_bytes(original[:4] + b"\xff" * 2000 + original[2004:])
    return restore


def test_it_trains_before_its_last_files_are_read_and_goes_on_once_they_can_be(tmp_path, small, small_windows):
    """The eighth file is broken: the job has trained on what is before it when it finds out."""
    folder = write_rows(tmp_path / "rows")
    log = dataset_of(folder)
    job = job_of(checkpoint={"every_steps": 6, "keep_last": 2})
    whole = run_of(tmp_path, "whole", job, log)
    assert execute(whole, start_ranks) == 0
    restore = spoil(folder / "7.parquet")
    run = run_of(tmp_path, "run", job, log)
    assert execute(run, start_ranks) != 0
    (error,) = small.events(run.directory, "error")
    assert "7.parquet" in error["message"]
    stopped = latest_valid(run.checkpoints)
    assert stopped.step > 20
    assert stopped.extra["position"]["place"]["file"] < 7
    # Written anew, with another time: nothing of it was trained on.
    restore(time_of_change=10**18)
    run = run_of(tmp_path, "run", job, log, attempt=2)
    assert execute(run, start_ranks) == 0
    assert_same_bits(left_by(run), left_by(whole))


def test_files_that_changed_after_rows_of_them_were_trained_on_are_refused(tmp_path, small, small_windows):
    folder = write_rows(tmp_path / "rows")
    run = run_of(tmp_path, "run", job_of(checkpoint={"every_steps": 12}), dataset_of(folder))
    restore = spoil(folder / "7.parquet")
    assert execute(run, start_ranks) != 0
    restore()
    os.utime(folder / "2.parquet", ns=(10**18, 10**18))
    run = run_of(tmp_path, "run", run.job, run.dataset, attempt=2)
    assert execute(run, start_ranks) != 0
    error = small.events(run.directory, "error")[-1]
    assert "2.parquet: has changed since its rows were trained on" in error["message"]
    assert "start a new job" in error["message"] + error["remedy"]


def test_a_warm_start_goes_on_with_ids_rows_and_steps(log, tmp_path):
    """Two runs of one pass end as two with a preparation, with the same ids, and the same that lost their rows."""
    later = dataset_of(write_rows(tmp_path / "later", seed=1, first_item=60))
    found, maps = [], []
    for one_pass in (True, False):
        parent = run_of(tmp_path, f"first-{one_pass}", job_of(one_pass), log)
        assert execute(parent, start_ranks) == 0
        places = {"init_checkpoint": str(parent.checkpoints)}
        run = run_of(tmp_path, f"next-{one_pass}", job_of(one_pass), later, **places)
        assert execute(run, start_ranks) == 0
        found.append(left_by(run))
        maps.append(id_maps(latest_valid(run.checkpoints)))
    assert_same_bits(*found)
    for table, expected in maps[1].items():
        ours = maps[0][table]
        assert ours.run == expected.run == 2
        assert np.array_equal(hashes_of(ours.ids), hashes_of(expected.ids))
        assert set(hashes_of(ours.retired)) == set(hashes_of(expected.retired))
        assert set(ours.retired_in) == set(expected.retired_in) == {2}
    assert maps[0]["user"].ids.equals(maps[1]["user"].ids)


def test_a_job_with_a_preparation_cannot_go_on_from_hashes_of_strings(log, tmp_path, small):
    parent = run_of(tmp_path, "first", job_of(), log)
    assert execute(parent, start_ranks) == 0
    run = run_of(tmp_path, "next", job_of(one_pass=False), log, init_checkpoint=str(parent.checkpoints))
    assert execute(run, start_ranks) != 0
    (error,) = small.events(run.directory, "error")
    assert "table 'item': the warm start is from a job of one pass" in error["message"]
    # And the other way round it does.
    before = run_of(tmp_path, "prepared", job_of(one_pass=False), log)
    assert execute(before, start_ranks) == 0
    run = run_of(tmp_path, "after", job_of(), log, init_checkpoint=str(before.checkpoints))
    assert execute(run, start_ranks) == 0
    assert latest_valid(run.checkpoints).step == 2 * latest_valid(before.checkpoints).step


def test_progress_predict_and_export(log, tmp_path, small, small_windows):
    """The number of steps is unknown till the end; ids, of which strings are hashes, are found again in new rows."""
    split = {"kind": "column", "column": "side", "validation": 0}
    run = run_of(tmp_path, "run", job_of(evaluation={"split": split}), log)
    assert execute(run, start_ranks) == 0
    progress = small.events(run.directory, "progress")
    assert progress[0]["steps"] is None
    assert progress[-1]["steps"] == progress[-1]["step"] == latest_valid(run.checkpoints).step
    expected = left_by(run)
    run = run_of(tmp_path, "run", run.job, log, attempt=2)
    assert execute(run, start_ranks) == 0
    assert_same_bits(left_by(run), expected)
    ids = {name: one.ids for name, one in id_maps(latest_valid(run.checkpoints)).items()}
    assert (ids["item"].type, ids["user"].type) == (pa.uint64(), pa.int64())
    assert set(ids["user"].to_pylist()) <= set(range(-30, 30))
    data, newest = OnePassData.of(run.data, log, run.job), latest_valid(run.checkpoints)
    data.begin(Place.of_json(newest.extra["position"]["place"]))
    with single_rank_group(), torch.no_grad():
        sharded = build(run.job, data, alpha=newest.extra["alpha"]).eval()
        sharded.load_from(newest)
        growing = DynamicRows(run.job, data, sharded)
        growing.load(newest)
        batches = map(growing.known, data.eval_batches("test"))
        logits = torch.cat([sharded.module.evaluate(batch)[0] for batch in batches]).numpy()
    rows = pq.read_table(f"{log.uri}/{NUM_FILES - 1}.parquet")
    scores = Predictor(run.directory).predict(rows)["logit"].to_numpy()
    np.testing.assert_allclose(scores, logits, rtol=1e-5, atol=1e-6)
    export(run.directory, tmp_path / "export")
    exported = Exported(tmp_path / "export").predict(rows)["logit"].to_numpy()
    np.testing.assert_allclose(exported, logits, rtol=1e-4, atol=1e-5)


TWO_TOWER = {
    "model": {"kind": "two_tower", "embedding_dim": 4}, "tables": {"item": {"capacity": 300}, "user": {"capacity": 90}},
    "publish": {"collection": "items", "feature": "item", "gate": {"mode": "off"}},
}  # fmt: skip


def published_by(run):
    """Ids, vectors and occurrences of the version that is served."""
    version = open_store(run.store_url).collection("items").open()
    items = version.items()
    return items.arrow_ids().to_pylist(), np.asarray(items.vectors[:]), items.counts


def test_it_publishes_what_a_prepared_job_does(log, tmp_path):
    """Strings come back from the one table that is published; a threshold of 1 and room for all: all occurrences.

    Those are of all features of the table, where a prepared job publishes how many rows have the item.
    """
    found = []
    for one_pass in (True, False):
        run = run_of(tmp_path / str(one_pass), "run", job_of(one_pass, **TWO_TOWER), log)
        assert execute(run, start_ranks) == 0
        found.append((*published_by(run), latest_valid(run.checkpoints)))
    (ids, vectors, counts, newest), (expected_ids, expected, expected_counts, prepared) = found
    assert ids == expected_ids
    assert len(ids) > 100
    assert all(one.startswith("i") for one in ids)
    assert np.array_equal(vectors, expected)
    data = PreparedData.open(run.data)
    occurrences = dict(zip(data.vocabulary("item").to_pylist(), data.row_counts("item")[2:].tolist(), strict=True))
    assert counts.tolist() == [occurrences[one] for one in ids]
    assert (expected_counts < counts).any()
    assert id_maps(newest)["item"].ids.equals(id_maps(prepared)["item"].ids)
    assert id_maps(newest)["user"].ids.type == pa.int64()


@pytest.mark.process
def test_a_killed_run_publishes_what_one_that_was_not_killed_does(log, tmp_path, small_windows):
    """Ids that went and came back, and their occurrences, go through checkpoints."""
    settings = TWO_TOWER | {
        "checkpoint": {"every_steps": 3},
        "tables": {"item": {"capacity": 40}, "user": {"capacity": 90}},
    }
    whole = run_of(tmp_path / "whole", "run", job_of(**settings), log)
    assert execute(whole, start_ranks) == 0
    run = run_of(tmp_path / "killed", "run", job_of(**settings), log)
    process = forked.start(lead_and_die, run.directory, 40, log=tmp_path / "log.txt")
    process.join()
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    run = run_of(tmp_path / "killed", "run", run.job, log, attempt=2)
    assert execute(run, start_ranks) == 0
    for ours, theirs in zip(published_by(run), published_by(whole), strict=True):
        assert np.array_equal(ours, theirs)
    assert len(published_by(run)[0]) == 40


def test_what_published_no_strings_is_no_start_for_what_does(log, tmp_path, small):
    quiet = job_of(**TWO_TOWER | {"publish": None})
    parent = run_of(tmp_path, "first", quiet, log)
    assert execute(parent, start_ranks) == 0
    run = run_of(tmp_path, "next", job_of(**TWO_TOWER), log, init_checkpoint=str(parent.checkpoints))
    assert execute(run, start_ranks) != 0
    (error,) = small.events(run.directory, "error")
    assert (
        "table 'item': the warm start is from a job of one pass that published none of its strings" in error["message"]
    )
    # Nor can it begin to publish on its way.
    run = run_of(tmp_path, "first", job_of(**TWO_TOWER), log, attempt=2)
    assert execute(run, start_ranks) != 0
    error = small.events(run.directory, "error")[-1]
    assert "its job did not publish" in error["message"]
    # From one that published it goes on, with occurrences of its own.
    parent = run_of(tmp_path, "published", job_of(**TWO_TOWER), log)
    assert execute(parent, start_ranks) == 0
    before = published_by(parent)
    run = run_of(tmp_path, "after", job_of(**TWO_TOWER), log, init_checkpoint=str(parent.checkpoints))
    assert execute(run, start_ranks) == 0
    ids, _, counts = published_by(run)
    assert (ids, counts.tolist()) == (before[0], before[2].tolist())


@pytest.mark.parametrize("column", ["item", "recent"])
def test_an_id_that_cannot_be_published_is_said_where_it_is_read(tmp_path, small, column):
    rows = {
        "user": list(range(40)), "item": [f"i{n % 9}" for n in range(40)], "click": [n % 2 for n in range(40)],
        "recent": [[], ["i1", "i2"]] * 20,
    }  # fmt: skip
    rows[column][33] = "i" * 513 if column == "item" else ["i1", "i\0"]
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    for name, job in (("plain", TWO_TOWER | {"publish": None}), ("publishes", TWO_TOWER)):
        run = run_of(tmp_path, name, job_of(**job), dataset_of(tmp_path / "rows.parquet"))
        assert (execute(run, start_ranks) == 0) == (name == "plain")
    (error,) = small.events(run.directory, "error")
    assert f"column '{column}', row 33: has an id that cannot be published" in error["message"]
