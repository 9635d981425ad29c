"""All items ranked for each user, against sorted lists written out from the raw rows and the tables' rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.evaluation import full_ranking
from trainer.evaluation.evaluator import Evaluator
from trainer.evaluation.full_ranking import HeldOut, catalogue_ranks, ranks_of_relevant
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import use_threads
from trainer.runs.directory import read_run
from trainer.spec import parse_dataset, parse_job


def ranks_by_sorting(scores, excluded, relevant):
    """Places in the list by descending score; of equal scores the relevant ones come last."""
    shown = [item for item in range(len(scores)) if item not in excluded]
    ordered = sorted(shown, key=lambda item: (-scores[item], item in relevant))
    return sorted(ordered.index(item) for item in relevant)


USER = st.tuples(
    st.lists(st.integers(0, 4), min_size=9, max_size=9),
    st.sets(st.integers(0, 8), max_size=4),
    st.sets(st.integers(0, 8), max_size=5),
)


@given(st.lists(USER, min_size=1, max_size=5), st.integers(1, 9))
def test_ranks_are_places_in_the_sorted_list(users, largest_k):
    scores = torch.tensor([values for values, _, _ in users], dtype=torch.float32)
    pairs = [(u, i) for u, (_, excluded, relevant) in enumerate(users) for i in sorted(relevant - excluded)]
    for number, (_, excluded, _) in enumerate(users):
        scores[number, list(excluded)] = -torch.inf
    user, place = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    order, ranks = ranks_of_relevant(scores, user, place, largest_k)
    for number, (values, excluded, relevant) in enumerate(users):
        expected = ranks_by_sorting(values, excluded, relevant - excluded)
        found = sorted(ranks[user[order] == number])
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            # Behind one that is not among the first k, what follows is not counted.
            assert mine == theirs or (mine == np.inf and theirs >= largest_k)
        if found:
            assert found[0] == expected[0]


def test_a_model_that_scores_all_alike_finds_nothing_and_nan_is_last():
    _, ranks = ranks_of_relevant(torch.zeros(1, 6), np.array([0, 0]), np.array([1, 4]), 6)
    assert ranks.tolist() == [4, 5]
    scores = torch.tensor([[0.0, torch.nan, 2.0, 1.0]])
    _, ranks = ranks_of_relevant(scores, np.array([0]), np.array([1]), 4)
    assert ranks.tolist() == [3]


# --- from rows to figures --------------------------------------------------------------------------------------------

NUM_USERS, NUM_ITEMS = 30, 45
RANKING = [
    "auc", "precision_1_full", "precision_5_full", "recall_20_full", "ndcg_10_full", "hit_rate_5_full", "mrr_full",
    "hit_rate_10", "ndcg_10", "mrr",
]  # fmt: skip


def written(path):
    """Rows in which each pair occurs once, so that a training item is never a test item; some users and some items are
    in the test alone."""
    rng = np.random.default_rng(1)
    pairs = rng.permutation(NUM_USERS * NUM_ITEMS)[:700]
    users, items = pairs // NUM_ITEMS, pairs % NUM_ITEMS
    part = rng.choice(["train", "validation", "test"], 700, p=[0.6, 0.15, 0.25])
    part[(users >= 28) | (items >= 42)] = "test"
    pq.write_table(
        pa.table({"user": users, "item": items, "part": part, "liked": (rng.random(700) < 0.6).astype(int)}), path
    )
    return users, items, part, pq.read_table(path)["liked"].to_numpy()


def documents(path, kind, metrics, label=None, **evaluation):
    dataset = {
        "name": "pairs", "uri": str(path), "label": label or {"column": "liked"},
        "features": {"user": {"type": "id"}, "item": {"type": "id"}},
    }  # fmt: skip
    job = {
        "name": "job", "dataset": {"name": "pairs"}, "batch_size": 64, "sse": {},
        "model": {"kind": kind, "embedding_dim": 4, "init": {"kind": "hash", "std": 0.5}, "hidden": [6]},
        "evaluation": {"split": {"kind": "column", "column": "part"}, "metrics": metrics, **evaluation},
    }  # fmt: skip
    if kind != "two_tower":
        job["model"].pop("hidden")
    return parse_dataset(dataset), parse_job(job)


@pytest.fixture(scope="module")
def group():
    use_threads(1)
    with single_rank_group():
        yield


def scores_of(sharded, data, users, items):
    """[users, items] by raw id, from the model's forward on pairs; row 1 for what training has not."""
    from torchrec import KeyedJaggedTensor

    rows = {}
    for name, raw in (("user", users), ("item", items)):
        known = {id_: row + NUM_SPECIAL_ROWS for row, id_ in enumerate(data.vocabulary(name).to_pylist())}
        rows[name] = [known.get(id_, 1) for id_ in raw]
    names = [key.name for key in data.keys]
    found = []
    for user in rows["user"]:
        lists = {"user": [user] * len(items), "item": rows["item"]}
        features = KeyedJaggedTensor(
            keys=names,
            values=torch.tensor([row for name in names for row in lists.get(name, [])]),
            lengths=torch.tensor([length for name in names for length in ([int(name in lists)] * len(items))]),
            stride=len(items),
        )
        found.append(sharded.module(features).detach().double().numpy())
    return np.stack(found)


@pytest.mark.parametrize("split", ["test", "validation"])
@pytest.mark.parametrize("kind", ["bpr", "mf", "two_tower"])
def test_figures_are_those_of_sorted_lists(group, tmp_path, kind, split):
    path = tmp_path / "pairs.parquet"
    users, items, part, liked = written(path)
    dataset, job = documents(path, kind, RANKING)
    data = prepare(dataset, job, tmp_path / "data")
    sharded = build(job, data, alpha=None if job.optimizer.kind != "adam_ar" else 1e-4)
    sharded.eval()
    found = Evaluator(job, data, sharded.module).evaluate(split)
    scores = scores_of(sharded, data, range(NUM_USERS), range(NUM_ITEMS))
    # Bpr's training split is of positives alone; what a user had there is every row of training.
    trained = part == "train"
    vocabulary = trained & ((liked == 1) if kind == "bpr" else True)
    catalogue = set(items[vocabulary].tolist())
    lists = []
    for user in range(NUM_USERS):
        own = users == user
        relevant = set(items[own & (part == split) & (liked == 1)].tolist())
        if not relevant or user not in set(users[vocabulary].tolist()):
            continue
        excluded = set(items[own & trained].tolist()) | (set(range(NUM_ITEMS)) - catalogue)
        if split == "test":
            excluded |= set(items[own & (part == "validation") & (liked == 1)].tolist())
        lists.append((ranks_by_sorting(scores[user], excluded, relevant & catalogue - excluded), len(relevant)))
    assert found["users"] == len(lists) > 20
    for k, name in ((1, "precision_1_full"), (5, "precision_5_full")):
        expected = np.mean([sum(rank < k for rank in ranks) / k for ranks, _ in lists])
        assert found[name] == pytest.approx(expected, abs=1e-12)
    expected = np.mean([sum(rank < 20 for rank in ranks) / count for ranks, count in lists])
    assert found["recall_20_full"] == pytest.approx(expected, abs=1e-12)
    gain = [sum(1 / np.log2(rank + 2) for rank in ranks if rank < 10) for ranks, _ in lists]
    ideal = [sum(1 / np.log2(rank + 2) for rank in range(min(10, count))) for _, count in lists]
    assert found["ndcg_10_full"] == pytest.approx(np.mean(np.divide(gain, ideal)), abs=1e-12)
    assert found["mrr_full"] == pytest.approx(np.mean([1 / (ranks[0] + 1) if ranks else 0 for ranks, _ in lists]))
    assert found["hit_rate_5_full"] == pytest.approx(np.mean([bool(ranks) and ranks[0] < 5 for ranks, _ in lists]))
    assert list(found) == [*RANKING, "examples", "users"]


def test_drawn_negatives_are_items_that_the_user_never_had_and_depend_on_nothing_else(group, tmp_path, monkeypatch):
    path = tmp_path / "pairs.parquet"
    users, items, part, liked = written(path)
    dataset, job = documents(path, "bpr", ["hit_rate_10"])
    data = prepare(dataset, job, tmp_path / "data")
    sharded = build(job, data, alpha=1e-4)
    drawn = []
    rank_of = full_ranking.rank_of
    monkeypatch.setattr(
        full_ranking,
        "rank_of",
        lambda target, others: (drawn.append((target, others)), rank_of(target, others))[1],
    )
    ranks = catalogue_ranks(sharded.module.eval(), data, "test", largest_k=1, sampled=True)
    ids = {name: np.append([-1, -1], data.vocabulary(name).to_numpy(zero_copy_only=False)) for name in ("user", "item")}
    scores = scores_of(sharded, data, range(NUM_USERS), range(NUM_ITEMS))
    ((_, others),) = drawn
    held = HeldOut(data, "test", 0, 1)
    user_number, _, _ = held.relevant_of(0, len(held.users))
    for number, row in zip(user_number, others.numpy(), strict=True):
        user = ids["user"][held.users[number]]
        had = set(items[(users == user) & ((part == "train") | (liked == 1))].tolist())
        never = [item for item in ids["item"][held.items] if item not in had]
        allowed = scores[user][never]
        assert len(row) == 100
        assert all(np.isclose(value, allowed, atol=1e-6).any() for value in row)
    again = catalogue_ranks(sharded.module, data, "test", largest_k=1, sampled=True)
    assert np.array_equal(ranks.sampled, again.sampled)
    assert len(ranks.sampled) == len(user_number)


def test_blocks_of_users_change_nothing(group, tmp_path, monkeypatch):
    path = tmp_path / "pairs.parquet"
    written(path)
    dataset, job = documents(path, "mf", RANKING, intervals={"replicates": 20})
    data = prepare(dataset, job, tmp_path / "data")
    module = build(job, data, alpha=1e-4).module.eval()
    whole = Evaluator(job, data, module).evaluate("test")
    monkeypatch.setattr(full_ranking, "USERS_AT_ONCE", 7)
    monkeypatch.setattr(full_ranking, "ROWS_AT_ONCE", 8)
    assert Evaluator(job, data, module).evaluate("test") == whole
    assert whole["recall_20_full_low"] < whole["recall_20_full"] < whole["recall_20_full_high"]
    monkeypatch.setattr(full_ranking, "MAX_CANDIDATES_BYTES", 100)
    large = Evaluator(job, data, module).evaluate("test")
    assert large["recall_20_full"] is None
    assert large["auc"] == whole["auc"]


def evaluated(directory: str, gather_rows: int):
    use_threads(1)
    run = read_run(directory)
    data = PreparedData.open(run.data)
    sharded = build(run.job, data, alpha=1e-4)
    sharded.eval()
    return [
        Evaluator(run.job, data, sharded.module, gather_rows=gather_rows).evaluate(s) for s in ("validation", "test")
    ]


@pytest.mark.parametrize("kind", ["bpr", "two_tower"])
def test_two_ranks_rank_as_one_does(group, ranks, tmp_path, kind):
    from trainer.runs.directory import write_run

    path = tmp_path / "pairs.parquet"
    written(path)
    dataset, job = documents(path, kind, RANKING, intervals={"replicates": 20})
    directory = write_run(tmp_path / "run", run_id="run", job=job, dataset=dataset, store_url=str(tmp_path / "store"))
    prepare(dataset, job, read_run(directory).data)
    alone = evaluated(str(directory), 10_000)
    told = ranks(2).run(evaluated, str(directory), 10_000)
    assert told[1] == [{}, {}]
    for mine, theirs in zip(told[0], alone, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=1e-6)
