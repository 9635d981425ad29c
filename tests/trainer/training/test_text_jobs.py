"""Jobs with texts: every bit is that of lists of the ids of their n-grams, in training, on ranks and at work.

The ids are those of plain Python (tests/trainer/data/columns/test_ngrams.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.trainer.data.columns.test_ngrams import reference
from tests.trainer.item_tables import NUM_ABSENT, NUM_ITEMS, genre_of, job_of, write_log
from tests.trainer.trainings import differ, snapshot, train_in_parts, train_on_ranks, trainer_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.one_pass.data import OnePassData
from trainer.data.prepare.preparation import prepare
from trainer.inference.export import export
from trainer.inference.exported_model import Exported
from trainer.inference.predict import Predictor
from trainer.launch.driver import execute
from trainer.launch.on_host import single_rank_group, start_ranks
from trainer.runs.directory import read_run, write_run
from trainer.sizing.estimate import estimate, ids_per_example
from trainer.spec import SpecError, parse_dataset
from trainer.spec.ngrams import NGrams

NGRAMS = {"words": [1, 2], "characters": [3, 3], "buckets": 997}
WORDS = ["Quiet", "river", "NIGHT", "of", "stones", "paper", "moon", "élan"]
MODEL = {"loss": "sampled_softmax", "normalize": True, "temperature": 0.3}


def title_of(item: int) -> str | None:
    if item % 13 == 0:
        return None
    return f"{WORDS[genre_of(item)]} {WORDS[4 + item % 4]}, part {item % 3}"


def write_texts(folder: Path, seed: int = 0) -> Path:
    """Rows with a query, and items with a title; beside each text the ids of its n-grams."""
    ngrams = NGrams(**NGRAMS)
    path = write_log(folder, num_rows=1200, seed=seed)
    rows = pq.read_table(path)
    query = [None if user % 9 == 0 else f"{WORDS[user % 4]} {WORDS[item % 8]}?" for user, item in pairs(rows)]
    rows = rows.append_column("query", pa.array(query)).append_column("query_ids", ids_of(query, ngrams))
    pq.write_table(rows, path)
    items = np.random.default_rng(3).permutation(np.arange(NUM_ABSENT, NUM_ITEMS))
    titles = [title_of(int(item)) for item in items]
    table = {"item": items, "title": titles, "title_ids": ids_of(titles, ngrams)}
    pq.write_table(pa.table(table), folder / "items.parquet")
    return path


def pairs(rows):
    return zip(rows["user"].to_pylist(), rows["item"].to_pylist(), strict=True)


def ids_of(texts, ngrams):
    return pa.array([reference(text, ngrams) for text in texts], pa.list_(pa.int64()))


def dataset_at(path: Path, as_text: bool = True, of_items: bool = True, **changes):
    def described(name, pooling):
        if as_text:
            return {"type": "text", "ngrams": NGRAMS, "pooling": pooling}
        return {"type": "id_list", "column": f"{name}_ids", "pooling": pooling}

    features = {"user": {"type": "id"}, "item": {"type": "id"}, "query": described("query", "mean")}
    document = {"name": "clicks", "uri": str(path), "features": features, "label": {"column": "click"}}
    if of_items:
        document["items"] = {"uri": "items.parquet", "features": {"title": described("title", "sum")}}
    return parse_dataset(document | changes)


def text_job(**changes):
    document = {
        "optimizer": {"kind": "adam_ar", "learning_rate": 0.02, "alpha": 0.003},
        "sse": {"title": {"probability": 0.05}, "query": {"probability": 0.1}},
        **changes,
    }
    return job_of(document.pop("model", MODEL), **document)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("log"))


def test_a_text_trains_as_the_list_of_its_ngrams(log, tmp_path):
    snapshots, prepared = [], []
    with single_rank_group():
        for as_text in (True, False):
            data = prepare(dataset_at(log, as_text), text_job(), tmp_path / str(as_text))
            prepared.append({path.name for path in data.directory.rglob("*")})
            trainer = trainer_of(text_job(), data)
            trainer.train()
            snapshots.append(snapshot(trainer))
    assert prepared[0] == prepared[1]
    assert {"title", "query"} <= snapshots[0].keys()
    assert len(snapshots[0]["title"]) > 50
    assert differ(*snapshots) == []


@pytest.mark.parametrize("kind", ["dnn", "din"])
def test_click_models_read_texts_by_join_as_lists(log, tmp_path, kind):
    """din takes rows of every id one by one; the title comes by a join, the join's file has the ids too."""
    snapshots = []
    with single_rank_group():
        for as_text in (True, False):
            join = {"uri": "items.parquet", "on": "item", "column": "title" if as_text else "title_ids"}
            title = {"type": "text", "ngrams": NGRAMS, "join": join}
            if not as_text:
                title = {"type": "id_list", "join": {**join, "take": "all"}}
            base = dataset_at(log, as_text, of_items=False).model_dump(mode="json")
            base["features"]["title"] = title
            if kind == "din":
                base["features"]["again"] = {"type": "id_list", "column": "item", "shares": "item"}
            job = text_job(model={"kind": kind}, epochs=1)
            data = prepare(parse_dataset(base), job, tmp_path / str(as_text))
            trainer = trainer_of(job, data)
            trainer.train()
            snapshots.append(snapshot(trainer))
    assert differ(*snapshots) == []


def test_two_ranks_train_and_rank_as_one_does(log, ranks, tmp_path):
    job = text_job(batch_size=100)
    data = prepare(dataset_at(log), job, tmp_path / "data")
    with single_rank_group():
        expected, metrics = train_on_ranks(data.directory, job, 8)
    split = job.model_copy(update={"sharding": {"title": "row_wise", "query": "row_wise"}})
    (found, scored), _ = ranks(2).run(train_on_ranks, data.directory, split, 8)
    for name, value in expected.items():
        # float64 sums in another order, over some steps of Adam.
        assert float((found[name] - value).abs().max()) < 1e-7, name
    assert scored == pytest.approx(metrics, rel=1e-7)


def test_stopping_and_resuming_changes_no_bit(log, tmp_path):
    job = text_job(batch_size=256)
    data = prepare(dataset_at(log), job, tmp_path / "data")
    with single_rank_group():
        whole, _ = train_in_parts(job, data, tmp_path / "whole", [])
        parts, _ = train_in_parts(job, data, tmp_path / "parts", [2, data.steps_per_epoch])
        assert differ(snapshot(parts), snapshot(whole)) == []


def test_rows_that_are_read_once_have_the_same_ids(log, tmp_path):
    tables = {name: {"capacity": 2000} for name in ("user", "item", "query")}
    split = {"split": {"kind": "column", "column": "part", "validation": 0.0}}
    once = {"name": "clicks", "one_pass": True}
    optimizer = {"kind": "adam", "learning_rate": 0.01}
    job = text_job(
        model={"kind": "dnn"}, dataset=once, tables=tables, sse={}, optimizer=optimizer, epochs=1, evaluation=split
    )
    found = []
    for as_text in (True, False):
        dataset, folder = dataset_at(log, as_text, of_items=False), tmp_path / str(as_text)
        prepare(dataset, job, folder)
        batches = OnePassData.of(folder, dataset, job).train_batches(0)
        found.append([batch.features for batch in batches])
    assert len(found[0]) > 3
    for text, ids in zip(*found, strict=True):
        assert torch.equal(text.values(), ids.values())
        assert torch.equal(text.lengths(), ids.lengths())


@pytest.mark.slow
def test_a_run_predicts_exports_and_goes_on(log, tmp_path):
    """New titles of known words have vectors; a warm start continues the rows of buckets."""
    runs = []
    for number in range(2):
        folder = tmp_path / f"log{number}"
        folder.mkdir()
        path = log if not number else write_texts(folder, seed=1)
        directory = write_run(
            tmp_path / f"run{number}", run_id=f"run{number}", job=text_job(), dataset=dataset_at(path),
            store_url=str(tmp_path / "store"),
            init_checkpoint=str(runs[0].checkpoints) if runs else None,
        )  # fmt: skip
        runs.append(read_run(directory))
        assert execute(runs[-1], start_ranks) == 0
    first, second = (PreparedData.open(run.data) for run in runs)
    old, new = first.vocabulary("title").to_pylist(), second.vocabulary("title").to_pylist()
    assert new[: len(old)] == old
    rows = pq.read_table(log).slice(0, 50)
    predictor = Predictor(runs[0].directory)
    by_run = predictor.predict(rows)
    export(runs[0].directory, tmp_path / "export")
    by_export = Exported(tmp_path / "export").predict(rows)
    np.testing.assert_allclose(by_run["score"], by_export["score"], rtol=1e-4, atol=1e-5)
    # What the query says matters: the same rows without it are other rows.
    other = rows.set_column(rows.column_names.index("query"), "query", pa.nulls(len(rows), pa.string()))
    assert not np.allclose(predictor.predict(other)["score"], by_run["score"])
    wrong = rows.set_column(rows.column_names.index("query"), "query", rows["user"])
    with pytest.raises(DataError, match=r"column 'query'.*holds int64, and a text is one string for each row"):
        predictor.predict(wrong)


def test_a_column_that_is_no_text_is_refused_before_training(log, tmp_path):
    for name, changes in {
        "user": {"features": {"user": {}, "item": {}, "query": {"type": "text", "column": "user"}}},
        "title_ids": {
            "items": {"uri": "items.parquet", "features": {"title": {"type": "text", "column": "title_ids"}}}
        },
    }.items():
        with pytest.raises(DataError, match=f"column '{name}': holds .*one string for each row"):
            prepare(dataset_at(log, **changes), text_job(sse={}), tmp_path / "data")


def test_the_estimate_counts_ngrams(log):
    job = text_job()
    assert ids_per_example(job, dataset_at(log))["title"] == 2 * 8 + 48
    found = estimate(job, dataset_at(log))
    counted = len({one for ids in pq.read_table(log)["query_ids"].to_pylist() for one in ids})
    assert found["tables"]["query"]["rows"] == counted + 2
    assert found.memory.batches > estimate(job, dataset_at(log, as_text=False)).memory.batches


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"b": {"type": "text", "shares": "item"}}, "features.b.shares: 'b' is a text, whose ids are buckets"),
        ({"b": {"type": "id_list", "shares": "query"}}, "features.b.shares: 'query' is a text, whose ids are buckets"),
        ({"b": {"type": "text", "shares": "query"}}, "features.b.shares: 'b' and 'query' have different n-grams"),
        ({"b": {"ngrams": {"words": [1, 2]}}}, "ngrams is for texts: leave it out, or set type: text"),
        ({"b": {"type": "text", "missing": "error"}}, "missing: error is for single ids and numbers"),
        ({"b": {"type": "text", "transform": "log1p"}}, "transform is for dense features"),
        ({"b": {"type": "text", "weights": "w"}}, "weights are for an id_list"),
    ],
)
def test_what_does_not_go_with_a_text(features, message):
    base = {"user": {}, "item": {}, "query": {"type": "text", "ngrams": {"buckets": 7}}}
    with pytest.raises(SpecError, match=message):
        dataset_at(Path("rows.parquet"), features=base | features)
    shared = base | {"b": {"type": "text", "ngrams": {"buckets": 7}, "shares": "query"}}
    assert dataset_at(Path("rows.parquet"), features=shared).features["b"].shares == "query"
