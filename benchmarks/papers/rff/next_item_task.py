"""A consumer of frozen item features: a two-tower model that predicts which item a user takes next.

Xu et al., Some Practical Concerns and Solutions for Using Pretrained Representation, appendix F, figure A.2: task 2.

    user    GRU over the features of the items so far, then a dense layer with a sigmoid
    item    a dense layer with a sigmoid over its features
    score   the inner product of both, plus a bias

Trained sequence to sequence: at each position the next item against a few uniform negatives, by binary cross entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.papers.rff.figures import Features, aligned
from embeddings.vectors.item_vectors import Array
from trainer.metrics.ranking import Ranking, rank_of

HIDDEN = 16
LENGTH = 50
"""Number of the newest items of a history that the model reads."""
NEGATIVES = 3
CANDIDATES = 100
BATCH_USERS = 64
LEARNING_RATE = 1e-2
"""At the paper's .001 the loss still falls after sixty epochs of such batches; the paper gives no batch size."""
WEIGHT_DECAY = 1e-4
IMPROVEMENT, PATIENCE = 1e-4, 3
"""Training ends when the loss has improved by less than IMPROVEMENT for PATIENCE epochs."""
MAX_EPOCHS = 60


class Histories(NamedTuple):
    """The histories of u users; items are row numbers of the feature matrix.

    ``items`` int64 [u, LENGTH]: the items before the test item, oldest first, padded with -1 in front; ``test`` int64
    [u]: the last item; ``candidates`` int64 [u, CANDIDATES]: items that the user never took.
    """

    items: Array
    test: Array
    candidates: Array


@dataclass(frozen=True)
class NextItem:
    """Recall@5 and NDCG@5 of each run's consumer, and recall@5 of frozen consumers.

    The frozen consumer is that of the first run, on the vectors of the others, unaligned and aligned to the first.
    """

    recall: tuple[float, ...]
    ndcg: tuple[float, ...]
    frozen: tuple[float, ...]
    frozen_aligned: tuple[float, ...]


def histories(rows: Path, ids: Array, seed: int = 0) -> Histories:
    """Return the histories of users in ``rows`` (Parquet: user, item, pos) whose items have vectors.

    Only users whose last item and at least two earlier ones are among ``ids`` int64 [n] count; ``ids`` are the items of
    the feature matrix in its order. Negative candidates are drawn once, by ``seed``.
    """
    table = pq.read_table(rows, columns=["user", "item", "pos"])
    user, item, pos = (table[name].to_numpy() for name in table.column_names)
    order = np.argsort(ids)
    position = np.minimum(np.searchsorted(ids, item, sorter=order), len(ids) - 1)
    row = np.where(ids[order[position]] == item, order[position], -1)
    by_user = np.lexsort((pos, user))
    starts = np.flatnonzero(np.diff(user[by_user], prepend=-1))
    draw = np.random.Generator(np.random.Philox(seed))
    items, test, candidates = [], [], []
    for taken in np.split(row[by_user], starts[1:]):
        known = taken[:-1][taken[:-1] >= 0][-LENGTH:]
        others = np.setdiff1d(np.arange(len(ids)), taken)
        if taken[-1] < 0 or len(known) < 2 or len(others) < CANDIDATES:
            continue
        items.append(np.concatenate([np.full(LENGTH - len(known), -1), known]))
        test.append(taken[-1])
        candidates.append(draw.choice(others, CANDIDATES, replace=False))
    return Histories(np.array(items), np.array(test), np.array(candidates))


class TwoTower(torch.nn.Module):
    """Scores of items for users who have a history.

    ``features`` float32 [n, k] are frozen. The features are standardised, since a view's features are small and not
    centred.
    """

    def __init__(self, features: torch.Tensor):
        super().__init__()
        self._mean, self._scale = features.mean(dim=0), features.std(dim=0) + 1e-9
        self.read(features)
        self.history = torch.nn.GRU(features.shape[1], HIDDEN, batch_first=True)
        self.user = torch.nn.Linear(HIDDEN, HIDDEN)
        self.item = torch.nn.Linear(features.shape[1], HIDDEN)
        # At first each product of two sigmoids is a quarter: this bias makes scores start at 0.
        self.bias = torch.nn.Parameter(torch.tensor(-HIDDEN / 4))

    def read(self, features: torch.Tensor) -> None:
        """Switch to other features of the same items, standardised by the moments of the first features."""
        # Row -1 stands for no item.
        self._features = torch.cat([(features - self._mean) / self._scale, torch.zeros(1, features.shape[1])])

    def users(self, items: torch.Tensor) -> torch.Tensor:
        """Return the user states [b, l, HIDDEN] after each item of ``items`` int64 [b, l]."""
        states, _ = self.history(self._features[items])
        towers: torch.Tensor = torch.sigmoid(self.user(states))
        return towers

    def scores(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the scores [..., c] of ``items`` int64 [..., c] for ``users`` [..., HIDDEN]."""
        towers = torch.sigmoid(self.item(self._features[items]))
        return torch.einsum("...h,...ch->...c", users, towers) + self.bias


def train(features: Array, of: Histories, max_epochs: int = MAX_EPOCHS, seed: int = 0) -> TwoTower:
    """Return the consumer, trained on all items except the test items; the arguments decide the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TwoTower(torch.from_numpy(features))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    items, num_items = torch.from_numpy(of.items), len(features)
    best, since = float("inf"), 0
    for _ in range(max_epochs):
        losses = []
        for users in torch.randperm(len(items), generator=generator).split(BATCH_USERS):
            history = items[users]
            # Columns that are padding for the whole batch are cut off, to save steps of the GRU.
            history = history[:, int((history >= 0).any(dim=0).long().argmax()) :]
            past, following = history[:, :-1], history[:, 1:]
            negatives = torch.randint(num_items, (*following.shape, NEGATIVES), generator=generator)
            scores = model.scores(model.users(past), torch.cat([following.unsqueeze(-1), negatives], dim=-1))
            labels = torch.zeros_like(scores)
            labels[..., 0] = 1.0
            loss = binary_cross_entropy_with_logits(scores[past >= 0], labels[past >= 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        mean = float(np.mean(losses))
        since = 0 if mean < best - IMPROVEMENT else since + 1
        best = min(best, mean)
        if since == PATIENCE:
            break
    return model


def judge(model: TwoTower, of: Histories) -> tuple[float, float]:
    """Return (recall@5, NDCG@5) of the test items among the candidates."""
    with torch.no_grad():
        users = model.users(torch.from_numpy(of.items))[:, -1]
        shown = torch.from_numpy(np.column_stack([of.test, of.candidates]))
        scores = model.scores(users, shown).numpy()
    ranking = Ranking.of_single(rank_of(scores[:, 0], scores[:, 1:]))
    return float(ranking.hit_rate(5).mean()), float(ranking.ndcg(5).mean())


def judge_runs(runs: Sequence[Array], features: Features, of: Histories, max_epochs: int = MAX_EPOCHS) -> NextItem:
    """Train and evaluate a consumer on each run's vectors [n, d]."""

    def read(vectors: Array) -> Array:
        return np.ascontiguousarray(features(vectors), dtype=np.float32)

    models = [train(read(vectors), of, max_epochs) for vectors in runs]
    figures = [judge(model, of) for model in models]

    def frozen(others: Sequence[Array]) -> tuple[float, ...]:
        judged = []
        for vectors in others:
            models[0].read(torch.from_numpy(read(vectors)))
            judged.append(judge(models[0], of)[0])
        return tuple(judged)

    recalls, gains = zip(*figures, strict=True)
    return NextItem(recalls, gains, frozen(runs[1:]), frozen(aligned(runs)[1:]))
