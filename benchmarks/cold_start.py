"""New items by their features: a tenth of the items is left out of training altogether, and ranked for the users.

``python -m benchmarks.cold_start [--data ../shared/data] [--seeds 1] [--datasets ...] [--methods ...]``.
amazon_sports has attributes of items, ml1m genres and words of titles. Rows of the items that are left out are in no
file that a job reads; the item table has all items.
Each user with a training row and a click of a new item is shown all new items:

====================  ===============================================================================================
two_tower, 0          in-batch softmax, an item tower over id and features, ``item_id_dropout`` 0
two_tower, 0.1        the same with ``item_id_dropout`` .1
two_tower, 0.5        and .5
genres                the same with 0, features of items being genres alone (ml1m, as the next four)
genres, title         and the title as a text, by its words
genres, title, parts  and by the n-grams of 3 to 5 characters of these too
vector                the item's id and a projected vector: tf-idf of genres and words by 64 singular vectors
genres, title, vector all three
content               nearest neighbours by content: cosine of an item's tf-idf features and the mean of the user's
popular features      for every user alike: the mean, over an item's features, of the clicks of an item that has it
popularity            clicks of the item: none of any, so all are equal, and the figures are those of chance
random                an order drawn for each user
====================  ===============================================================================================

Prints one JSON line per run, and a Markdown table: recall@20 (the share of a user's clicks among new items that is
among the first 20) and AUC (the chance that a clicked new item is above one that is not), means over users, then seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainer.data.batches.bags import bags_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build
from trainer.distributed.item_tower import tower_outputs
from trainer.launch.on_host import leave, single_rank_group
from trainer.launch.worker import quiet, use_threads
from trainer.report_pages.markdown import table_of
from trainer.spec import parse_dataset, parse_job
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

K = 20
NEW_SHARE = 0.1
USERS_AT_ONCE = 1024
DROPOUTS = {"two_tower, 0": 0.0, "two_tower, 0.1": 0.1, "two_tower, 0.5": 0.5}
VECTOR_DIM = 64
GENRES = {"genres": {"type": "id_list"}}
TITLE = {"title": {"type": "text"}}
PARTS = {"title": {"type": "text", "ngrams": {"words": [1, 1], "characters": [3, 5]}}}
VECTOR = {"content": {"type": "vector", "dim": VECTOR_DIM, "transform": "normalize"}}
WITH_TITLES: dict[str, dict[str, Any]] = {
    "genres": GENRES,
    "genres, title": GENRES | TITLE,
    "genres, title, parts": GENRES | PARTS,
    "vector": VECTOR,
    "genres, title, vector": GENRES | TITLE | VECTOR,
}
"""Features of the item table, by method, of data sets that have titles."""
METHODS = (*DROPOUTS, *WITH_TITLES, "content", "popular features", "popularity", "random")

Scores = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]
"""Scores [users, new items] of users by their numbers."""


class Clicks(NamedTuple):
    """A data set: users and items by number, which items are new, and the features of all items.

    ``users``, ``items``: of each click. ``features`` [items]: texts of each item's features. ``titles`` [items], where
    there are any.
    """

    name: str
    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    features: list[list[str]]
    is_new: npt.NDArray[np.bool_]
    titles: list[str]

    @property
    def genres(self) -> list[list[str]]:
        return [[one for one in row if one.startswith("g:")] for row in self.features]

    @property
    def new(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self.is_new)

    def split(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the clicks to train on, and those to find: of new items, by users who are trained on."""
        of_new = self.is_new[self.items]
        trained = np.zeros(int(self.users.max()) + 1, dtype=bool)
        trained[self.users[~of_new]] = True
        return np.flatnonzero(~of_new), np.flatnonzero(of_new & trained[self.users])


class Loaded(NamedTuple):
    """Users and items of clicks, and by item its features and its title, where there are titles."""

    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    features: dict[int, list[str]]
    titles: dict[int, str]


def amazon_sports(folder: Path) -> Loaded:
    rows, table = pq.read_table(folder / "amazon_sports.parquet"), pq.read_table(folder / "amazon_sports_attrs.parquet")
    features = {row["item"]: [f"a{one}" for one in row["attrs"]] for row in table.to_pylist()}
    return Loaded(rows["user"].to_numpy().astype(np.int64), rows["item"].to_numpy().astype(np.int64), features, {})


def ml1m(folder: Path) -> Loaded:
    rows, table = pq.read_table(folder / "ml1m.parquet"), pq.read_table(folder / "ml1m_movies.parquet")
    liked = rows["rating"].to_numpy() >= 4
    features, titles = {}, {}
    for row in table.to_pylist():
        titles[row["item"]] = row["title"]
        words = {f"w:{word}" for word in re.findall(r"\w+", row["title"].lower())}
        features[row["item"]] = [f"g:{genre}" for genre in row["genres"].split("|")] + sorted(words)
    users, items = (rows[name].to_numpy().astype(np.int64)[liked] for name in ("user", "item"))
    return Loaded(users, items, features, titles)


DATASETS = {"amazon_sports": amazon_sports, "ml1m": ml1m}


def clicks_of(name: str, folder: Path, seed: int) -> Clicks:
    """Return a data set, a share of whose items, drawn from ``seed``, is new."""
    users, items, features, titles = DATASETS[name](folder)
    clicked = np.unique(items)
    is_new = np.random.default_rng(seed).random(len(clicked)) < NEW_SHARE
    return Clicks(
        name,
        np.unique(users, return_inverse=True)[1],
        np.searchsorted(clicked, items),
        [features.get(item, []) for item in clicked.tolist()],
        is_new,
        [titles[item] for item in clicked.tolist()] if titles else [],
    )


# --- methods ---------------------------------------------------------------------------------------------------------


def two_tower(
    clicks: Clicks,
    seed: int,
    epochs: int,
    folder: Path,
    *,
    dropout: float = 0.0,
    of_items: dict[str, Any] | None = None,
) -> Scores:
    """Train two towers, and return their scores of new items.

    ``of_items``: features of the item table, left out all of an item's features as one list.
    """
    trained, _ = clicks.split()
    rows = pa.table({"user": clicks.users[trained], "item": clicks.items[trained]})
    pq.write_table(rows, folder / "rows.parquet")
    columns: dict[str, Any] = {"item": np.arange(len(clicks.features)), "features": clicks.features}
    if of_items is not None:
        columns |= {"genres": clicks.genres, "title": clicks.titles, "content": content_vectors(clicks).tolist()}
    pq.write_table(pa.table(columns), folder / "items.parquet")
    features = {"features": {"type": "id_list"}} if of_items is None else of_items
    dataset = parse_dataset(
        {
            "name": "clicks",
            "uri": str(folder / "rows.parquet"),
            "features": {"user": {"type": "id"}, "item": {"type": "id"}},
            "items": {"uri": "items.parquet", "features": features},
            "label": {"negatives": {"per_positive": 1, "of": "item"}},
        }
    )
    job = parse_job(
        {
            "name": "cold-start",
            "dataset": {"name": "clicks"},
            "model": {
                "kind": "two_tower", "embedding_dim": 32, "hidden": [64], "loss": "sampled_softmax",
                "normalize": True, "temperature": 0.1, "item_id_dropout": dropout,
            },
            "optimizer": {"kind": "adam", "learning_rate": 0.003},
            "dense_optimizer": {"learning_rate": 0.003},
            "batch_size": 2048,
            "epochs": epochs,
            "seed": seed,
            "evaluation": {"split": {"kind": "random", "validation": 0.0, "test": 0.0}},
        }
    )  # fmt: skip
    data = prepare(dataset, job, folder / "data")
    sharded = build(job, data, alpha=None)
    Trainer(job, data, sharded, dense_optimizer(job, sharded)).train()
    sharded.eval()
    return _tower_scores(clicks, data, sharded.module)


def _tower_scores(clicks: Clicks, data: PreparedData, model: Any) -> Scores:
    device, catalogue = torch.device("cpu"), data.catalogue
    assert catalogue is not None
    place = {item: number for number, item in enumerate(catalogue.ids.to_pylist())}
    places = np.array([place[item] for item in clicks.new.tolist()])
    items = tower_outputs(model, data, places, device)
    row_of = np.zeros(int(clicks.users.max()) + 1, dtype=np.int64)
    row_of[data.vocabulary("user").to_numpy()] = np.arange(len(data.vocabulary("user"))) + 2

    @torch.no_grad()
    def scores(users: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        queries = model.user_side(bags_of(data.keys, {"user": row_of[users]}, len(users)))
        return (queries @ items.T).numpy()

    return scores


def profiles_of(clicks: Clicks) -> npt.NDArray[np.float32]:
    """Return the tf-idf of the features of each item, of length 1 [items, distinct features]."""
    names = {name: number for number, name in enumerate(sorted({one for row in clicks.features for one in row}))}
    profiles = np.zeros((len(clicks.features), len(names)), dtype=np.float32)
    for item, row in enumerate(clicks.features):
        profiles[item, [names[one] for one in row]] = 1.0
    profiles *= np.log(len(profiles) / np.maximum(profiles.sum(0), 1.0))
    profiles /= np.maximum(np.linalg.norm(profiles, axis=1, keepdims=True), 1e-12)
    return profiles


def content_vectors(clicks: Clicks) -> npt.NDArray[np.float32]:
    """Return :func:`profiles_of` in their first singular vectors, of which no click says anything."""
    left, values, _ = np.linalg.svd(profiles_of(clicks), full_matrices=False)
    return (left * values)[:, :VECTOR_DIM].astype(np.float32)


def content(clicks: Clicks) -> Scores:
    """Return cosines of new items with the mean of what each user clicked, by tf-idf of features."""
    trained, _ = clicks.split()
    profiles = profiles_of(clicks)
    order = np.argsort(clicks.users[trained], kind="stable")
    users, items = clicks.users[trained][order], clicks.items[trained][order]

    def scores(asked: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        starts, stops = np.searchsorted(users, asked), np.searchsorted(users, asked, side="right")
        queries = np.stack([profiles[items[a:b]].mean(0) for a, b in zip(starts, stops, strict=True)])
        return queries @ profiles[clicks.new].T

    return scores


def popular_features(clicks: Clicks) -> Scores:
    """Return, for every user alike, the mean over an item's features of the clicks of items that have it."""
    trained, _ = clicks.split()
    count = np.bincount(clicks.items[trained], minlength=len(clicks.features))
    total: dict[str, float] = {}
    number: dict[str, int] = {}
    for item in np.flatnonzero(~clicks.is_new):
        for one in clicks.features[item]:
            total[one] = total.get(one, 0.0) + count[item]
            number[one] = number.get(one, 0) + 1
    means = {one: total[one] / number[one] for one in total}
    of_items = np.array(
        [np.mean([means.get(one, 0.0) for one in clicks.features[item]] or [0.0]) for item in clicks.new]
    )
    return lambda users: np.broadcast_to(of_items.astype(np.float32), (len(users), len(of_items)))


def scores_of(method: str, clicks: Clicks, seed: int, epochs: int, folder: Path) -> Scores:
    """Return a method's scores."""
    if method in DROPOUTS:
        return two_tower(clicks, seed, epochs, folder, dropout=DROPOUTS[method])
    if method in WITH_TITLES:
        return two_tower(clicks, seed, epochs, folder, of_items=WITH_TITLES[method])
    if method == "content":
        return content(clicks)
    if method == "popular features":
        return popular_features(clicks)
    if method == "popularity":
        return lambda users: np.zeros((len(users), len(clicks.new)), dtype=np.float32)
    generator = np.random.default_rng(seed)
    return lambda users: generator.random((len(users), len(clicks.new)), dtype=np.float32)


# --- figures ---------------------------------------------------------------------------------------------------------


def figures(clicks: Clicks, scores: Scores) -> dict[str, float]:
    """Return recall@20 and AUC among new items, means over users; items of equal score share their places."""
    recalls, aucs = [], []
    for users, relevant in _users(clicks):
        block = scores(users)
        above = np.sort(block, axis=1)
        for number, own in enumerate(relevant):
            goal = block[number, own]
            below = np.searchsorted(above[number], goal)
            through = np.searchsorted(above[number], goal, side="right")
            # In a random order of the equal ones: the chance to be among the first K, and the expected share below.
            better, equal = block.shape[1] - through, through - below
            recalls.append(float(np.clip((K - better) / equal, 0.0, 1.0).mean()))
            aucs.append(_auc(block[number], own))
    return {"recall": float(np.mean(recalls)), "auc": float(np.mean(aucs)), "users": len(recalls)}


def _auc(scores: npt.NDArray[np.float32], relevant: npt.NDArray[np.int64]) -> float:
    """Return the chance that a relevant item is above another, ties counting half."""
    is_relevant = np.zeros(len(scores), dtype=bool)
    is_relevant[relevant] = True
    others = np.sort(scores[~is_relevant])
    below, through = (np.searchsorted(others, scores[is_relevant], side=side) for side in ("left", "right"))
    return float(((below + through) / (2 * len(others))).mean())


def _users(clicks: Clicks) -> Iterator[tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]]:
    """Yield users in blocks, and for each the places of the new items that the user clicked."""
    _, held = clicks.split()
    pairs = np.unique(np.stack([clicks.users[held], np.searchsorted(clicks.new, clicks.items[held])]), axis=1)
    users, starts = np.unique(pairs[0], return_index=True)
    lists = np.split(pairs[1], starts[1:])
    for start in range(0, len(users), USERS_AT_ONCE):
        yield users[start : start + USERS_AT_ONCE], lists[start : start + USERS_AT_ONCE]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the means over seeds as Markdown."""
    lines = []
    for name in dict.fromkeys((one["case"], one["method"]) for one in results):
        own = [one for one in results if (one["case"], one["method"]) == name]
        means = {figure: np.mean([one[figure] for one in own]) for figure in ("recall", "auc", "seconds")}
        lines.append((*name, f"{means['recall']:.4f}", f"{means['auc']:.4f}", f"{means['seconds']:.0f}"))
    return table_of(("data", "method", "recall@20", "AUC", "seconds"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_start", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1: which items are new, and initial weights")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--datasets", default=",".join(DATASETS), help=f"of {', '.join(DATASETS)}")
    parser.add_argument(
        "--methods", default=";".join(METHODS), help=f"separated by semicolons, of {'; '.join(METHODS)}"
    )
    options = parser.parse_args(arguments)
    names, methods = options.datasets.split(","), options.methods.split(";")
    unknown = [*(set(names) - DATASETS.keys()), *(set(methods) - set(METHODS))]
    if unknown:
        parser.error(f"no such data set or method: {', '.join(unknown)}")
    quiet()
    use_threads(1)
    results = []
    with single_rank_group():
        for name in names:
            for seed in range(options.seeds):
                clicks = clicks_of(name, options.data, seed)
                for method in methods:
                    if method in WITH_TITLES and not clicks.titles:
                        continue
                    started = time.perf_counter()
                    with tempfile.TemporaryDirectory(prefix="evenkeel-cold-start-") as folder:
                        found = figures(clicks, scores_of(method, clicks, seed, options.epochs, Path(folder)))
                    seconds = time.perf_counter() - started
                    results.append({"case": name, "method": method, "seed": seed, **found, "seconds": seconds})
                    told = {**results[-1], "new_items": len(clicks.new)}
                    shown = {key: round(value, 5) if isinstance(value, float) else value for key, value in told.items()}
                    print(json.dumps({"bench": "cold_start", **shown}), flush=True)
    print()
    print(table(results))
    return 0


if __name__ == "__main__":
    leave(main())
