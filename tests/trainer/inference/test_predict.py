"""Predictions: the scores of the run itself, for rows from elsewhere, in files of any size, from any plan."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.examples import run_example
from trainer.checkpoint.format import Checkpoint, CheckpointError, TableShard, latest_valid, save
from trainer.checkpoint.select import pick
from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.prepare.bad_rows import bad_events
from trainer.data.sources.source import Source
from trainer.data.sources.user_rows import users_of
from trainer.distributed.build import build
from trainer.inference.importance import importance
from trainer.inference.predict import Predictor, default_output, main, predict
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.metrics import auc
from trainer.runs.directory import read_run, write_run
from trainer.spec import parse_dataset, parse_job

NUM_ROWS, HELD = 1200, 120


def write_shop(folder: Path) -> Path:
    """Rows with single ids, string ids, lists, a join of each kind, and a time; some of everything is null."""
    rng = np.random.default_rng(3)
    user, item = rng.integers(0, 40, NUM_ROWS), (rng.random(NUM_ROWS) ** 2 * 90).astype(np.int64)
    tags = [[f"t{tag}" for tag in rng.integers(0, 12, rng.integers(0, 4))] for _ in range(NUM_ROWS)]
    click = (rng.random(NUM_ROWS) < np.array([0.1, 0.4, 0.9])[item % 3]).astype(np.int64)
    rows = {
        "user": pa.array([f"u{one}" if one else None for one in user]),
        "sku": pa.array(item, mask=rng.random(NUM_ROWS) < 0.01),
        "tags": pa.array(tags),
        "shares": [rng.random(len(one)).tolist() for one in tags],
        "price": pa.array(rng.lognormal(size=NUM_ROWS) * (1 + item % 3), mask=rng.random(NUM_ROWS) < 0.1),
        "pos": rng.permutation(NUM_ROWS),
        "click": click,
    }
    pq.write_table(pa.table(rows), folder / "shop.parquet")
    known = np.arange(0, 90, 2)
    kinds = [[int(one) % 7, 7 + int(one) % 3] for one in known]
    pq.write_table(pa.table({"item": known, "brand": known % 5, "kinds": kinds}), folder / "items.parquet")
    return folder / "shop.parquet"


def shop(path: Path):
    return parse_dataset(
        {
            "name": "shop",
            "uri": str(path),
            "features": {
                "user": {"type": "id"},
                "item": {"type": "id", "column": "sku"},
                "tags": {"type": "id_list", "pooling": "mean", "weights": "shares"},
                "price": {"type": "dense", "transform": "standardize"},
                "brand": {"type": "id", "join": {"uri": "items.parquet", "on": "item", "column": "brand"}},
                "kinds": {
                    "type": "id_list",
                    "join": {"uri": "items.parquet", "on": "item", "column": "kinds", "take": "all"},
                },
                "history": {
                    "type": "id_list",
                    "shares": "item",
                    "derive": {"previous": "item", "by": "user", "order": "pos", "length": 5},
                },
            },
            "label": {"column": "click"},
            "order": "pos",
        }
    )


def shop_job(**changes):
    return parse_job(
        {
            "name": "shop",
            "dataset": {"name": "shop"},
            "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8]},
            "optimizer": {"kind": "adam_ar", "learning_rate": 0.05, "alpha": 0.003},
            "epochs": 2,
            "batch_size": 96,
            "checkpoint": {"every_steps": 10, "keep_last": 10},
            "evaluation": {"split": {"kind": "time", "validation": HELD / NUM_ROWS, "test": HELD / NUM_ROWS}},
        }
        | changes
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("shop")
    directory = write_run(
        folder / "run",
        run_id="shop-1",
        job=shop_job(),
        dataset=shop(write_shop(folder)),
        store_url=str(folder / "store"),
    )
    assert execute(read_run(directory), start_ranks) == 0
    return read_run(directory)


def rows_of(run) -> pa.Table:
    return pq.read_table(run.dataset.uri)


def test_the_example_of_the_docstring_runs(run):
    run_example("trainer.inference.predict.Predictor", run_directory=run.directory, rows=rows_of(run))


def validation_of(run) -> pa.Table:
    """What the split by time holds out for validation, in the order of rows."""
    pos = rows_of(run)["pos"].to_numpy()
    return rows_of(run).filter(pa.array((pos >= NUM_ROWS - 2 * HELD) & (pos < NUM_ROWS - HELD)))


def logits_of_run(run, split: str) -> np.ndarray:
    """By the sharded model that trained, with all of its optimizer's state."""
    data, checkpoint = PreparedData.open(run.data), latest_valid(run.checkpoints)
    with single_rank_group(), torch.no_grad():
        sharded = build(run.job, data, alpha=checkpoint.extra["alpha"]).eval()
        sharded.load_from(checkpoint)
        return torch.cat([sharded.module.evaluate(batch)[0] for batch in data.eval_batches(split)]).numpy()


def test_a_run_that_had_a_setting_which_was_removed_is_read(run, tmp_path):
    shutil.copytree(run.directory, tmp_path / "run")
    document = json.loads((run.directory / "run.json").read_text("utf-8"))
    document["job"]["model"]["hard_negatives"] = {"share": 0.5}
    (tmp_path / "run" / "run.json").write_text(json.dumps(document), "utf-8")
    rows = validation_of(run)
    assert Predictor(tmp_path / "run").predict(rows) == Predictor(run.directory).predict(rows)


def last_metric(run, small, split: str) -> dict:
    return small.metrics(run.directory, split)[-1]


def test_scores_of_the_validation_rows_are_those_of_the_run(run, small):
    rows = validation_of(run)
    found = Predictor(run.directory).predict(rows)
    logits = found["logit"].to_numpy()
    assert len(logits) == HELD
    np.testing.assert_allclose(logits, logits_of_run(run, "validation"), rtol=0, atol=1e-6)
    assert auc(logits, rows["click"].to_numpy()) == pytest.approx(
        last_metric(run, small, "validation")["auc"], abs=1e-9
    )
    np.testing.assert_allclose(found["probability"].to_numpy(), 1 / (1 + np.exp(-logits.astype(np.float64))), rtol=1e-6)
    # The test would not see decay that is not read, were nothing pending.
    checkpoint = latest_valid(run.checkpoints)
    _, state = checkpoint.read_rows("item")
    assert (state["last_update_step"] < checkpoint.step).any()


def test_histories_may_be_given(run):
    """Lists, the oldest first, of which the last five are read: the same scores as those looked up in the dataset."""
    rows, everything = validation_of(run), rows_of(run).sort_by("pos").to_pylist()
    histories = [
        [one["sku"] for one in everything if one["user"] == row["user"] is not None and one["pos"] < row["pos"]]
        for row in rows.to_pylist()
    ]
    # Null items count as the unknown one where training looks back; a list that is given leaves nulls out.
    told = [[-1 if one is None else one for one in history] for history in histories]
    given = rows.drop(["pos"]).append_column("history", pa.array(told, pa.list_(pa.int64())))
    expected = Predictor(run.directory).predict(rows)["logit"].to_numpy()
    np.testing.assert_allclose(Predictor(run.directory).predict(given)["logit"].to_numpy(), expected, rtol=0, atol=1e-6)
    # Without times a row is scored with all that its user had.
    last = Predictor(run.directory).predict(rows.drop(["pos"]))["logit"].to_numpy()
    assert np.abs(last - expected).max() > 1e-3


def test_any_plan_gives_the_same_scores(run, tmp_path):
    """The checkpoint written once more, in pieces of rows and of columns as other ranks would have."""
    written = latest_valid(run.checkpoints)
    pieces = []
    for name, num_rows in written.tables.items():
        middle = num_rows // 2
        for start, count in ((0, middle), (middle, num_rows - middle)):
            for column in (0, 2):
                weight, state = written.read_rows(name, start, count, column, 2)
                pieces.append(TableShard(name, num_rows, start, weight, state, column, 4))
    directory = shutil.copytree(run.directory, tmp_path / "run")
    shutil.rmtree(directory / "checkpoints")
    attached = {path.name: path for path in (*written.path.glob("ids-*.arrow"), written.path / "numeric.json")}
    save(
        directory / "checkpoints",
        step=written.step,
        tables=pieces,
        dense=written.read_dense(),
        extra=written.extra,
        attached=attached,
    )
    rows = validation_of(run)
    assert Predictor(directory).predict(rows).equals(Predictor(run.directory).predict(rows))


def test_unknown_and_missing_ids_are_scored_as_the_unknown_one_and_counted(run, tmp_path):
    known = rows_of(run).slice(0, 4)
    sku = known["sku"].to_pylist()
    rows = known.set_column(1, "sku", pa.array([10**9, None, 10**12, sku[3]]))
    pq.write_table(rows, tmp_path / "rows.parquet")
    report = predict(run.directory, tmp_path / "rows.parquet", columns=["click"])
    assert (report["unknown"]["item"], report["missing"]["item"]) == (2, 1)
    table = pq.read_table(tmp_path / "rows.scores.parquet")
    assert table.column_names == ["click", "logit", "probability"]
    scores = table["logit"].to_numpy()
    same = rows.set_column(1, "sku", pa.array([None, 10**9, None, sku[3]], pa.int64()))
    np.testing.assert_array_equal(scores, Predictor(run.directory).predict(same)["logit"].to_numpy())


def test_rows_of_which_hardly_an_id_is_known_are_told_with_the_reason(run, tmp_path):
    rows = validation_of(run)
    assert predict(run.directory, run.dataset.uri, tmp_path / "known")["notes"] == []
    users = pa.array([user and user.upper() for user in rows["user"].to_pylist()])
    items = pa.array([None if sku is None else sku + 10**6 for sku in rows["sku"].to_pylist()])
    pq.write_table(rows.set_column(0, "user", users).set_column(1, "sku", items), tmp_path / "rows.parquet")
    notes = predict(run.directory, tmp_path / "rows.parquet")["notes"]
    assert [note.split(": ")[1] for note in notes] == ["user", "item", "join of brand", "join of kinds"]
    num_users = rows["user"].drop_null().length()
    assert notes[0].startswith(f"warning: user: 0 of {num_users} ids are known; the rows have 'U")
    assert notes[0].endswith("they are equal except for upper and lower case")
    assert "known are '0', '2', '4'" in notes[2]


def test_directories_keep_their_shape_and_rows_their_order(run, tmp_path, monkeypatch):
    """Also in chunks that are smaller than files, and where a file has no row."""
    from trainer.inference import parquet_scoring, scorer

    monkeypatch.setattr(parquet_scoring, "CHUNK_ROWS", 50)
    monkeypatch.setattr(scorer, "BATCH_ROWS", 16)
    rows = rows_of(run)
    whole = Predictor(run.directory).predict(rows)
    folder = tmp_path / "days"
    for day, (start, count) in {"day=1": (0, 333), "day=2": (333, 0), "day=3": (333, 700)}.items():
        (folder / day).mkdir(parents=True)
        pq.write_table(rows.slice(start, count), folder / day / "part.parquet")
    told = []
    assert main([str(run.directory), str(folder), "--columns", "pos,user", "--json"]) == 0
    parts = [
        pq.read_table(tmp_path / "days.scores" / f"day={day}" / "part.parquet", partitioning=None) for day in (1, 2, 3)
    ]
    assert [len(part) for part in parts] == [333, 0, 700]
    found = pa.concat_tables(parts)
    assert found.column_names == ["pos", "user", "logit", "probability"]
    assert found["pos"].to_pylist() == rows["pos"].to_pylist()[:1033]
    assert found["user"].to_pylist() == rows["user"].to_pylist()[:1033]
    np.testing.assert_allclose(found["logit"].to_numpy(), whole["logit"].to_numpy()[:1033], rtol=0, atol=1e-6)
    assert not told


def test_scores_of_two_files_are_not_written_into_one(run, tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("a.parquet", "a.pq"):
        pq.write_table(rows_of(run).slice(0, 5), tmp_path / "rows" / name)
    with pytest.raises(DataError, match=r"scores of two files would go to a\.parquet \(rename one of them\)"):
        predict(run.directory, tmp_path / "rows")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows"]


def test_where_scores_go(run, tmp_path):
    for name in ("rows.2026-01-31.parquet", "rows.csv"):
        path = tmp_path / name
        rows = rows_of(run).slice(0, 3).select(["pos"])
        pq.write_table(rows, path) if name.endswith("parquet") else path.write_text("pos\n1\n")
        stem = name.removesuffix(".parquet").removesuffix(".csv")
        assert default_output(Source(str(path))) == tmp_path / f"{stem}.scores.parquet"


@pytest.mark.parametrize(("metric", "step"), [("auc", 20), ("mae", 10), ("ece_equal_width", 10)])
def test_the_best_by_an_error_is_the_lowest(run, monkeypatch, metric, step):
    last, _ = pick(run)
    history = [{"epoch": epoch, "split": "validation", metric: epoch / 10} for epoch in (1, 2)]
    monkeypatch.setitem(last.extra, "history", history)
    monkeypatch.setattr("trainer.checkpoint.select._last", lambda run: (last, []))
    evaluation = run.job.evaluation.model_copy(update={"metrics": (metric,)})
    asked = dataclasses.replace(run, job=run.job.model_copy(update={"evaluation": evaluation}))
    assert pick(asked, "best")[0].step == step


def test_no_epoch_is_best_by_a_table(run):
    evaluation = run.job.evaluation.model_copy(update={"metrics": ("calibration",)})
    asked = dataclasses.replace(run, job=run.job.model_copy(update={"evaluation": evaluation}))
    with pytest.raises(CheckpointError, match=r"no number by which epochs compare.*in evaluation\.metrics"):
        pick(asked, "best")


def test_which_checkpoint(run, small, tmp_path):
    rows = validation_of(run)
    checkpoint, notes = pick(run)
    assert (checkpoint.step, notes) == (20, [])
    first = Predictor(run.directory, "10").predict(rows)
    assert not first.equals(Predictor(run.directory, "last").predict(rows))
    # 10 steps are an epoch: which one was the best decides.
    aucs = [metric["auc"] for metric in small.metrics(run.directory, "validation")]
    assert pick(run, "best")[0].step == (10, 20)[int(np.argmax(aucs))]
    for wrong, said in (("15", "10, 20"), ("newest", "use best, last or a step")):
        with pytest.raises(CheckpointError, match=said):
            pick(run, wrong)

    directory = shutil.copytree(run.directory, tmp_path / "run")
    for path in (directory / "checkpoints").glob("step-000000000010*"):
        shutil.rmtree(path)
    last = Checkpoint(directory / "checkpoints" / "step-000000000020")
    body = json.loads((last.path / "manifest.json").read_text())["manifest"]
    for metric in body["extra"]["history"]:
        if metric["split"] == "validation":
            metric["auc"] = 1.0 if metric["epoch"] == 1 else 0.5
    rewrite(last.path, body)
    with pytest.raises(CheckpointError, match=r"epoch 1 was the best .*not kept \(there are epoch 2 .*every_steps"):
        pick(read_run(directory), "best")


def rewrite(path: Path, body: dict) -> None:
    from trainer.checkpoint.format import _manifest_bytes

    (path / "manifest.json").write_bytes(_manifest_bytes(body))


def test_damaged_and_absent_checkpoints(run, tmp_path):
    directory = shutil.copytree(run.directory, tmp_path / "run")
    (directory / "exit.json").unlink()
    copied = read_run(directory)
    damaged = next((directory / "checkpoints" / "step-000000000020").glob("table-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    checkpoint, notes = pick(copied)
    assert checkpoint.step == 10
    assert "passed over" in notes[0]
    assert "has not ended" in notes[1]
    with pytest.raises(CheckpointError, match="sha256 is not the manifest's: use another --checkpoint"):
        pick(copied, "20")
    shutil.rmtree(directory / "checkpoints" / "step-000000000010")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        pick(copied)
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no checkpoint: wait"):
        Predictor(directory)


def test_rows_that_cannot_be_scored_are_refused_with_the_remedy(run, tmp_path, capsys):
    rows = validation_of(run)

    def refused(table: pa.Table, *arguments: str) -> str:
        pq.write_table(table, tmp_path / "rows.parquet")
        assert main([str(run.directory), str(tmp_path / "rows.parquet"), *arguments]) == 1
        assert not list(tmp_path.glob("*.scores*")) + list(tmp_path.glob(".*.tmp"))
        return capsys.readouterr().err

    said = refused(rows.drop(["sku", "tags"]))
    assert "no column 'sku', 'tags' (there are click, pos, price, shares, user)" in said
    said = refused(rows.set_column(1, "sku", pa.array(["x"] * len(rows))))
    assert "feature 'item'" in said
    assert "no 64-bit integer" in said
    said = refused(rows.set_column(5, "pos", rows["pos"].cast(pa.int64()).cast(pa.timestamp("s"))))
    assert "has a time without a zone, and the dataset is ordered by a number (write it as in the dataset" in said
    assert "holds list" in refused(rows.set_column(1, "sku", pa.array([[1]] * len(rows))))
    assert "to keep (there are click" in refused(rows, "--columns", "clicks")
    assert "already has a column 'logit'" in refused(rows.append_column("logit", rows["pos"]))
    assert "dnn has no vectors of users" in refused(rows, "--k", "5")
    assert "holds no checkpoint of step 7: there are 10, 20" in refused(rows, "--checkpoint", "7")
    (tmp_path / "there.parquet").touch()
    assert "is there already" in refused(rows, "--output", str(tmp_path / "there.parquet"))
    assert main([str(tmp_path), str(run.dataset.uri)]) == 1
    assert "is no run directory" in capsys.readouterr().err


def test_a_history_needs_the_dataset_or_a_column(run, tmp_path):
    directory = shutil.copytree(run.directory, tmp_path / "run")
    document = json.loads((directory / "run.json").read_text())
    shutil.copy(Path(run.dataset.uri).with_name("items.parquet"), tmp_path / "items.parquet")
    document["dataset"]["uri"] = str(tmp_path / "gone.parquet")
    (directory / "run.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"gone.parquet: histories are looked up .* a column with the history"):
        Predictor(directory).predict(validation_of(run))


def test_histories_have_no_rows_that_training_left_out_as_bad(run, tmp_path):
    """A run whose rows have bad labels and times looks its histories up in the rows that are neither."""
    rows = rows_of(run)
    click = pa.array(rows["click"].to_numpy(), mask=np.arange(NUM_ROWS) % 50 == 7)
    pos = pa.array(rows["pos"].to_numpy(), mask=np.arange(NUM_ROWS) % 50 == 8)
    dirty = rows.set_column(6, "click", click).set_column(5, "pos", pos)
    directory = shutil.copytree(run.directory, tmp_path / "run")
    document = json.loads((directory / "run.json").read_text())
    document["dataset"] |= {"uri": str(tmp_path / "dirty.parquet"), "max_bad_rows": 0.1}
    (directory / "run.json").write_text(json.dumps(document))
    shutil.copy(Path(run.dataset.uri).with_name("items.parquet"), tmp_path / "items.parquet")
    asked = rows.set_column(5, "pos", pa.array(np.full(NUM_ROWS, NUM_ROWS)))
    scores = []
    for kept in (dirty, dirty.filter(pc.and_(dirty["click"].is_valid(), dirty["pos"].is_valid()))):
        pq.write_table(kept, tmp_path / "dirty.parquet")
        scores.append(Predictor(directory).predict(asked)["logit"].to_numpy())
    assert np.array_equal(*scores)
    assert not np.array_equal(scores[0], Predictor(run.directory).predict(asked)["logit"].to_numpy())


# --- models of sequences ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sasrec", "item2vec"])
def sequence_run(request, run, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    model = {"kind": request.param, "embedding_dim": 4} | (
        {"length": 6} if request.param == "sasrec" else {"window": 2}
    )
    job = shop_job(model=model, epochs=1, evaluation={"split": {"kind": "per_user_last"}})
    directory = write_run(folder / "run", run_id="next", job=job, dataset=run.dataset, store_url=str(folder / "store"))
    assert execute(read_run(directory), start_ranks) == 0
    return read_run(directory)


def test_next_items_are_the_best_of_the_whole_catalogue(sequence_run):
    predictor = Predictor(sequence_run.directory, k=4)
    ids = PreparedData.open(sequence_run.data).vocabulary("item").to_pylist()
    histories = [ids[:3], [ids[5]], ids[10:25], [], [10**9], [ids[0], 10**9]]
    found = predictor.predict(pa.table({"sku": pa.array(histories, pa.list_(pa.int64()))}))
    assert [len(items) for items in found["items"].to_pylist()] == [4, 4, 4, 0, 0, 4]

    data, checkpoint = PreparedData.open(sequence_run.data), latest_valid(sequence_run.checkpoints)
    with single_rank_group(), torch.no_grad():
        sharded = build(sequence_run.job, data, alpha=checkpoint.extra["alpha"]).eval()
        sharded.load_from(checkpoint)
        model = sharded.module
        rows = [[ids.index(one) + 2 if one in ids else 1 for one in history] for history in histories]
        length = 6 if sequence_run.job.model.kind == "sasrec" else 2
        values = [row for history in rows for row in history[-length:]]
        from torchrec import KeyedJaggedTensor

        features = KeyedJaggedTensor(
            keys=["item", "item__target", "item__negative"],
            values=torch.tensor(values),
            lengths=torch.tensor([min(len(one), length) for one in rows] + [0] * 12),
            stride=6,
        )
        scores = model.queries(model.embeddings(features)) @ model.catalogue(data).T
    for number in (0, 1, 2, 5):
        mine = scores[number].clone()
        mine[[0, 1, *rows[number]]] = -torch.inf
        best = mine.topk(4)
        assert found["items"][number].as_py() == [ids[row - 2] for row in best.indices.tolist()]
        np.testing.assert_allclose(found["scores"][number].as_py(), best.values.numpy(), rtol=1e-5, atol=1e-6)


def test_events_are_gathered_by_user(sequence_run, tmp_path):
    """As training reads them: positives alone, in the order of time, rows without a user or an item left out."""
    report = predict(sequence_run.directory, sequence_run.dataset.uri, tmp_path / "next.parquet", k=3)
    found = pq.read_table(tmp_path / "next.parquet")
    assert found.column_names == ["user", "items", "scores"]
    events = [
        row for row in pq.read_table(sequence_run.dataset.uri).to_pylist() if row["click"] and row["sku"] is not None
    ]
    users = list(dict.fromkeys(row["user"] for row in events if row["user"] is not None))
    assert found["user"].to_pylist() == users
    assert report["rows"] == len(users)
    histories = [
        [row["sku"] for row in sorted(events, key=lambda row: row["pos"]) if row["user"] == user] for user in users
    ]
    lists = pa.table({"sku": histories, "who": users})
    pq.write_table(lists, tmp_path / "lists.parquet")
    predict(sequence_run.directory, tmp_path / "lists.parquet", tmp_path / "lists", k=3)
    assert pq.read_table(tmp_path / "lists").select(["items", "scores"]).equals(found.select(["items", "scores"]))
    assert pq.read_table(tmp_path / "lists")["who"].to_pylist() == users


def test_events_that_do_not_pass_the_filter_are_in_no_list(sequence_run, tmp_path):
    """As with what training reads: the same items are found on a file of those that pass."""
    run = tmp_path / "run"
    shutil.copytree(sequence_run.directory, run)
    document = json.loads((run / "run.json").read_text())
    document["dataset"]["filter"] = "pos < 200"
    (run / "run.json").write_text(json.dumps(document))
    rows = pq.read_table(sequence_run.dataset.uri)
    pq.write_table(rows.filter(pc.less(rows["pos"], 200)), tmp_path / "passing.parquet")
    pq.write_table(rows, tmp_path / "all.parquet")
    for name in ("all", "passing"):
        predict(run, tmp_path / f"{name}.parquet", tmp_path / name, k=3)
    assert pq.read_table(tmp_path / "all").equals(pq.read_table(tmp_path / "passing"))


def test_events_that_a_dataset_may_have_bad_are_in_no_list(sequence_run, tmp_path):
    rows = pq.read_table(sequence_run.dataset.uri)
    bad = np.arange(NUM_ROWS) % 50 < 2
    pos = pa.array(rows["pos"].to_numpy(), mask=np.arange(NUM_ROWS) % 50 == 0)
    click = pa.array(np.where(np.arange(NUM_ROWS) % 50 == 1, 2, rows["click"].to_numpy()))
    pq.write_table(rows.set_column(6, "click", click).set_column(5, "pos", pos), tmp_path / "dirty.parquet")
    pq.write_table(rows.filter(pa.array(~bad)), tmp_path / "clean.parquet")
    source, dataset = Source(str(tmp_path / "dirty.parquet")), sequence_run.dataset
    with pytest.raises(DataError, match="the label is 2"):
        users_of(source, dataset)
    expected = users_of(Source(str(tmp_path / "clean.parquet")), dataset)
    assert users_of(source, dataset, bad_events).equals(expected)


def test_events_are_ordered_by_times_that_no_float_holds(sequence_run, tmp_path):
    """Nanoseconds since 1970: neighbours that are one float64."""
    times = 1_760_000_000_000_000_000 + np.arange(10)
    rows = pa.table({"user": ["u1"] * 10, "sku": np.arange(10), "pos": times}).take(np.arange(10)[::-1])
    pq.write_table(rows, tmp_path / "rows.parquet")
    found = users_of(Source(str(tmp_path / "rows.parquet")), sequence_run.dataset)
    assert found["sku"].to_pylist() == [list(range(10))]


@pytest.mark.slow
@pytest.mark.process
def test_the_command_scores_by_a_jobs_id(run, tmp_path):
    """The whole way: console script, the trainer as its child, files."""
    shutil.copytree(run.directory, tmp_path / "home" / "runs" / "shop-1")
    rows = validation_of(run)
    pq.write_table(rows, tmp_path / "rows.parquet")
    done = subprocess.run(
        [Path(sys.executable).with_name("evenkeel"), "predict", "shop-1", "rows.parquet", "--columns", "pos"],
        cwd=tmp_path,
        env={**os.environ, "EVENKEEL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "120 rows scored by dnn, step 20, in " in done.stdout
    assert "site-packages" not in done.stderr
    found = pq.read_table(tmp_path / "rows.scores.parquet")
    assert found["pos"].to_pylist() == rows["pos"].to_pylist()
    expected = Predictor(run.directory).predict(rows)["logit"].to_numpy()
    np.testing.assert_allclose(found["logit"].to_numpy(), expected, rtol=0, atol=1e-6)


# --- files that do not say types -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codes_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose items are text in a CSV file, most of them of digits alone; 007 and A12 are clicked."""
    folder = tmp_path_factory.mktemp("codes")
    rng = np.random.default_rng(3)
    items = rng.choice(["007", "012", "A12"], 600)
    clicks = [int(rng.random() < (0.1 if item == "012" else 0.9)) for item in items]
    lines = [f"{user},{item},{click}" for user, item, click in zip(rng.integers(0, 9, 600), items, clicks, strict=True)]
    (folder / "codes.csv").write_text("\n".join(["user,item,click", *lines]) + "\n")
    dataset = {
        "name": "codes",
        "uri": str(folder / "codes.csv"),
        "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"column": "click"},
        "max_bad_rows": 0.5,
    }
    job = parse_job(
        {"name": "codes", "dataset": {"name": "codes"}, "model": {"kind": "dnn", "embedding_dim": 4, "hidden": [8]}}
    )
    directory = write_run(
        folder / "run", run_id="codes-1", job=job, dataset=parse_dataset(dataset), store_url=str(folder / "store")
    )
    assert execute(read_run(directory), start_ranks) == 0
    return directory


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_ids_that_were_text_in_training_are_text_where_all_are_digits(codes_run, tmp_path, suffix):
    def scored(name: str, items: list[str]) -> tuple[dict, list]:
        if suffix == "csv":
            lines = ["user,item", *(f"1,{item}" for item in items)]
        else:
            lines = [json.dumps({"user": 1, "item": item}) for item in items]
        (tmp_path / f"{name}.{suffix}").write_text("\n".join(lines) + "\n")
        report = predict(codes_run, tmp_path / f"{name}.{suffix}", tmp_path / f"{name}.parquet")
        return report, pq.read_table(tmp_path / f"{name}.parquet").to_pylist()

    expected, all_rows = scored("all", ["007", "012", "A12"])
    report, rows = scored("digits", ["007", "012"])
    assert report["unknown"] == expected["unknown"] == {"user": 0, "item": 0}
    assert rows == all_rows[:2]
    assert [row["item"] for row in rows] == ["007", "012"]
    # Users were integers.
    assert rows[0]["user"] == 1


def test_text_is_not_taken_for_the_integers_of_training(codes_run, tmp_path):
    """Users were integers: 01 is none of them, and would be found as 1."""
    (tmp_path / "rows.csv").write_text("user,item\n1,007\n01,007\n")
    says = "column 'user'|feature 'user'): has an id that is no 64-bit integer in its usual form: '01'"
    with pytest.raises(DataError, match=f"({says}"):
        predict(codes_run, tmp_path / "rows.csv", tmp_path / "scores.parquet")
    rows = pa.table({"user": ["01"], "item": ["007"]})
    with pytest.raises(DataError, match=f"({says}"):
        Predictor(codes_run).predict(rows)


def test_folders_that_were_text_in_training_are_text_where_all_are_digits(codes_run, tmp_path):
    (tmp_path / "rows" / "item=007").mkdir(parents=True)
    pq.write_table(pa.table({"user": [1, 2]}), tmp_path / "rows" / "item=007" / "rows.parquet")
    assert predict(codes_run, tmp_path / "rows", tmp_path / "scores")["unknown"] == {"user": 0, "item": 0}


def test_importance_reads_digits_as_training_did(codes_run, tmp_path):
    (tmp_path / "rows.csv").write_text("user,item,click\n" + "1,007,1\n1,012,0\n" * 50)
    item, user = importance(codes_run, str(tmp_path / "rows.csv"))["features"]
    assert item["feature"] == "item"
    assert item["loss"] > 0.2
    assert user["loss"] == 0
