"""Negatives: never an item the user had, uniform over the rest, a function of the row and not of how it was read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.columns.hashing import random_words
from trainer.data.errors import DataError
from trainer.data.prepare import examples as rows_module
from trainer.data.prepare.negatives import SeenItems, UnseenUntil
from trainer.data.prepare.preparation import prepare
from trainer.data.sources import source as source_module

NEGATIVES = {"negatives": {"per_positive": 2, "of": "item", "seed": 5}}


@given(st.data(), st.integers(1, 12), st.integers(1, 6))
def test_draws_are_never_seen_items_and_reach_every_other(data, num_items, num_users):
    pairs = data.draw(st.lists(st.tuples(st.integers(0, num_users - 1), st.integers(0, num_items - 1)), max_size=40))
    users, items = (np.array([pair[i] for pair in pairs], dtype=np.int64) for i in range(2))
    seen = SeenItems.from_pairs(users, items, num_users, num_items)
    for user in range(num_users):
        had = {item for u, item in pairs if u == user}
        draws = seen.draw(np.full(600, user), random_words(user, np.arange(600)))
        assert seen.unseen_weight(np.array([user]))[0] == num_items - len(had)
        expected = set(range(num_items)) - had or set(range(num_items))
        # 600 draws over at most 12 items: missing one of them has probability below 12 * exp(-50).
        assert set(draws.tolist()) == expected


def test_draws_are_uniform_over_the_unseen():
    seen = SeenItems.from_pairs(np.zeros(3, np.int64), np.array([1, 2, 7]), 1, 10)
    draws = seen.draw(np.zeros(70_000, np.int64), random_words(3, np.arange(70_000)))
    shares = np.bincount(draws, minlength=10) / 70_000
    # Binomial with p = 1/7: 5 standard deviations are .0066.
    assert np.abs(shares[[0, 3, 4, 5, 6, 8, 9]] - 1 / 7).max() < 0.0066


def examples(data, read_split):
    return [
        (row["user"], row["item"], row["label"], split)
        for split in ("train", "validation", "test")
        for row in read_split(data, split).to_pylist()
    ]


SPLITS = {
    "random": {"kind": "random", "validation": 0.1, "test": 0.2},
    "time": {"kind": "time", "validation": 0.1, "test": 0.2},
    "per_user_last": {"kind": "per_user_last", "num_test": 3},
    "column": {"kind": "column", "column": "side", "validation": 0.1},
}


@pytest.mark.parametrize("distribution", ["uniform", "popularity"])
@pytest.mark.parametrize("split", SPLITS)
def test_label_negatives(split, distribution, clicks, dataset_spec, job_spec, read_split, tmp_path):
    """Against the rows themselves: who had what, in which split and when."""
    table = clicks(900, users=12, items=120)
    sides = ["test" if row % 5 == 0 else "train" for row in range(900)]
    table = table.append_column("side", pa.array(sides))
    label = {"negatives": {**NEGATIVES["negatives"], "distribution": distribution}}
    dataset = dataset_spec(table, label=label, timestamp="ts")
    data = prepare(dataset, job_spec(evaluation={"split": SPLITS[split]}), tmp_path / "data")
    rows = {name: read_split(data, name).to_pylist() for name in ("train", "validation", "test")}
    times = {}  # by pair, of all rows
    for row in table.to_pylist():
        times.setdefault((row["user"], row["item"]), []).append(row["ts"])
    trained = {(row["user"], row["item"]) for row in rows["train"] if row["label"]}
    trained_items = {item for _, item in trained}
    later = held_out = 0
    for name, examples in rows.items():
        # In the order of rows: a positive, then its negatives, in one split.
        assert [row["label"] for row in examples] == [1, 0, 0] * (len(examples) // 3)
        for positive, *negatives in zip(examples[::3], examples[1::3], examples[2::3], strict=True):
            for negative in negatives:
                assert negative["user"] == positive["user"]
                pair = negative["user"], negative["item"]
                if name != "train":
                    # The unknown row hides the ids that training does not have: it says nothing of which was clicked.
                    assert (negative["item"] is None) == (positive["item"] is None)
                    assert negative["item"] is None or pair not in times
                    continue
                assert negative["item"] in trained_items
                held_out += pair in times and pair not in trained
                if pair in trained:
                    assert split in ("time", "per_user_last")
                    later += 1
        if name != "train":
            assert not trained & {(row["user"], row["item"]) for row in examples}
    assert held_out > 0
    assert (later > 0) == (split in ("time", "per_user_last"))


def test_what_a_user_had_by_a_rows_time_is_not_drawn_for_it(dataset_spec, job_spec, read_split, tmp_path):
    """One user has the items 0 to 29, one at each time: at time t only later ones are left, and 30 of another's."""
    table = pa.table({"user": [0] * 30 + [1] * 3, "item": [*range(30), 0, 1, 30], "ts": [*range(30), 30, 31, 31]})
    table = table.append_column("click", pa.array([1] * 33))
    label = {"negatives": {"per_positive": 20, "of": "item"}}
    job = job_spec(evaluation={"split": {"kind": "time", "validation": 0.0, "test": 0.0}})
    rows = read_split(prepare(dataset_spec(table, label=label, timestamp="ts"), job, tmp_path / "data"), "train")
    drawn = {}
    for row in rows.to_pylist():
        if row["label"]:
            positive = row["item"] if row["user"] == 0 else None
        elif positive is not None:
            drawn.setdefault(positive, set()).add(row["item"])
    assert all(min(items) > time for time, items in drawn.items())
    # Of at most 30 items left 300 draws miss a given one with probability e^-10.
    assert set.union(*drawn.values()) >= set(range(15, 31))


def test_a_held_out_row_that_repeats_a_pair_of_training_is_left_out(dataset_spec, job_spec, tmp_path):
    table = pa.table({"user": [1, 1, 2, 1, 2], "item": [5, 6, 7, 5, 8], "ts": range(5), "click": [1] * 5})
    label = {"negatives": {"per_positive": 1, "of": "item"}}
    job = job_spec(evaluation={"split": {"kind": "time", "validation": 0.0, "test": 0.4}})
    said = []
    data = prepare(dataset_spec(table, label=label, timestamp="ts"), job, tmp_path / "data", log=said.append)
    # Training lacks item 8, and there is no other such item that could be drawn beside it.
    assert data.num_examples == {"train": 6, "validation": 0, "test": 0}
    (line,) = [line for line in said if line.startswith("left out")]
    assert line == (
        "left out, of 5 rows: 1 held out although training has the same user and item; "
        "1 whose user had every item that could be drawn"
    )


def test_a_row_without_an_item_is_left_out(clicks, dataset_spec, job_spec, read_split, tmp_path):
    """A clicked row of no item beside drawn items would say that no item is a click."""
    table = clicks(400)
    item = pa.array(table["item"].to_numpy(), mask=np.arange(400) % 4 == 0)
    dataset = dataset_spec(table.set_column(table.column_names.index("item"), "item", item), label=NEGATIVES)
    said = []
    data = prepare(dataset, job_spec(evaluation={"split": {"test": 0.0}}), tmp_path / "data", log=said.append)
    assert sum(data.num_examples.values()) == 3 * 300
    assert None not in {row["item"] for row in read_split(data, "train").to_pylist()}
    assert "left out, of 400 rows: 100 without an item" in said


@pytest.mark.parametrize("distribution", ["uniform", "popularity"])
def test_draws_until_a_time_have_their_weights(distribution):
    """Chi-square against the weights of what is left, for each time of a user."""
    generator = np.random.default_rng(0)
    weights = generator.integers(1, 9, 30) if distribution == "popularity" else np.ones(30, np.int64)
    items, times = np.array([3, 9, 9, 20, 4, 3]), np.array([5, 1, 7, 1, 8, 9])
    unseen = UnseenUntil(items, times, 1, 30, None if distribution == "uniform" else weights)
    first = {3: 5, 9: 1, 20: 1, 4: 8}
    for time in (0, 1, 4, 5, 8, 12):
        users, times = np.zeros(40_000, np.int64), np.full(40_000, time)
        drawn = unseen.draw(users, times, random_words(time, np.arange(40_000)))
        left = np.array([0 if first.get(item, 99) <= time else weights[item] for item in range(30)])
        assert not unseen.has_none(users, times).any()
        expected = 40_000 * left / left.sum()
        counts = np.bincount(drawn, minlength=30)
        assert counts[left == 0].sum() == 0
        chi = (np.square(counts - expected)[left > 0] / expected[left > 0]).sum()
        # Of d degrees of freedom its mean is d and its standard deviation sqrt(2 d).
        degrees = int((left > 0).sum()) - 1
        assert abs(chi - degrees) < 5 * np.sqrt(2 * degrees)


def test_who_has_every_item_in_the_end_has_none_left_from_then_on():
    unseen = UnseenUntil(np.arange(4), np.array([3, 1, 2, 5]), 1, 4)
    assert unseen.has_none(np.zeros(4, np.int64), np.array([0, 3, 4, 5])).tolist() == [False, False, False, True]


def test_negatives_do_not_depend_on_chunks(clicks, dataset_spec, job_spec, read_split, tmp_path, monkeypatch):
    dataset, job = dataset_spec(clicks(300), label=NEGATIVES), job_spec()
    whole = examples(prepare(dataset, job, tmp_path / "whole"), read_split)
    monkeypatch.setattr(source_module.Source.stream, "__defaults__", (7,))
    monkeypatch.setattr(rows_module, "CHUNK_ROWS", 13)
    assert examples(prepare(dataset, job, tmp_path / "chunks"), read_split) == whole
    other = dataset_spec(clicks(300), label={"negatives": {"per_positive": 2, "of": "item", "seed": 6}})
    assert examples(prepare(other, job, tmp_path / "other"), read_split) != whole


@pytest.mark.parametrize("known", [0, 3])
@pytest.mark.parametrize("distribution", ["uniform", "popularity"])
def test_a_row_without_a_user_may_draw_every_item_but_its_own(
    distribution, known, dataset_spec, job_spec, read_split, tmp_path
):
    items = np.arange(600) % 5
    users = np.arange(600) % 2 * known  # with known users the first has items 0 to 3, and every other row has none
    table = pa.table(
        {
            "user": pa.array(users, mask=(users == 0) | (items == 4)), "item": items, "ts": np.arange(600),
            "rating": np.ones(600), "click": np.ones(600, dtype=np.int64),
        }
    )  # fmt: skip
    label = {"negatives": {"per_positive": 1, "of": "item", "distribution": distribution}}
    job = job_spec(evaluation={"split": {"validation": 0.0, "test": 0.0}})
    rows = read_split(prepare(dataset_spec(table, label=label), job, tmp_path / "data"), "train").to_pylist()
    drawn = {}
    for positive, negative in zip(rows[::2], rows[1::2], strict=True):
        assert (positive["label"], negative["label"]) == (1, 0)
        if positive["user"] is None:
            drawn.setdefault(positive["item"], set()).add(negative["item"])
        else:
            assert negative["item"] == 4
    assert drawn == {item: set(range(5)) - {item} for item in range(5)}


def test_users_who_had_every_item_are_left_out(clicks, dataset_spec, job_spec, read_split, tmp_path):
    job = job_spec(evaluation={"split": {"validation": 0.0, "test": 0.0}})
    few = pa.concat_tables(
        [clicks(400, users=1, items=3), clicks(1, users=1, items=3).set_column(0, "user", pa.array([99]))]
    )
    said = []
    data = prepare(dataset_spec(few, label=NEGATIVES), job, tmp_path / "few", log=said.append)
    assert {row["user"] for row in read_split(data, "train").to_pylist()} == {99}
    assert [line for line in said if line.endswith("400 whose user had every item that could be drawn")]
    with pytest.raises(DataError, match=r"training split"):
        prepare(dataset_spec(clicks(400, users=1, items=3), label=NEGATIVES), job, tmp_path / "none")


def test_bpr_draws_fresh_negatives_each_epoch(clicks, dataset_spec, job_spec, tmp_path):
    table = clicks(500, users=20, items=30)
    data = prepare(dataset_spec(table), job_spec(model={"kind": "bpr", "loss": "bpr"}), tmp_path / "data")
    assert [key.name for key in data.keys] == ["user", "item", "item__negative"]
    assert data.tables["item"].features == ("item", "item__negative")
    assert np.asarray(data.labels("train")).all()
    train = {}  # the items of the training split's rows, clicked or not, as raw ids
    users, items = data.vocabulary("user").to_pylist(), data.vocabulary("item").to_pylist()
    held = set()
    for split in ("validation", "test"):
        rows = [np.asarray(data.column(split, key)) for key in data.keys[:2]]
        held |= {(u, i) for u, i in zip(*rows, strict=True)}
    for row in table.to_pylist():
        if row["user"] in users and row["item"] in items:
            pair = (users.index(row["user"]) + 2, items.index(row["item"]) + 2)
            if pair not in held:
                train.setdefault(pair[0], set()).add(pair[1])
    drawn = []
    for epoch in range(2):
        negatives = []
        for batch in data.train_batches(epoch):
            user, item, negative = (batch.features[key.name].values().tolist() for key in data.keys)
            for u, i, n in zip(user, item, negative, strict=True):
                assert i in train[u]
                assert n not in train[u]
                assert n >= 2
            negatives += negative
        drawn.append(negatives)
    assert drawn[0] != drawn[1]
    batch = next(iter(data.eval_batches("test")))
    assert batch.features.keys() == ["user", "item", "item__negative"]
    assert batch.features["item__negative"].lengths().sum() == 0
    assert set(batch.labels.tolist()) == {0.0, 1.0}


def test_bpr_samples_draw_independently(clicks, dataset_spec, job_spec, tmp_path):
    """At one place of two batches, on two ranks or in two epochs: no more alike than by chance."""
    data = prepare(
        dataset_spec(clicks(3000, items=2000)),
        job_spec(model={"kind": "bpr", "loss": "bpr"}, batch_size=400),
        tmp_path / "d",
    )

    def drawn(epoch, step, rank=0, world_size=1):
        batch = next(iter(data.train_batches(epoch, step, rank, world_size)))
        return batch.features["item__negative"].values().numpy()

    pairs = [(drawn(0, 0), drawn(0, 1)), (drawn(0, 0), drawn(1, 0)), (drawn(0, 0, 0, 2), drawn(0, 0, 1, 2))]
    for first, second in pairs:
        # The correlation of 200 or 400 independent pairs has a standard deviation of at most .07.
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.3
    assert np.array_equal(np.concatenate(pairs[2]), drawn(0, 0))


def test_bpr_negatives_are_items_of_this_training(clicks, dataset_spec, job_spec, tmp_path):
    """A row that only a warm start brought is not touched by negatives: its vector is carried, not trained."""
    import pyarrow as pa

    data = prepare(
        dataset_spec(clicks(300)),
        job_spec(model={"kind": "bpr", "loss": "bpr"}),
        tmp_path / "data",
        base_vocabulary={"item": IdMap(pa.array(range(10_000, 10_500))), "user": IdMap(pa.array(range(3, 213, 7)))},
    )
    counts = data.row_counts("item")
    assert (counts[2:502] == 0).all()
    for batch in data.train_batches(0):
        assert (counts[batch.features["item__negative"].values().numpy()] > 0).all()
