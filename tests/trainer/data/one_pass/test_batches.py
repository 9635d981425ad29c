"""Batches of rows that are read while they are trained on: those of a preparation; each row once; from any place on."""

from __future__ import annotations

import shutil
import tracemalloc
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches.order import shuffled
from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.columns.hashing import combine, id_keys, random_words, unmix
from trainer.data.errors import DataError
from trainer.data.one_pass import windows
from trainer.data.one_pass.data import UNKNOWN_STEPS, OnePassData
from trainer.data.one_pass.position import Place
from trainer.data.one_pass.rows import MISSING
from trainer.data.prepare.preparation import prepare
from trainer.data.prepare.split import SPLIT_NAMES, random_split
from trainer.data.sources.source import Source
from trainer.sizing import memory
from trainer.sizing.estimate import ids_per_example
from trainer.spec import parse_dataset, parse_job

FEATURES = {
    "user": {"type": "id"},
    "item": {"type": "id"},
    "tags": {"type": "id_list", "weights": "w", "shares": "item"},
    "price": {"type": "dense", "transform": "log1p", "missing": 0.5},
}
CAPACITY = {"capacity": 100}


@dataclass(frozen=True)
class Kind:
    """What of a dataset and a job decides how rows are read."""

    label: str = "column"
    split: str = "random"
    weight: bool = False
    strings: bool = True
    lists: bool = True


def write_rows(folder, kind: Kind, sizes=(200, 300), seed=0):
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    count = sum(sizes)
    item = rng.integers(0, 40, count)
    lengths = rng.integers(0, 4, count)
    tags = [rng.integers(0, 30, length).tolist() for length in lengths]
    table = pa.table(
        {
            "user": pa.array(rng.integers(0, 12, count) * 7 - 20, mask=rng.random(count) < 0.05),
            "item": pa.array([f"i{one}" for one in item] if kind.strings else item, mask=rng.random(count) < 0.05),
            "tags": [[f"i{one}" for one in row] for row in tags] if kind.strings else tags,
            "w": [rng.random(length).tolist() for length in lengths],
            "price": pa.array(rng.lognormal(size=count), mask=rng.random(count) < 0.1),
            "click": rng.integers(0, 2, count),
            "bought": pa.array(rng.integers(0, 2, count), mask=rng.random(count) < 0.3),
            "heavy": rng.integers(0, 3, count).astype(float),
            "side": [SPLIT_NAMES[side] for side in rng.choice(3, count, p=(0.7, 0.1, 0.2))],
            "number": np.arange(count, dtype=np.float64),
        }
    )
    start = 0
    for part, size in enumerate(sizes):
        pq.write_table(table.slice(start, size), folder / f"{part:03}.parquet", row_group_size=37)
        start += size
    return table


def specs(folder, kind: Kind, **changes: Any):
    labels = {"labels": {"click": {"column": "click"}, "bought": {"column": "bought", "weight": 0.5}}}
    dataset = {
        "name": "log", "uri": str(folder),
        "features": {name: one for name, one in FEATURES.items() if kind.lists or name != "tags"},
        **({"weight": "heavy"} if kind.weight else {}),
        **(labels if kind.label == "several" else {"label": {kind.label: "click"}}),
    }  # fmt: skip
    split = {"kind": "column", "column": "side", "validation": 0} if kind.split == "column" else {"kind": "random"}
    model: dict[str, Any] = {"kind": "dcnv2", "embedding_dim": 4, "hidden": [8]}
    if kind.label == "several":
        model = {"kind": "shared_bottom", "embedding_dim": 4}
    if kind.label == "value":
        model["loss"] = "mse"
    job = {
        "name": "job", "dataset": {"name": "log", "one_pass": True}, "model": model,
        "tables": {"user": CAPACITY, "item": CAPACITY}, "optimizer": {"kind": "adagrad"}, "batch_size": 96, "seed": 5,
        "evaluation": {"split": split},
    }  # fmt: skip
    return parse_dataset(dataset), parse_job(job | changes)


def opened(folder, dataset, job) -> OnePassData:
    return OnePassData.of(prepare(dataset, job, folder).directory, dataset, job)


def trained(data, **settings):
    """All batches of training; then the data know that it is over."""
    batches = list(data.train_batches(0, **settings))
    data.begin(batches[-1].place)
    return batches


KINDS = [
    Kind(),
    Kind(strings=False, lists=False),
    Kind(split="column", weight=True),
    Kind(label="several", weight=True),
    Kind(label="value", lists=False),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_batches_are_those_of_a_preparation_where_one_window_holds_all(tmp_path, kind):
    """Row for row, with hashes in the place of codes: splits, order, labels, numbers, weights, shares."""
    write_rows(tmp_path / "rows", kind)
    dataset, job = specs(tmp_path / "rows", kind, micro_batches=2)
    prepared = prepare(dataset, job.model_copy(update={"dataset": job.dataset.model_copy(update={"one_pass": False})}),
                       tmp_path / "prepared")  # fmt: skip
    data = opened(tmp_path / "data", dataset, job)
    assert data.steps_per_epoch == UNKNOWN_STEPS
    raw = {table: prepared.row_keys(table).view(np.int64) for table in prepared.tables}

    def same(found, expected, unknown):
        assert found.features.keys() == expected.features.keys()
        for name in found.features.keys():  # noqa: SIM118 - no mapping
            keys, rows = (one.features[name].values().numpy() for one in (found, expected))
            table = next(key.table for key in data.keys if key.name == name)
            known = rows >= 2
            assert np.array_equal(keys[known], raw[table][rows[known]])
            assert (keys[~known] == MISSING).all() or unknown
            assert torch.equal(found.features[name].lengths(), expected.features[name].lengths())
        pairs = [(getattr(one, name) for one in (found, expected)) for name in ("labels", "dense", "shares")]
        pairs.append(one.features.weights_or_none() for one in (found, expected))
        for ours, theirs in pairs:
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(torch.nan_to_num(ours, -1), torch.nan_to_num(theirs, -1))
        places = ("sample_offset", "part_offset", "global_size", "step")
        assert [getattr(found, one) for one in places] == [getattr(expected, one) for one in places]

    ours, theirs = trained(data, micro_batches=2), list(prepared.train_batches(0, micro_batches=2))
    assert len(ours) == len(theirs) > 6
    for found, expected in zip(ours, theirs, strict=True):
        same(found, expected, unknown=False)
    assert data.num_examples == prepared.num_examples
    assert data.steps_per_epoch == prepared.steps_per_epoch
    for split in ("validation", "test"):
        ours, theirs = (list(one.eval_batches(split, 30)) for one in (data, prepared))
        assert len(ours) == len(theirs) > 0
        for found, expected in zip(ours, theirs, strict=True):
            same(found, expected, unknown=True)


def plain_batches(table, job, sizes, chunk_rows, window_rows, has_pairs):
    """Numbers of rows by step, and the sides of all rows, computed row by row."""
    user, item = (table.column(name).to_pylist() for name in ("user", "item"))

    def keys(ids):
        return np.array([0x6E756C6C if one is None else int(id_keys(pa.array([one]))[0]) for one in ids], np.uint64)

    pairs = combine(keys(user), keys(item)) if has_pairs else combine(random_words(0, np.arange(len(user))))
    sides = random_split(job.evaluation.split, pairs)
    chunks, start = [], 0
    for size in sizes:
        chunks += [list(range(first, min(first + chunk_rows, start + size)))
                   for first in range(start, start + size, chunk_rows)]  # fmt: skip
        start += size
    order: list[int] = []
    window: list[int] = []
    number = 0
    for index, chunk in enumerate(chunks):
        window += chunk
        if len(window) >= window_rows or index == len(chunks) - 1:
            train = [row for row in window if sides[row] == 0]
            order += [train[place] for place in shuffled(job.seed, 0, number, len(train))]
            window, number = [], number + 1
    return [order[first : first + job.batch_size] for first in range(0, len(order), job.batch_size)], sides


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    chunk_rows=st.integers(5, 50),
    window_rows=st.integers(1, 120),
    batch_size=st.integers(1, 90),
    world=st.integers(1, 3),
    has_pairs=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_each_row_is_trained_on_once_and_from_the_place_of_any_batch_on_come_those_that_follow(
    tmp_path_factory, sizes, chunk_rows, window_rows, batch_size, world, has_pairs, seed
):
    """For any files, chunks and windows; ranks have consecutive parts of each batch, and the ids of the whole."""
    folder = tmp_path_factory.mktemp("log")
    kind = Kind(strings=False, lists=False)
    table = write_rows(folder / "rows", kind, sizes, seed)
    dataset, job = specs(folder / "rows", kind, batch_size=batch_size)
    features: dict[str, Any] = {"user": {"type": "id"}, "number": {"type": "dense", "missing": 0.0}}
    features |= {"item": {"type": "id"}} if has_pairs else {}
    dataset = parse_dataset(dataset.model_dump(mode="json") | {"features": features})
    job = job.model_copy(update={"tables": {name: one for name, one in job.tables.items() if name in features}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source.stream, "__defaults__", (chunk_rows,))
        patch.setattr(windows, "WINDOW_ROWS", window_rows)
        expected, sides = plain_batches(table, job, sizes, chunk_rows, window_rows, has_pairs)
        data = opened(folder / "data", dataset, job)
        if not expected:
            with pytest.raises(DataError, match="training split: has no rows"):
                list(data.train_batches(0))
            return
        ranks = []
        for rank in range(world):
            data.begin(Place())
            ranks.append(trained(data, rank=rank, world_size=world))
        of_step = list(zip(*ranks, strict=True))
        found = [torch.cat([part.dense[:, 0] for part in parts]).to(int).tolist() for parts in of_step]
        assert found == expected
        for parts, rows in zip(of_step, expected, strict=True):
            user = [one for one in table.column("user").take(rows).to_pylist() if one is not None]
            for part in parts:
                assert unmix(part.id_keys["user"].view(np.uint64)).view(np.int64).tolist() == user
                assert part.place == parts[0].place
        assert [part.place.is_end for part in ranks[0]] == [False] * (len(expected) - 1) + [True]
        places = [Place(), *(part.place for part in ranks[0])]
        assert all(before.rows <= after.rows for before, after in pairwise(places))
        assert list(data.num_examples.values()) == np.bincount(sides, minlength=3).tolist()
        for split, count in list(data.num_examples.items())[1:]:
            batches = list(data.eval_batches(split, 7, 0, 1)) if count else []
            held = [number for batch in batches for number in batch.dense[:, 0].to(int).tolist()]
            assert held == np.flatnonzero(sides == SPLIT_NAMES.index(split)).tolist()
        for step in {1, len(expected) // 2, len(expected)}:
            data.begin(Place.of_json(asdict(places[step])))
            rest = [batch.dense[:, 0].to(int).tolist() for batch in data.train_batches(0, step)]
            assert rest == expected[step:]


def test_the_first_batch_comes_while_most_windows_are_unread(tmp_path, monkeypatch):
    """The windows that are read ahead are bounded, however many there are."""
    kind = Kind()
    write_rows(tmp_path / "rows", kind, [120] * 40)
    dataset, job = specs(tmp_path / "rows", kind)
    monkeypatch.setattr(windows, "WINDOW_ROWS", 100)
    read: list[int] = []
    original = windows.WindowReader._read

    def noted(self, chunk, first_row):
        read.append(first_row)
        return original(self, chunk, first_row)

    monkeypatch.setattr(windows.WindowReader, "_read", noted)
    data = opened(tmp_path / "data", dataset, job)
    assert read == []
    taken = [len(read) for _ in data.train_batches(0)]
    # Four batches wait, of up to two windows each; one is cut, and two windows are ready or in work behind it.
    assert taken[0] <= 14 < len(read) == 40


def test_rows_in_memory_are_as_many_as_predicted_however_many_are_read(tmp_path, monkeypatch):
    rows, names = 5000, [f"f{number}" for number in range(12)]
    rng = np.random.default_rng(0)
    (tmp_path / "rows").mkdir()
    for number in range(12):
        columns = {name: rng.integers(0, 1 << 40, rows) for name in names} | {"click": rng.integers(0, 2, rows)}
        pq.write_table(pa.table(columns), tmp_path / "rows" / f"{number:03}.parquet")
    dataset, job = specs(tmp_path / "rows", Kind(), tables=dict.fromkeys(names, CAPACITY))
    dataset = parse_dataset(dataset.model_dump(mode="json") | {"features": {name: {"type": "id"} for name in names}})
    monkeypatch.setattr(windows, "WINDOW_ROWS", rows)
    monkeypatch.setattr(memory, "WINDOW_ROWS", rows)
    data = opened(tmp_path / "data", dataset, job)
    predicted = memory.window_bytes(job, ids_per_example(job, dataset))
    assert predicted < 12 * 12 * rows * 8
    tracemalloc.start()
    try:
        for _ in data.train_batches(0):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert predicted / 4 < peak < predicted


@pytest.mark.parametrize("what", ["is gone", "has changed since the run began"])
def test_a_file_that_goes_or_changes_before_it_is_read_is_refused_and_one_that_comes_is_not_read(tmp_path, what):
    folder = tmp_path / "rows"
    write_rows(folder, Kind())
    dataset, job = specs(folder, Kind())
    prepare(dataset, job, tmp_path / "data")
    shutil.copy(folder / "001.parquet", folder / "002.parquet")
    data = OnePassData.of(tmp_path / "data", dataset, job)
    trained(data)
    assert data.place.rows == 500
    if what == "is gone":
        (folder / "001.parquet").unlink()
    else:
        (folder / "001.parquet").touch()
    with pytest.raises(DataError, match=rf"001.parquet: {what}"):
        list(OnePassData.of(tmp_path / "data", dataset, job).train_batches(0))


def test_files_that_hold_less_than_was_trained_on_are_refused_by_evaluation(tmp_path):
    kind = Kind()
    write_rows(tmp_path / "rows", kind)
    dataset, job = specs(tmp_path / "rows", kind)
    data = opened(tmp_path / "data", dataset, job)
    trained(data)
    data.num_examples["test"] += 1
    with pytest.raises(DataError, match="fewer rows in the split test than when they were trained on"):
        list(data.eval_batches("test", 1000))


def test_integers_are_the_ids_of_a_warm_start_that_has_text(tmp_path):
    kind, base, found = Kind(strings=False, lists=False), {"item": IdMap(pa.array(["7", "x"]))}, []
    table = write_rows(tmp_path / "integers", kind)
    (tmp_path / "texts").mkdir()
    as_text = table.set_column(table.column_names.index("item"), "item", table["item"].cast(pa.string()))
    pq.write_table(as_text, tmp_path / "texts" / "rows.parquet")
    for name in ("integers", "texts"):
        dataset, job = specs(tmp_path / name, kind)
        prepared = prepare(dataset, job, tmp_path / f"data-{name}", base_vocabulary=base)
        found.append([batch.id_keys["item"] for batch in trained(OnePassData.of(prepared.directory, dataset, job))])
    assert sum(map(len, found[0])) > 100
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
    with pytest.raises(DataError, match="the warm start's ids are int64, this data's are large_string"):
        prepare(*specs(tmp_path / "texts", kind), tmp_path / "no", base_vocabulary={"item": IdMap(pa.array([7]))})


def test_text_without_types_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("user,item,click,price\n1,2,0,1\n")
    dataset, job = specs(tmp_path / "rows.csv", Kind(lists=False))
    with pytest.raises(DataError, match=r"is CSV, whose column types .*write Parquet or Feather or ORC"):
        prepare(dataset, job, tmp_path / "data")
