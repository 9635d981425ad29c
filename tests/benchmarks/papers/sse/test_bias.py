"""Bias and excess risk of SSE, against equation 6 summed out pair by pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.papers.data import documents
from benchmarks.papers.sse import bias, graphs
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.prepare.preparation import prepare

SPLIT = {"split": {"kind": "random", "validation": 0.1, "test": 0.3}}


@pytest.fixture
def rows():
    draw = np.random.default_rng(3)
    return {"user": draw.normal(size=(6, 3)), "item": draw.normal(size=(5, 3))}


@pytest.fixture
def examples():
    draw = np.random.default_rng(4)
    return bias.Examples(draw.integers(0, 6, 40), draw.integers(0, 5, 40), draw.normal(3.0, 1.0, 40))


def error(rows, user, item, label):
    return (label - rows["user"][user] @ rows["item"][item]) ** 2


@pytest.mark.parametrize("table", bias.TABLES)
@pytest.mark.parametrize("transitions", ["any", "neighbours"])
def test_swapped_losses_are_the_sum_over_all_swaps(rows, examples, table, transitions):
    count = len(rows[table])
    edges = {(0, 1), (1, 2), (3, 1)}  # row 4 has no neighbour
    if transitions == "any":
        chances = bias.to_any(count)
        targets = {j: [k for k in range(count) if k != j] for j in range(count)}
    else:
        source, target = np.array(sorted(edges)).T
        chances = bias.to_neighbours(source, target, count)
        targets = {j: [k for k in range(count) if (j, k) in edges or (k, j) in edges] or [j] for j in range(count)}
    expected = [
        np.mean([error(rows, k, i, y) if table == "user" else error(rows, u, k, y)
                 for k in targets[u if table == "user" else i]])
        for u, i, y in zip(*examples, strict=True)
    ]  # fmt: skip
    assert bias.swapped_losses(rows, table, chances, examples) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)


def test_an_edge_named_twice_or_of_a_row_to_itself_changes_nothing():
    once = bias.to_neighbours(np.array([0, 1]), np.array([1, 2]), 4)
    again = bias.to_neighbours(np.array([0, 1, 1, 3]), np.array([1, 0, 2, 3]), 4)
    np.testing.assert_array_equal(once, again)
    np.testing.assert_array_equal(once[3], [0.0, 0.0, 0.0, 1.0])


def test_neighbours_that_are_alike_have_no_bias_and_any_others_have(tmp_path: Path) -> None:
    """Remark 2: users of a group are distributed alike, those of the other group are not."""
    draw = np.random.default_rng(1)
    user = np.repeat(np.arange(60), 6)
    item = np.where(draw.random(len(user)) < 0.5, draw.integers(20, size=len(user)), 20 + np.arange(len(user)))
    rated = {"user": user, "item": item, "rating": np.where(user % 2, 4.0, 2.0)}
    pq.write_table(pa.table(rated), tmp_path / "rows.parquet")
    # Users 60 and 61 have rated nothing, user 0 has no neighbour.
    graphs.write_edges(graphs.cluster_edges({one: one % 2 for one in range(1, 62)}), tmp_path / "ages.parquet")
    ends = {"source": "source", "target": "target"}
    of = documents.dataset(
        "ratings", tmp_path / "rows.parquet", {"value": "rating"},
        graphs={"ages": ends | {"uri": str(tmp_path / "ages.parquet"), "of": "user"}},
    )  # fmt: skip
    model = {"kind": "mf", "embedding_dim": 2, "loss": "mse"}
    prepare(of, documents.job("bias", of, model=model, evaluation=SPLIT, batch_size=16), tmp_path / "data")
    data = PreparedData.open(tmp_path / "data")
    groups = np.asarray(data.vocabulary("user")) % 2
    users = np.concatenate([np.full((2, 2), np.nan), np.stack([np.where(groups, 4.0, 2.0), 0.0 * groups], axis=1)])
    items = np.concatenate([np.full((2, 2), np.nan), np.ones((len(data.vocabulary("item")), 2))])
    found = bias.measures(users, items, data, of)
    by_age, by_any = found["tables"]["user"]["ages"], found["tables"]["user"][bias.ANY]
    nothing = pytest.approx({"train": 0.0, "test": 0.0}, abs=1e-12)
    assert by_age["own"] == by_any["own"] == nothing
    assert by_age["swapped"] == nothing
    assert found["tables"]["item"][bias.ANY]["swapped"] == nothing
    assert by_any["swapped"]["test"] == by_any["any"]["test"] == pytest.approx(4 * 30 / 59, rel=0.05)
    # Half of the ratings are of an item of their own, which those of test have not from training.
    user, item = (
        np.concatenate([batch.features[name].values().numpy() for batch in data.eval_batches("test")])
        for name in bias.TABLES
    )
    known = item >= NUM_SPECIAL_ROWS
    assert 0.1 < known.mean() < 0.9
    assert found["test_share"] == known.mean()
    of_0 = np.asarray(data.vocabulary("user"))[user[known] - NUM_SPECIAL_ROWS] == 0
    assert of_0.any()
    assert (by_any["share"], by_age["share"]) == (1.0, pytest.approx(1 - of_0.mean()))


def test_the_section_has_means_of_the_seeds_and_differences_within_each():
    def record(own, swapped, of_any):
        sides = {key: {"train": one - 0.5, "test": one} for key, one in (("swapped", swapped), ("any", of_any))}
        of_swap = {"share": own / 2, "own": {"train": 0.5, "test": own}, **sides}
        facts = {"finished_at": "2026-11-29", "packages": {}, "git_commit": "", "command": "", "machine": ""}
        measured = {"bias": {"test_share": 0.75, "tables": {"user": {"ages": of_swap}}}}
        return facts | {"key": f"{own}", "seconds": 1.0, "measured": measured}

    found = bias.section({"MF": [record(1.2, 3.0, 3.2), record(1.4, 0.8, 3.6)]})
    assert found is not None
    cells = ("0.650", "1.3000", "1.9000", "1.2000", "2.1000", "0.8000", "0.5000")
    assert found.lines == (("MF", "user: ages", *cells),)
    assert len(found.header) == len(found.lines[0])
    assert "25.0%" in found.notes[0]
    assert bias.section({}) is None
