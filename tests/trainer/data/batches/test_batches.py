"""Batches: ranks' slices put together are the global batch, for any world size and any start."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data.batches.prepared import PreparedData
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare

HISTORY = {
    "user": {"type": "id"},
    "item": {"type": "id"},
    "tags": {"type": "id_list", "pooling": "sum"},
    "history": {
        "type": "id_list",
        "derive": {"previous": "item", "by": "user", "order": "ts", "length": 3},
        "shares": "item",
    },
}


@pytest.fixture(params=["dnn", "bpr"])
def data(request, clicks, dataset_spec, job_spec, tmp_path) -> PreparedData:
    table = clicks(330)
    generator = np.random.default_rng(1)
    tags = [generator.integers(0, 9, generator.integers(0, 4)).tolist() for _ in range(330)]
    dataset = dataset_spec(table.append_column("tags", pa.array(tags)), features=HISTORY)
    return prepare(dataset, job_spec(model={"kind": request.param}, batch_size=50, seed=4), tmp_path / "data")


def flat(batch):
    """Per sample: the lists of each key, and the label."""
    lists = [batch.features[key].to_dense() for key in list(batch.features.keys())]
    return [
        ([one[i].tolist() for one in lists], float(batch.labels[i]), batch.sample_offset + i) for i in range(len(batch))
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world_size=st.integers(1, 4), epoch=st.integers(0, 2), start=st.integers(0, 6))
def test_slices_of_all_ranks_are_the_global_batch(data, world_size, epoch, start):
    whole = list(data.train_batches(epoch))[start:]
    ranks = [list(data.train_batches(epoch, start, rank, world_size)) for rank in range(world_size)]
    assert all(len(batches) == len(whole) for batches in ranks)
    for step, batch in enumerate(whole):
        parts = [batches[step] for batches in ranks]
        assert [sample for part in parts for sample in flat(part)] == flat(batch)
        assert {part.global_size for part in parts} == {len(batch)}
        assert {part.step for part in parts} == {epoch * data.steps_per_epoch + start + step}


@pytest.mark.parametrize("split", ["validation", "test", "train"])
def test_evaluation_covers_every_row_once_in_order(data, split):
    batches = list(data.eval_batches(split, 7))
    labels = torch.cat([batch.labels for batch in batches])
    assert labels.tolist() == data.labels(split).tolist()
    for world_size in (2, 3, 4):
        ranks = [list(data.eval_batches(split, 7, rank, world_size)) for rank in range(world_size)]
        for step, batch in enumerate(batches):
            assert [sample for parts in ranks for sample in flat(parts[step])] == flat(batch)


def test_an_epoch_holds_every_training_row(data):
    key = data.keys[0]
    seen = torch.cat([batch.features[key.name].values() for batch in data.train_batches(1)])
    assert sorted(seen.tolist()) == sorted(data.column("train", key).tolist())
    assert len(seen) == data.num_examples["train"]


def test_a_rank_without_samples_gets_an_empty_batch(data):
    last = data.num_examples["train"] % data.batch_size
    batches = [next(iter(data.train_batches(0, data.steps_per_epoch - 1, rank, last + 1))) for rank in range(last + 1)]
    assert [len(batch) for batch in batches] == [0] + [1] * last
    empty = batches[0]
    assert empty.features.keys() == [key.name for key in data.keys]
    assert empty.features.stride() == 0
    assert empty.features.offsets().tolist() == [0]


def test_layout_is_feature_major_int64(data):
    batch = next(iter(data.train_batches(0)))
    features = batch.features
    assert features.values().dtype == features.offsets().dtype == torch.int64
    assert batch.labels.dtype == torch.float32
    assert features.lengths().shape == (len(data.keys) * len(batch),)
    assert torch.equal(torch.diff(features.offsets()), features.lengths())
    assert int(features.values().min()) >= 1  # row 0 is padding and never looked up


def test_seeds_order_differently_and_repeat_exactly(clicks, dataset_spec, job_spec, tmp_path):
    def labels(directory, seed):
        data = prepare(dataset_spec(clicks(300)), job_spec(seed=seed), tmp_path / directory)
        return [batch.features.values().tolist() for batch in data.train_batches(0)]

    first = labels("a", 1)
    assert labels("b", 1) == first
    assert labels("c", 2) != first


def test_batches_move_between_devices(data):
    batch = next(iter(data.train_batches(0))).to("cpu")
    assert batch.features.device() == torch.device("cpu")
    assert batch.global_size == 50


def test_two_readers_at_once_do_not_disturb_each_other(data):
    epochs = [[flat(batch) for batch in data.train_batches(epoch)] for epoch in (0, 1)]
    both = zip(data.train_batches(0), data.train_batches(1), strict=True)
    together = [(flat(first), flat(second)) for first, second in both]
    assert [list(part) for part in zip(*together, strict=True)] == epochs


def test_stopping_early_ends_the_reading_thread(data):
    iterator = data.eval_batches("train", 2)  # far more batches than are made ahead
    next(iterator)
    assert any(thread.name == "evenkeel-batches" for thread in threading.enumerate())
    iterator.close()
    assert not any(thread.name == "evenkeel-batches" for thread in threading.enumerate())


def test_a_prepared_column_that_lost_rows_is_named(data):
    path = data.directory / "train" / "user.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"feature 'user'.* holds .* rows.*remove the folder"):
        next(data.train_batches(0))
