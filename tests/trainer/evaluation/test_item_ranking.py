"""Rankings of all items of an item table, against sorted lists of the model's own scores of pairs."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.trainer.evaluation.test_full_ranking import ranks_by_sorting
from tests.trainer.item_tables import (
    NUM_CLICKED,
    NUM_ITEMS,
    NUM_USERS,
    RANKING,
    dataset_at,
    genre_of,
    job_of,
    prepared_log,
)
from tests.trainer.trainings import trainer_of
from trainer.data.batches.bags import bags_of
from trainer.data.prepare.examples import take
from trainer.data.prepare.preparation import prepare
from trainer.evaluation.evaluator import Evaluator
from trainer.launch.on_host import single_rank_group


def job_with(model, **changes):
    evaluation = {"split": {"kind": "column", "column": "part"}, "metrics": RANKING}
    return job_of(model, evaluation=evaluation, **changes)


def with_cold_test(folder):
    """A log whose test part has clicks of items that nobody had before; its path."""
    path = prepared_log(folder)
    rows = pq.read_table(path).to_pandas()
    is_test = np.flatnonzero(rows.part == "test")[::2]
    rng = np.random.default_rng(5)
    rows.loc[is_test, "item"] = rng.integers(NUM_CLICKED, NUM_ITEMS, len(is_test))
    rows.loc[is_test, "click"] = (genre_of(rows.item[is_test]) == rows.user[is_test] % 4).astype(int)
    rows.to_parquet(path)
    return path, rows


def scores_of_pairs(trainer, data):
    """[users, items] by raw id: the model's own scores of a user with an item of the catalogue."""
    catalogue, model = data.catalogue, trainer.sharded.module
    users = {raw: row + 2 for row, raw in enumerate(data.vocabulary("user").to_pylist())}
    tastes = {raw: row + 2 for row, raw in enumerate(data.vocabulary("taste").to_pylist())}
    scores = np.zeros((NUM_USERS, NUM_ITEMS))
    places = np.arange(len(catalogue))
    ids = np.array(catalogue.ids.to_pylist())
    for user in range(NUM_USERS):
        parts = {name: take(column, places) for name, column in catalogue.features.items()}
        parts |= {"item": catalogue.rows, "user": np.full(len(places), users[user])}
        parts["taste"] = np.full(len(places), tastes[user % 4])
        with torch.no_grad():
            found = model(bags_of(data.keys, parts, len(places)), torch.from_numpy(catalogue.numbers[places]))
        scores[user, ids] = found.double().numpy()
    return scores


@pytest.mark.parametrize("split", ["validation", "test"])
def test_figures_are_those_of_sorted_lists_of_all_items(tmp_path, split):
    path, rows = with_cold_test(tmp_path)
    data = prepare(dataset_at(path), job_with({}), tmp_path / "data")
    with single_rank_group():
        trainer = trainer_of(job_with({}), data)
        trainer.sharded.eval()
        found = Evaluator(job_with({}), data, trainer.sharded.module).evaluate(split)
        scores = scores_of_pairs(trainer, data)
    lists = []
    for user in range(NUM_USERS):
        own = rows[rows.user == user]
        relevant = set(own.item[(own.part == split) & (own.click == 1)])
        excluded = set(own.item[own.part == "train"])
        if split == "test":
            excluded |= set(own.item[(own.part == "validation") & (own.click == 1)])
        relevant -= excluded
        if relevant:
            lists.append((ranks_by_sorting(scores[user], excluded, relevant), len(relevant)))
    assert found["users"] == len(lists) > 20
    expected = np.mean([sum(rank < 20 for rank in ranks) / count for ranks, count in lists])
    assert found["recall_20_full"] == pytest.approx(expected, abs=1e-12)
    gain = [sum(1 / np.log2(rank + 2) for rank in ranks if rank < 10) for ranks, _ in lists]
    ideal = [sum(1 / np.log2(rank + 2) for rank in range(min(10, count))) for _, count in lists]
    assert found["ndcg_10_full"] == pytest.approx(np.mean(np.divide(gain, ideal)), abs=1e-12)


def test_new_items_are_found_by_their_features(tmp_path):
    """Users click by genre: a model that reads genres knows which of the new items they will click, and one that reads
    brands, which say nothing, does not."""
    path, _ = with_cold_test(tmp_path)
    aucs = {}
    for name, features in {
        "genres": {"genres": {"type": "id_list", "pooling": "sum"}},
        "brand": {"brand": {"type": "id"}},
    }.items():
        dataset = dataset_at(path, {"features": features})
        job = job_with({}, epochs=6)
        data = prepare(dataset, job, tmp_path / name)
        with single_rank_group():
            trainer = trainer_of(job, data)
            trainer.train()
            trainer.sharded.eval()
            found = Evaluator(job, data, trainer.sharded.module).evaluate("test")
        aucs[name] = found["auc"]
    assert aucs["genres"] > aucs["brand"] + 0.1
