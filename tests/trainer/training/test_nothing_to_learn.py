"""Clicks at random, of which no model can know the next: AUC is one half, whatever draws the negatives and who trains.

A model that had learned which negatives were drawn would know the held-out clicks, which are the only other pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.trainings import trainer_of
from trainer.data.prepare.preparation import prepare
from trainer.launch.on_host import single_rank_group
from trainer.spec import parse_dataset, parse_job
from trainer.training.hooks import Hooks

USERS, ITEMS = 150, 40
SPLITS = {
    "random": {"kind": "random", "validation": 0.1, "test": 0.3},
    "time": {"kind": "time", "validation": 0.1, "test": 0.3},
    "per_user_last": {"kind": "per_user_last", "num_test": 6},
    "column": {"kind": "column", "column": "side", "validation": 0.1},
}
EACH_ONCE, AGAIN = "each item once", "again and again"


def clicks(kind: str, seed: int = 8) -> pa.Table:
    """20 clicks of each user in turn: other items each, or any."""
    draw = np.random.default_rng(seed)
    items = [draw.permutation(ITEMS)[:20] if kind == EACH_ONCE else draw.integers(0, ITEMS, 20) for _ in range(USERS)]
    item = np.concatenate(items)
    side = np.where(draw.random(len(item)) < 0.3, "test", "train")
    return pa.table(
        {
            "user": np.repeat(np.arange(USERS), 20), "item": item, "ts": np.tile(np.arange(20), USERS), "side": side,
            "brand": item % 8,
        }
    )  # fmt: skip


def specs(folder, kind=EACH_ONCE, split="time", model=None, label=None, **fields):
    pq.write_table(clicks(kind), folder / "rows.parquet")
    features = {"user": {"type": "id"}, "item": {"type": "id"}, **fields.pop("features", {})}
    label = label or {"negatives": {"per_positive": 4, "of": "item"}}
    dataset = {"name": "clicks", "uri": str(folder / "rows.parquet"), "features": features, "timestamp": "ts"}
    job = {
        "name": "nothing", "dataset": {"name": "clicks"}, "batch_size": 256, "epochs": 8,
        "model": {"kind": "fm", "embedding_dim": 16, "init": {"kind": "hash", "std": 0.1}} | (model or {}),
        "optimizer": {"kind": "adam", "learning_rate": 0.02}, "evaluation": {"split": SPLITS[split]}, **fields,
    }  # fmt: skip
    return parse_dataset(dataset | {"label": label}), parse_job(job)


def three_errors(num_positives: int, num_negatives: int) -> float:
    """Three standard errors of the AUC of scores that say nothing, by Mann and Whitney."""
    return 3 * float(np.sqrt((num_positives + num_negatives + 1) / (12 * num_positives * num_negatives)))


@pytest.mark.parametrize("kind", [EACH_ONCE, AGAIN])
@pytest.mark.parametrize("distribution", ["uniform", "popularity"])
@pytest.mark.parametrize("split", SPLITS)
def test_what_was_drawn_says_nothing_of_the_test(split, distribution, kind, tmp_path):
    """Scores that a model may come to: of a pair by how often it was drawn and clicked, of an item, of a user."""
    label = {"negatives": {"per_positive": 4, "of": "item", "distribution": distribution}}
    dataset, job = specs(tmp_path, kind, split, label=label)
    data = prepare(dataset, job, tmp_path / "data")
    keys = {key.name: key for key in data.keys}

    def columns(split):
        user, item = (np.asarray(data.column(split, keys[name])).astype(np.int64) for name in ("user", "item"))
        return {"pair": user * 1000 + item, "item": item, "user": user}, np.asarray(data.labels(split)).astype(float)

    (train, clicked), (test, labels) = columns("train"), columns("test")
    bound = three_errors(data.num_positives["test"], data.num_examples["test"] - data.num_positives["test"])
    for name, of in train.items():
        if (name, distribution) == ("item", "popularity"):
            continue  # What was clicked most is drawn most, in the test too: that is the setting.
        size = max(of.max(), test[name].max()) + 1
        seen = np.bincount(of, minlength=size)
        rates = (np.bincount(of, clicked, size) + clicked.mean()) / (seen + 1)
        assert abs(auc(rates[test[name]], labels) - 0.5) < bound, name


def auc(scores: npt.NDArray[np.float64], labels: npt.NDArray[np.float64]) -> float:
    """The chance that a positive is above a negative, ties one half."""
    below = np.sort(scores[labels == 0])
    positives = scores[labels == 1]
    places = np.searchsorted(below, positives, "left") + np.searchsorted(below, positives, "right")
    return float(places.mean() / (2 * len(below)))


JOBS: dict[str, dict[str, Any]] = {
    "fm": {},
    "dnn with the item's brand": {
        "model": {"kind": "dnn", "hidden": [16]}, "features": {"brand": {"type": "id"}}, "split": "random",
    },
    "two towers": {"model": {"kind": "two_tower", "hidden": [16]}},
    "two towers, in the batch": {"model": {"kind": "two_tower", "hidden": [16], "loss": "sampled_softmax"}},
    "bpr": {"model": {"kind": "bpr", "loss": "bpr"}},
    "bpr by popularity": {"model": {"kind": "bpr", "loss": "bpr", "negative_distribution": "popularity"}},
    "bpr in the batch": {"model": {"kind": "bpr", "loss": "bpr", "negative_distribution": "in_batch"}},
    "sasrec": {"model": {"kind": "sasrec", "loss": "bce", "length": 10}, "label": {"positive": "every_row"}},
    "gru4rec": {"model": {"kind": "gru4rec", "loss": "bce", "length": 10}, "label": {"positive": "every_row"}},
    "item2vec": {"model": {"kind": "item2vec"}, "label": {"positive": "every_row"}},
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_no_model_knows_the_next_click(name, tmp_path):
    settings = dict(JOBS[name])
    dataset, job = specs(tmp_path, **settings)
    data = prepare(dataset, job, tmp_path / "data")
    found = []
    with single_rank_group():
        hooks = Hooks(lambda event, **fields: found.append(fields) if event == "metric" else None)
        trainer_of(job, data, hooks=hooks).train()
    (*_, last) = [one for one in found if one["split"] == "test"]
    positives = data.num_positives["test"]
    # The 100 negatives of an example of a sequence model are some 20 items.
    is_sequence = job.model.reads_sequences
    bound = three_errors(positives, 20 * positives if is_sequence else data.num_examples["test"] - positives)
    assert abs(last["auc"] - 0.5) < bound
