"""Hard negatives of two_tower and bpr against plain loops: who is drawn, what it brings along, ranks and resumes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.item_tables import dataset_at, job_of, prepared_log
from trainer.data.batches.hard_negatives import HARD_DRAWS, NEIGHBORS_FILE, expected_shares
from trainer.data.columns.hashing import below, derive_key, random_words, unit_interval
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare
from trainer.spec import parse_dataset, parse_job

HARD = {"share": 0.6, "nearest": 5}
PUBLISH = {"collection": "items", "feature": "item", "gate": {"mode": "off"}}
DRAWN = {"label": {"negatives": {"per_positive": 2, "of": "item"}}}
MODELS = {
    "two_tower": {"loss": "sampled_softmax", "hard_negatives": HARD},
    "bpr": {"kind": "bpr", "hard_negatives": HARD},
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return prepared_log(tmp_path_factory.mktemp("log"))


def dataset_of(log, kind):
    if kind == "two_tower":
        return dataset_at(log, **DRAWN)
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    return parse_dataset({"name": "clicks", "uri": str(log), "features": features, **DRAWN})


def hard_job(kind):
    if kind == "two_tower":
        return job_of(MODELS[kind], publish=PUBLISH)
    document = job_of(publish=PUBLISH).model_dump(mode="json")
    return parse_job(document | {"model": {"embedding_dim": 4, **MODELS[kind]}})


def write_made_up_neighbors(data):
    """Five random trained items for each, fewer for some, none for every seventh."""
    rng, counts = np.random.default_rng(1), data.row_counts("item")
    trained = np.flatnonzero(counts[2:] > 0) + 2
    neighbors = np.full((len(counts), HARD["nearest"]), -1, dtype=np.int32)
    for row in trained:
        others = rng.choice(trained[trained != row], HARD["nearest"], replace=False)
        count = (row % 3) + 3 if row % 7 else 0
        neighbors[row, :count] = others[:count]
    np.save(data.directory / NEIGHBORS_FILE, neighbors)
    return neighbors


@pytest.fixture(scope="module", params=["two_tower", "bpr"])
def case(request, log, tmp_path_factory):
    kind = request.param
    data = prepare(dataset_of(log, kind), hard_job(kind), tmp_path_factory.mktemp(kind) / "data")
    return kind, data, write_made_up_neighbors(data)


def columns(data):
    users, items = (np.asarray(data.column("train", key)) for key in data.keys[:2])
    return users, items, np.asarray(data.labels("train"))


def had_by(data, users, items, labels):
    return {(int(user), int(item)) for user, item in zip(users[labels > 0], items[labels > 0], strict=True)}


def drawn_by_loops(near, user, had, sample, key):
    """The first of the drawn neighbours that the user never had; None where the sample is not to be hard."""
    near = [int(row) for row in near if row >= 0]

    def word(number):
        return random_words(key, np.array([sample * (HARD_DRAWS + 1) + number]))

    if not near or unit_interval(word(0))[0] >= HARD["share"]:
        return None
    for number in range(1, HARD_DRAWS + 1):
        other = near[int(below(word(number), len(near))[0])]
        if (int(user), other) not in had:
            return other
    return None


def items_of(kind, batches):
    name = "item" if kind == "two_tower" else "item__negative"
    return np.concatenate([batch.features[name].values().numpy() for batch in batches])


def test_who_is_drawn(case):
    """Each differs from what was drawn before by the equation alone: share, neighbour, not had by the user."""
    kind, data, neighbors = case
    users, items, labels = columns(data)
    epoch, had = 1, had_by(data, users, items, labels)
    rows = data.order().rows(epoch, 0, data.num_examples["train"])
    found = items_of(kind, data.train_batches(epoch))
    hard_key, positive_key = derive_key(data.seed, epoch, 23), derive_key(data.seed, epoch, 24)
    num_hard = 0
    for start in range(0, len(rows), data.batch_size):
        batch = rows[start : start + data.batch_size]
        positives = batch[labels[batch] > 0]
        for sample, row in enumerate(batch, start):
            if kind == "two_tower" and labels[row] > 0:
                assert found[sample] == items[row], "a positive keeps its item"
                continue
            positive = row
            if kind == "two_tower":
                positive = positives[int(below(random_words(positive_key, np.array([sample])), len(positives))[0])]
            other = drawn_by_loops(neighbors[items[positive]], users[positive], had, sample, hard_key)
            if other is not None:
                num_hard += 1
                assert found[sample] == other
                assert (users[positive], other) not in had
            elif kind == "two_tower":
                assert found[sample] == items[row]
            else:
                assert (users[row], found[sample]) not in had
    assert num_hard > 100


def test_ranks_and_batches_from_the_middle_on_are_the_same(case):
    kind, data, _ = case
    whole = list(data.train_batches(1))
    parts = [list(data.train_batches(1, 0, rank, 2)) for rank in range(2)]
    later = list(data.train_batches(1, 2))
    other_epoch = items_of(kind, data.train_batches(0))
    assert not np.array_equal(items_of(kind, whole), other_epoch)
    for name in [key.name for key in data.keys]:
        for number, batch in enumerate(whole):
            both = np.concatenate([part[number].features[name].values().numpy() for part in parts])
            assert np.array_equal(both, batch.features[name].values().numpy())
        for batch, same in zip(whole[2:], later, strict=True):
            assert np.array_equal(batch.features[name].values().numpy(), same.features[name].values().numpy())


@pytest.mark.parametrize("case", ["two_tower"], indirect=True)
def test_features_and_numbers_of_the_item_come_along(case):
    _, data, _ = case
    catalogue = data.catalogue
    places = catalogue.place_of_row(data.tables["item"].num_rows)
    genres = catalogue.features["genres"]
    for batch in data.train_batches(0):
        items = places[batch.features["item"].values().numpy()]
        assert np.array_equal(batch.features["brand"].values().numpy(), catalogue.features["brand"][items])
        lengths = batch.features["genres"].lengths().numpy()
        assert np.array_equal(lengths, genres.lengths[items])
        assert np.array_equal(batch.features["genres"].values().numpy(), genres.take(items).values)
        np.testing.assert_array_equal(batch.dense.numpy(), catalogue.numbers[items])


@pytest.mark.parametrize("case", ["two_tower"], indirect=True)
def test_log_q_expects_hard_negatives(case):
    _, data, neighbors = case
    _, items, labels = columns(data)
    positives, total = items[labels > 0], np.zeros(len(neighbors))
    num_negatives = int((labels == 0).sum())
    has = np.mean([neighbors[item, 0] >= 0 for item in positives])
    for item, label in zip(items, labels, strict=True):
        total[item] += 1.0 if label else 1.0 - HARD["share"] * has
    for item in positives:
        near = neighbors[item][neighbors[item] >= 0]
        for other in near:
            total[other] += HARD["share"] * num_negatives / len(positives) / len(near)
    np.testing.assert_allclose(expected_shares(data), total / len(items), rtol=1e-12)


def test_without_neighbors_the_folder_is_named(log, tmp_path):
    data = prepare(dataset_of(log, "two_tower"), hard_job("two_tower"), tmp_path / "data")
    with pytest.raises(DataError, match=r"model.hard_negatives needs neighbors.npy.*a run writes it from the last"):
        list(data.train_batches(0))
