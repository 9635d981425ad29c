"""The examples on the real data sets: sizes that the protocols fix, and histories against pandas-like loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from trainer.data.prepare.preparation import prepare
from trainer.spec import load_documents

pytestmark = [pytest.mark.slow, pytest.mark.data]

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
LARGER_NAMES = ("amazon_beauty", "gowalla", "ml1m", "ml1m_item2vec", "ml1m_sasrec")
REAL = ["amazon_sports", "douban", "douban_mf", "epinions", "ipinyou"]
LARGER = [pytest.param(name, marks=pytest.mark.slow) for name in LARGER_NAMES]


@pytest.fixture
def prepared(real_data, tmp_path):
    def make(name: str):
        dataset, job = load_documents(EXAMPLES / f"{name}.yaml")
        dataset = dataset.model_copy(update={"uri": str(real_data / Path(dataset.uri).name)})
        return prepare(dataset, job, tmp_path / name)

    return make


@pytest.mark.parametrize("name", REAL + LARGER)
def test_every_example_prepares(name, prepared):
    data = prepared(name)
    assert data.num_examples["train"] > data.num_examples["test"] > 0
    assert data.unknown_share[data.keys[0].name]["train"] == 0.0
    batch = next(iter(data.train_batches(0)))
    assert len(batch) == min(data.batch_size, data.num_examples["train"])
    for key in data.keys:
        rows = batch.features[key.name].values()
        assert int(rows.max()) < data.tables[key.table].num_rows


def test_amazon_sports_protocol(prepared, real_data):
    """379k training rows: all but the last two of a user and the first (which has no history), and a negative each."""
    data = prepared("amazon_sports")
    table = pq.read_table(real_data / "amazon_sports.parquet")
    users = len(set(table["user"].to_pylist()))
    assert data.num_examples == {"train": 2 * (len(table) - 3 * users), "validation": 2 * users, "test": 2 * users}
    assert data.num_examples["train"] == 379_086
    assert data.num_positives["test"] == users
    user_key, item_key, attribute_key, history_key = data.keys
    vocabulary = {key.table: data.vocabulary(key.table).to_numpy() for key in data.keys}
    by_user: dict[int, list[int]] = {}
    for user, item, _ in sorted(
        zip(*(table[c].to_pylist() for c in ("user", "item", "pos")), strict=True), key=lambda r: (r[0], r[2])
    ):
        by_user.setdefault(user, []).append(item)
    attributes = pq.read_table(real_data / "amazon_sports_attrs.parquet")
    last = {i: a[-1] for i, a in zip(attributes["item"].to_pylist(), attributes["attrs"].to_pylist(), strict=True)}
    trained = {item for items in by_user.values() for item in items[:-2]}
    columns = [data.column("test", key) for key in data.keys]
    history = columns[3]
    for row in range(2000):
        user = vocabulary["user"][columns[0][row] - 2]
        item = vocabulary["item"][columns[1][row] - 2] if columns[1][row] >= 2 else None
        attribute = vocabulary["attribute"][columns[2][row] - 2] if columns[2][row] >= 2 else None
        own = by_user[user]
        rows = history.values[history.offsets[row] : history.offsets[row + 1]]
        previous = [int(vocabulary["item"][r - 2]) if r >= 2 else None for r in rows]
        assert previous == [one if one in trained else None for one in own[:-1][-5:]]
        if row % 2 == 0:
            assert item == (own[-1] if own[-1] in trained else None)
            assert data.labels("test")[row] == 1
        else:
            assert item not in own
            assert data.labels("test")[row] == 0
        if item is not None and attribute is not None:
            assert attribute == last[item]
    assert (user_key.name, item_key.name, attribute_key.name, history_key.name) == (
        "user",
        "item",
        "attribute",
        "history",
    )


def test_epinions_trust(prepared, real_data):
    """The example's graph, against sets of the file's pairs."""
    data = prepared("epinions_trust")
    columns = pq.read_table(real_data / "epinions_trust.parquet")
    pairs = zip(*(columns[name].to_pylist() for name in ("src", "dst")), strict=True)
    known = set(data.vocabulary("user").to_pylist())
    kept = {(a, b) for a, b in pairs if a in known and b in known and a != b}
    graph = data.graph("trust")
    assert len(graph.neighbours) == len(kept | {(b, a) for a, b in kept})
    row_of = {user: row for row, user in enumerate(data.vocabulary("user").to_pylist(), start=2)}
    rows = np.array([(row_of[a], row_of[b]) for a, b in kept])
    assert graph.has_edges(rows[:, 0], rows[:, 1]).all()
    assert graph.has_edges(rows[:, 1], rows[:, 0]).all()


def test_epinions_protocol(prepared, real_data):
    data = prepared("epinions")
    total = sum(data.num_examples.values())
    assert total == 770_000
    for split, share in (("train", 0.8), ("validation", 0.1), ("test", 0.1)):
        assert data.num_examples[split] / total == pytest.approx(share, abs=0.002)
        rate = data.num_positives[split] / data.num_examples[split]
        assert rate == pytest.approx(0.7394, abs=0.005)
    pairs = {}
    for split in data.num_examples:
        user, item = (np.asarray(data.column(split, key)).astype(np.int64) for key in data.keys[:2])
        known = (user >= 2) & (item >= 2)
        pairs[split] = set((user[known] << 32 | item[known]).tolist())
    assert not pairs["train"] & pairs["test"]
    assert not pairs["train"] & pairs["validation"]
    assert not pairs["validation"] & pairs["test"]


def test_douban_protocol(prepared, real_data):
    """The file's own test rows, ratings as they are; a tenth of the others validates."""
    data = prepared("douban_mf")
    assert data.num_examples["test"] == 13_689
    assert data.num_examples["validation"] / (136_891 - 13_689) == pytest.approx(0.1, abs=0.005)
    assert set(np.unique(data.labels("test"))) == {1.0, 2.0, 3.0, 4.0, 5.0}
