"""Recent negatives: of the rows just before an example, all alike, never one that the user had, on any ranks."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.spec import SpecError, parse_dataset, parse_job
from trainer.spec.problems import InvalidFieldsError

WINDOW, ROWS = 20, 1500


def recent(table, dataset_spec, job_spec, directory, **fields) -> PreparedData:
    model = {"kind": "bpr", "negative_distribution": "recent", "negative_window": WINDOW}
    return prepare(dataset_spec(table, timestamp="ts"), job_spec(model=model, batch_size=200, **fields), directory)


def draws(data, epoch=0, start=0, rank=0, world_size=1, parts=1) -> list[list[np.ndarray]]:
    """Return users, items and negatives of each batch, as rows of tables."""
    batches = data.train_batches(epoch, start, rank, world_size, parts)
    return [[batch.features[key.name].values().numpy() for key in data.keys] for batch in batches]


def test_any_row_of_the_window_before_is_as_likely_and_no_other_is_drawn(dataset_spec, job_spec, tmp_path):
    """Each row is an item of its own here, so that what is drawn says when it was clicked."""
    generator = np.random.default_rng(0)
    times, labels = generator.integers(0, 500, ROWS), generator.integers(0, 2, ROWS)
    columns = {"user": np.arange(ROWS), "item": np.arange(ROWS), "click": labels, "ts": times}
    data = recent(pa.table(columns), dataset_spec, job_spec, tmp_path / "data")
    rows = np.asarray(data.vocabulary("item"))
    trained = rows[np.asarray(data.column("train", data.keys[1])) - 2]
    assert 0 < len(trained) < labels.sum(), "held-out positives are needed: they are in no window"
    ordered = np.sort(times[trained])
    places, first = [], set()
    for epoch in range(8):
        for _, items, negatives in draws(data, epoch):
            own, drawn = times[rows[items - 2]], times[rows[negatives - 2]]
            before = np.searchsorted(ordered, own, side="left")
            first |= set(own[before == 0].tolist())
            there = before >= WINDOW
            assert (drawn[before > 0] < own[before > 0]).all()
            assert (drawn[there] >= ordered[before[there] - WINDOW]).all()
            places += (before - np.searchsorted(ordered, drawn, side="left"))[there].tolist()
    assert first == {ordered[0]}, "what has nothing before it takes a uniform item"
    # Ties share a place: how far back a draw lies is uniform on 1 .. WINDOW but for them.
    assert abs(np.mean(places) - (WINDOW + 1) / 2) < 1.5
    assert abs(np.std(places) - WINDOW / np.sqrt(12)) < 1.0


def test_any_ranks_cuts_and_resumes_draw_the_same_and_none_that_the_user_had(clicks, dataset_spec, job_spec, tmp_path):
    table = clicks(2500, users=150, items=25).set_column(2, "click", [np.ones(2500, np.int64)])
    data = recent(table, dataset_spec, job_spec, tmp_path / "data")
    whole = [negatives.tolist() for *_, negatives in draws(data, 1)]
    assert [negatives.tolist() for *_, negatives in draws(PreparedData.open(data.directory), 1, 2)] == whole[2:]
    ranks = [draws(data, 1, 0, rank, 2, 2) for rank in range(2)]
    for step, one in enumerate(whole):
        pieces = [ranks[rank][2 * step + part][2] for part in range(2) for rank in range(2)]
        assert np.concatenate(pieces).tolist() == one
    assert [negatives.tolist() for *_, negatives in draws(data, 0)] != whole
    user, item = (np.asarray(data.column("train", key)).tolist() for key in data.keys[:2])
    had = set(zip(user, item, strict=True))
    for users, _, negatives in draws(data):
        assert not had & set(zip(users.tolist(), negatives.tolist(), strict=True))


def test_another_window_is_other_data(clicks, dataset_spec, job_spec, tmp_path):
    """A directory that was prepared for one is not taken for the other's."""
    table = clicks(300)
    dataset = dataset_spec(table, timestamp="ts")
    fingerprints = set()
    for fields in ({}, {"negative_distribution": "recent"}, {"negative_distribution": "recent", "negative_window": 7}):
        data = prepare(dataset, job_spec(model={"kind": "bpr", **fields}), tmp_path / "data")
        fingerprints.add(data.fingerprint)
        assert data.sampling_window == (fields.get("negative_window", 10_000) if fields else None)
    assert len(fingerprints) == 3


def test_where_rows_have_no_time_it_is_refused():
    job = {"name": "j", "dataset": {"name": "d"}}
    for model, says in (
        ({"kind": "sasrec", "negative_distribution": "recent"}, "which have no time of their own"),
        ({"kind": "bpr", "negative_window": 5}, "uniform has none"),
        ({"kind": "bpr", "negative_distribution": "recent", "negative_power": 1.0}, "recent has none"),
    ):
        with pytest.raises(SpecError, match=says):
            parse_job({**job, "model": model})
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    dataset = parse_dataset({"name": "d", "uri": "d.parquet", "features": features, "label": {"column": "click"}})
    spec = parse_job({**job, "model": {"kind": "bpr", "negative_distribution": "recent"}})
    with pytest.raises(InvalidFieldsError, match=r"'d' has no timestamp.*name the column of times"):
        spec.against(dataset)
