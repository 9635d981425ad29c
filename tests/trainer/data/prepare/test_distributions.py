"""Negatives by popularity and in the batch: distributed as they claim, never seen ones, the same on any ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batches.fresh_negatives import IN_BATCH_DRAWS
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.hashing import random_words
from trainer.data.prepare.negatives import PopularUnseen, SeenItems, popularity_weights
from trainer.data.prepare.preparation import prepare
from trainer.spec import SpecError, parse_job

KINDS = ("bpr", "sasrec", "item2vec")


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations above its mean: of d degrees of freedom both are d and sqrt(2 d)."""
    assert counts[expected == 0].sum() == 0
    there = expected > 0
    degrees = int(there.sum()) - 1
    found = float((np.square(counts - expected)[there] / expected[there]).sum())
    return (found - degrees) / math.sqrt(2 * degrees)


@given(st.data(), st.integers(2, 12), st.integers(1, 6))
def test_popular_draws_are_never_seen_and_reach_every_other(data, num_items, num_users):
    pairs = data.draw(st.lists(st.tuples(st.integers(0, num_users - 1), st.integers(0, num_items - 1)), max_size=40))
    counts = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num_items, max_size=num_items)))
    users, items = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in range(2))
    weights = popularity_weights(counts, 0.5)
    popular = PopularUnseen(SeenItems.from_pairs(users, items, num_users, num_items), weights)
    live = set(np.flatnonzero(counts).tolist())
    for user in range(num_users):
        left = live - {item for u, item in pairs if u == user}
        assert popular.unseen_weight(np.array([user]))[0] == weights[sorted(left)].sum()
        if live:
            draws = popular.draw(np.full(900, user), random_words(user, np.arange(900)))
            # The rarest of 12 has 1/34 of the weight: 900 draws miss it with probability e^-26.
            assert set(draws.tolist()) == (left or live)


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_popular_draws_have_their_weights(power):
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 60, 40)
    had = np.array([1, 7, 8, 30])
    popular = PopularUnseen(SeenItems.from_pairs(np.zeros(4, np.int64), had, 1, 40), popularity_weights(counts, power))
    draws = popular.draw(np.zeros(60_000, np.int64), random_words(3, np.arange(60_000)))
    wanted = np.where(counts > 0, counts.astype(float) ** power, 0.0)
    wanted[had] = 0.0
    assert chi_square(np.bincount(draws, minlength=40), 60_000 * wanted / wanted.sum()) < 4


def test_weights_of_one_are_the_uniform_draws():
    generator = np.random.default_rng(1)
    seen = SeenItems.from_pairs(generator.integers(0, 9, 60), generator.integers(0, 30, 60), 9, 30)
    users, words = generator.integers(0, 9, 500), random_words(1, np.arange(500))
    assert np.array_equal(PopularUnseen(seen, np.ones(30, np.int64)).draw(users, words), seen.draw(users, words))


# --- of a dataset ----------------------------------------------------------------------------------------------------


def test_drawn_examples_follow_the_popularity_of_training(clicks, dataset_spec, job_spec, tmp_path):
    """Counted over the rows that train alone, beside what a user had there by the row's time."""
    table = clicks(4000, users=400, items=40)
    drawn = {"per_positive": 10, "of": "item", "distribution": "popularity", "power": 2.0}
    dataset = dataset_spec(table, label={"negatives": drawn}, order="ts")
    data = prepare(dataset, job_spec(evaluation={"split": {"kind": "time", "test": 0.2}}), tmp_path / "data")
    users, items, times = (np.asarray(table[name]) for name in ("user", "item", "ts"))
    train = times < np.sort(times)[-int(4000 * 0.2) - int(4000 * 0.1)]
    names, of_item = np.unique(items, return_inverse=True)
    weights = np.bincount(of_item[train], minlength=len(names)).astype(float) ** 2
    expected = np.zeros(len(names))
    for user, time in zip(users[train], times[train], strict=True):
        had = of_item[train & (users == user) & (times <= time)]
        left = np.where(np.isin(np.arange(len(names)), had), 0.0, weights)
        expected += 10 * left / left.sum()
    item = next(key for key in data.keys if key.name == "item")
    negatives = np.asarray(data.column("train", item))[np.asarray(data.labels("train")) == 0]
    found = np.searchsorted(names, np.asarray(data.vocabulary("item"))[negatives - 2])
    assert chi_square(np.bincount(found, minlength=len(names)), expected) < 4


# --- of a model ------------------------------------------------------------------------------------------------------


def prepared(kind, distribution, clicks, dataset_spec, job_spec, directory, **fields) -> PreparedData:
    model = {"kind": kind, "negative_distribution": distribution, "loss": "bce"}
    model |= {"length": 6} if kind == "sasrec" else {}
    table = clicks(2500, users=150, items=25)
    dataset = dataset_spec(table.set_column(2, "click", [np.ones(2500, np.int64)]), order="ts")
    return prepare(dataset, job_spec(model=model, batch_size=200, **fields), directory)


def negatives_of(data, epoch=0, start=0, rank=0, world_size=1, parts=1) -> list[np.ndarray]:
    batches = data.train_batches(epoch, start, rank, world_size, parts)
    return [batch.features["item__negative"].values().numpy() for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distribution", ["uniform", "popularity", "in_batch"])
def test_any_ranks_cuts_and_resumes_draw_the_same(kind, distribution, clicks, dataset_spec, job_spec, tmp_path):
    data = prepared(kind, distribution, clicks, dataset_spec, job_spec, tmp_path / "data")
    whole = negatives_of(data, epoch=1)
    assert [one.tolist() for one in negatives_of(data, 1, 2)] == [one.tolist() for one in whole[2:]]
    ranks = [negatives_of(data, 1, 0, rank, 2, 2) for rank in range(2)]
    for step, one in enumerate(whole):
        pieces = [ranks[rank][2 * step + part] for part in range(2) for rank in range(2)]
        assert np.concatenate(pieces).tolist() == one.tolist()
    assert not np.array_equal(negatives_of(data, 0)[0], whole[0])
    assert min(one.min() for one in whole) >= (0 if kind == "item2vec" else 2)


@pytest.mark.parametrize("kind", ["bpr", "sasrec"])
@pytest.mark.parametrize("distribution", ["popularity", "in_batch"])
def test_none_that_the_user_had_is_drawn(kind, distribution, clicks, dataset_spec, job_spec, tmp_path):
    data = prepared(kind, distribution, clicks, dataset_spec, job_spec, tmp_path / "data")
    if kind == "bpr":
        user, item = (np.asarray(data.column("train", key)) for key in data.keys[:2])
        had = {(u, i) for u, i in zip(user.tolist(), item.tolist(), strict=True)}
        for batch in data.train_batches(0):
            users, drawn = (batch.features[name].values().tolist() for name in ("user", "item__negative"))
            assert not had & set(zip(users, drawn, strict=True))
        return
    windows, (items, starts) = data.windows, data.sequences.train
    order = data.order().rows(0, 0, data.num_examples["train"])
    sequence, begin, end = windows.spans(order)
    owners = np.repeat(sequence, end - begin - 1)
    for one, owner in zip(np.concatenate(negatives_of(data)).tolist(), owners.tolist(), strict=True):
        assert one not in items[starts[owner] : starts[owner + 1]]


def test_bpr_draws_by_popularity_to_its_power(clicks, dataset_spec, job_spec, tmp_path):
    data = prepared("bpr", "popularity", clicks, dataset_spec, job_spec, tmp_path / "data")
    seen, items = data.seen_items
    weights = data.row_counts("item")[items].astype(float) ** 0.75
    expected = np.zeros(len(items))
    had = [set(mine.tolist()) for mine in np.split(seen.pairs()[1], np.asarray(seen.starts[1:-1]))]
    for user in np.asarray(data.column("train", data.keys[0])).tolist():
        left = np.where(np.isin(np.arange(len(items)), list(had[user])), 0.0, weights)
        expected += left / left.sum()
    drawn = np.concatenate([np.concatenate(negatives_of(data, epoch)) for epoch in range(20)])
    found = np.bincount(np.searchsorted(items, drawn), minlength=len(items))
    assert chi_square(found, 20 * expected) < 4


def test_in_batch_draws_are_items_of_the_batch(clicks, dataset_spec, job_spec, tmp_path):
    """By how often each is there, among what the user never had: a user of every item of a batch takes another."""
    data = prepared("bpr", "in_batch", clicks, dataset_spec, job_spec, tmp_path / "data")
    _, items = data.seen_items
    elsewhere = total = 0
    expected, found = np.zeros(items.max() + 1), np.zeros(items.max() + 1)
    had: dict[int, set[int]] = {}
    user, item = (np.asarray(data.column("train", key)).tolist() for key in data.keys[:2])
    for u, i in zip(user, item, strict=True):
        had.setdefault(u, set()).add(i)
    for epoch in range(6):
        for batch in data.train_batches(epoch):
            users, there, drawn = (batch.features[key.name].values().numpy() for key in data.keys)
            counts = np.bincount(there, minlength=len(expected)).astype(float)
            for u in users.tolist():
                left = counts.copy()
                left[list(had[u])] = 0.0
                expected += left / left.sum()
            found += np.bincount(drawn, minlength=len(expected))
            elsewhere += int((~np.isin(drawn, there)).sum())
            total += len(drawn)
    # Of 25 items a user had about 15: eight draws all hit them with probability .6^8, then an item is uniform.
    assert IN_BATCH_DRAWS == 8
    assert elsewhere <= 0.01 * total
    assert np.abs(found - expected)[expected > 0].max() / total < 0.01


def test_what_has_no_meaning_is_refused():
    job = {"name": "j", "dataset": {"name": "d"}}
    for model, says in (
        ({"kind": "dnn", "negative_distribution": "popularity"}, "dnn has none"),
        ({"kind": "bpr", "loss": "bpr", "negative_power": 0.5}, "uniform has none"),
        ({"kind": "sasrec", "loss": "sampled_softmax", "negative_distribution": "in_batch"}, "assumes uniform"),
        ({"kind": "gru4rec", "loss": "sampled_softmax", "negative_distribution": "popularity"}, "assumes uniform"),
    ):
        with pytest.raises(SpecError, match=says):
            parse_job({**job, "model": model})
    assert parse_job({**job, "model": {"kind": "item2vec", "negative_power": 0.5}}).model.sampling == "popularity"
