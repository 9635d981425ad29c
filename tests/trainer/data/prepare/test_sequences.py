"""Users' items in order, against loops over the rows: what is read, predicted, drawn and ranked."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from embeddings.tables.philox import philox4x32, table_key
from trainer.data.errors import DataError
from trainer.data.prepare.preparation import prepare

ITEM, TARGET, NEGATIVE = KEYS = ("item", "item__target", "item__negative")
LENGTH, WINDOW = 4, 2


def log(num_rows: int = 500, seed: int = 0) -> pa.Table:
    """user, item, click, ts: in no order, with equal times, rows that are no positives, and some without a user."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 25, num_rows)
    return pa.table(
        {
            "user": pa.array(user * 3 + 1, mask=rng.random(num_rows) < 0.03),
            "item": (rng.random(num_rows) ** 2 * 60).astype(np.int64) + 100,
            "click": (rng.random(num_rows) < 0.8).astype(np.int64),
            "ts": rng.integers(0, 200, num_rows),
        }
    )


def splits_of(table: pa.Table) -> dict[object, list[tuple[int, str]]]:
    """By user the (item, split) of its positives by (time, row); its last row tests, the one before validates."""
    by_user: dict[object, list[tuple[int, int, int, int]]] = {}
    for number, row in enumerate(table.to_pylist()):
        if row["user"] is not None:
            by_user.setdefault(row["user"], []).append((row["ts"], number, row["item"], row["click"]))
    found: dict[object, list[tuple[int, str]]] = {}
    for user, rows in by_user.items():
        rows.sort()
        sides = ["train"] * len(rows)
        if len(rows) > 1:
            sides[-1] = "test"
        if len(rows) > 2:
            sides[-2] = "validation"
        found[user] = [(item, side) for (_, _, item, click), side in zip(rows, sides, strict=True) if click]
    return found


@pytest.fixture
def make(dataset_spec, job_spec, tmp_path):
    def prepared(kind, table=None, name="data", seed=4, split="per_user_last", **model):
        job = job_spec(
            model={"kind": kind, "loss": "bce", **model},
            batch_size=20,
            seed=seed,
            evaluation={"split": {"kind": split}},
        )
        return prepare(dataset_spec(log() if table is None else table, order="ts"), job, tmp_path / name)

    return prepared


@pytest.fixture(params=["item2vec", "sasrec"])
def data(request, make):
    settings = {"item2vec": {"window": WINDOW}, "sasrec": {"length": LENGTH, "negatives": 2}}[request.param]
    return make(request.param, **settings)


def lists_of(batch, ids=None) -> list[tuple[tuple[int, ...], ...]]:
    """By sample the lists of each key, as rows or raw ids (None: the unknown id, 0: padding)."""
    names = None if ids is None else [0, None, *ids]
    dense = [batch.features[key].to_dense() for key in KEYS]
    return [
        tuple(tuple(one[i].tolist() if names is None else [names[r] for r in one[i].tolist()]) for one in dense)
        for i in range(len(batch))
    ]


def epoch_of(data, epoch=0) -> list[tuple[tuple[int, ...], ...]]:
    ids = data.vocabulary("item").to_pylist()
    return [sample for batch in data.train_batches(epoch) for sample in lists_of(batch, ids)]


# --- what is trained on ----------------------------------------------------------------------------------------------


def test_skip_grams_are_the_neighbours_in_the_training_sequence(make):
    data = make("item2vec", window=WINDOW)
    expected = []
    for rows in splits_of(log()).values():
        items = [item for item, side in rows if side == "train"]
        for place, item in enumerate(items):
            around = range(max(0, place - WINDOW), min(len(items), place + WINDOW + 1))
            expected.append(((item,), tuple(items[other] for other in around if other != place)))
    found = epoch_of(data)
    assert Counter(sample[:2] for sample in found) == Counter(expected)
    assert data.num_examples["train"] == len(found)
    assert {len(negatives) / max(1, len(targets)) for _, targets, negatives in found} == {3.0}  # model.negatives


def test_pieces_of_sequences_predict_every_item_but_the_first_once(make):
    data = make("sasrec", length=LENGTH)
    expected, pieces = Counter(), 0
    for user, rows in splits_of(log()).items():
        items = [item for item, side in rows if side == "train"]
        expected.update((tuple(items[:place])[-1:], items[place]) for place in range(1, len(items)))
        pieces += -(-max(0, len(items) - 1) // LENGTH)
        assert user is not None
    found = epoch_of(data)
    assert len(found) == data.num_examples["train"] == pieces
    assert Counter(((a,), b) for read, targets, _ in found for a, b in zip(read, targets, strict=True)) == expected
    for read, targets, negatives in found:
        assert 1 <= len(read) == len(targets) == len(negatives) <= LENGTH
        assert read[1:] == targets[:-1]
    sequences = [[item for item, side in rows if side == "train"] for rows in splits_of(log()).values()]
    for read, targets, _ in found:
        piece = [*read, targets[-1]]
        assert any(piece == items[at : at + len(piece)] for items in sequences for at in range(len(items)))


def test_slices_of_all_ranks_are_the_global_batch(data):
    """In three micro-batches, from the middle of the second epoch, on one rank, two and four."""
    whole = [sample for batch in data.train_batches(1, 2) for sample in lists_of(batch)]
    for world_size in (1, 2, 4):
        parts = zip(*(data.train_batches(1, 2, rank, world_size, 3) for rank in range(world_size)), strict=True)
        assert [sample for part in parts for batch in part for sample in lists_of(batch)] == whole
    again = [sample for batch in data.train_batches(2, 2) for sample in lists_of(batch)]
    assert again != whole


# --- what is drawn ---------------------------------------------------------------------------------------------------


def test_negatives_follow_unigram_to_three_quarters_and_miss_their_target(make):
    data = make("item2vec", window=WINDOW, negatives=20)
    counts = data.row_counts("item").astype(float)
    assert counts[:2].tolist() == [0, 0]
    weights = counts**0.75 / (counts**0.75).sum()
    drawn, expected, variance = np.zeros(len(counts)), np.zeros(len(counts)), np.zeros(len(counts))
    for epoch in range(3):
        for batch in data.train_batches(epoch):
            for _, targets, negatives in lists_of(batch):
                for target, row in zip(targets, np.reshape(negatives, (-1, 20)), strict=True):
                    assert target not in row
                    np.add.at(drawn, row, 1)
                    mine = weights * (np.arange(len(weights)) != target)
                    expected += 20 * mine
                    variance += 20 * mine * (1 - mine)
    live = weights > 0
    assert drawn[0] > 0  # draws that hit their target: padding
    assert (drawn[1:] > 0).tolist() == live[1:].tolist()
    # 5 standard deviations of each of 60 counts.
    assert (np.abs(drawn - expected)[live] < 5 * np.sqrt(variance[live])).all()


def test_a_draw_is_philox_of_epoch_sample_and_slot(make):
    """The second negative of the target at offset +1 of a sample of epoch 2, computed by hand."""
    data = make("item2vec", window=1, negatives=3, seed=9)
    batch = next(iter(data.train_batches(2)))
    samples = lists_of(batch)
    number = next(n for n, (_, targets, _) in enumerate(samples) if n > 2 and len(targets) == 2)
    _, targets, negatives = samples[number]
    slot = 1 * 3 + 1
    words = [int(word) for word in philox4x32((2, number, slot >> 1, 0), table_key(9, NEGATIVE))]
    high, low = words[2 * (slot & 1)], words[2 * (slot & 1) + 1]
    weights = data.row_counts("item").astype(float) ** 0.75
    row = int(np.searchsorted(np.cumsum(weights) / weights.sum(), ((high << 32 | low) >> 11) * 2.0**-53, side="right"))
    assert negatives[slot] == (0 if row == targets[1] else row)


def test_negatives_of_sasrec_are_items_that_the_user_never_had_in_training(make):
    data = make("sasrec", length=LENGTH, negatives=5)
    sequences = [[item for item, side in rows if side == "train"] for rows in splits_of(log()).values()]
    live = {item for items in sequences for item in items}
    drawn = set()
    for read, targets, negatives in epoch_of(data):
        piece = [*read, targets[-1]]
        owners = [s for s in sequences if any(piece == s[at : at + len(piece)] for at in range(len(s)))]
        assert any(not set(negatives) & set(items) for items in owners)
        drawn |= set(negatives)
    assert drawn <= live
    assert len(drawn) > 0.9 * len(live)


# --- what is ranked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_items_are_ranked_after_what_came_before(data, split):
    """100 items that the user never had, the same for every job; an item that training does not have is unknown."""
    ids = data.vocabulary("item").to_pylist()
    known, read = set(ids), {"item2vec": WINDOW, "sasrec": LENGTH}[data.sequence["kind"]]
    expected = []
    for _, rows in sorted(splits_of(log()).items()):
        for place, (item, side) in enumerate(rows):
            earlier = ("train",) if split == "validation" else ("train", "validation")
            before = [i if i in known else None for i, s in rows[:place] if s in earlier]
            if side == split and before:
                expected.append((tuple(before[-read:]), (item if item in known else None,), before, rows))
    assert len(expected) > 10
    batches = list(data.eval_batches(split, 7))
    found = [sample for batch in batches for sample in lists_of(batch, ids)]
    assert [sample[:2] for sample in found] == [one[:2] for one in expected]
    for (_, _, negatives), (_, _, _, rows) in zip(found, expected, strict=True):
        assert len(negatives) == 100
        assert not set(negatives) & {item for item, _ in rows}
        assert set(negatives) <= known
    seen = [[] for _ in found]
    for number, batch in enumerate(batches):
        for sample, row in batch.seen.tolist():
            seen[7 * number + sample].append([0, None, *ids][row])
    assert seen == [one[2] for one in expected]
    assert data.num_examples[split] == len(expected)
    for world_size in (2, 3):
        ranks = zip(*(data.eval_batches(split, 7, rank, world_size) for rank in range(world_size)), strict=True)
        assert [sample for part in ranks for batch in part for sample in lists_of(batch, ids)] == found


@pytest.mark.parametrize(("split", "read"), [("validation", {0}), ("test", {0, 1})])
def test_held_out_items_among_training_ones_are_not_read_by_their_own_split(make, split, read):
    """A random split: what a user had before, but nothing that is itself evaluated here."""
    data = make("sasrec", split="random", length=500)
    sequences = data.sequences
    expected = []
    for start, end in itertools.pairwise(sequences.starts.tolist()):
        for place in range(start, end):
            before = [int(sequences.items[p]) for p in range(start, place) if int(sequences.sides[p]) in read]
            if ("train", "validation", "test")[sequences.sides[place]] == split and before:
                expected.append((tuple(before), (int(sequences.items[place]),)))
    found = [sample[:2] for batch in data.eval_batches(split, 50) for sample in lists_of(batch)]
    assert found == expected
    assert len(found) > 20
    assert np.diff(sequences.starts).sum() == len(sequences.items) > len(data.sequences.train.values)


def test_every_job_ranks_against_the_same_items(make):
    first, second = (
        [sample for batch in make(kind, name=kind, seed=seed).eval_batches("test", 50) for sample in lists_of(batch)]
        for kind, seed in (("item2vec", 1), ("sasrec", 2))
    )
    assert [sample[1:] for sample in first] == [sample[1:] for sample in second]


def test_a_user_with_one_item_has_no_sequence(make):
    table = pa.table({"user": [1, 2, 3], "item": [5, 6, 5], "click": [1, 1, 1], "ts": [1, 2, 3]})
    with pytest.raises(DataError, match="no user has two positive rows"):
        make("sasrec", table)


def test_tables_are_of_items_alone(data):
    assert list(data.tables) == ["item"]
    assert [key.name for key in data.keys] == list(KEYS)
    trained = Counter(item for rows in splits_of(log()).values() for item, side in rows if side == "train")
    nobody = [row for row in log().to_pylist() if row["user"] is None and row["click"]]
    trained.update(row["item"] for row in nobody)  # has a row, though nobody's sequence
    found = dict(zip(data.vocabulary("item").to_pylist(), data.row_counts("item")[2:].tolist(), strict=True))
    assert found == trained
