"""Steps of sequence models: lists in groups of about one length, beside all padded to the longest of the batch.

Lengths are those of the users of a data set, at most ``length``; ids are drawn. Bench ``train``: forward and backward
of the loss, one negative, dropout .2; ``query``: the queries of an evaluation. Both without the kernel's lookup and
update. ``padded`` is the same model with one group. Bench ``last``: the queries, which ask the last layer for the last
state alone, beside all its states, of which the last is taken.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from benchmarks.support.harness import interleave, line
from trainer.data.batches.keys import Key
from trainer.data.prepare.sequences import SEQUENCE_KEYS
from trainer.launch.worker import steady_memory
from trainer.models.base import ModelInputs
from trainer.models.layers import length_groups
from trainer.models.registry import MODELS
from trainer.spec.models.sequences import GRU4RecSpec, HSTUSpec, SASRecSpec

CASES = (("ml1m", 200), ("ml1m", 50), ("amazon_beauty", 50))
SPECS = {"sasrec": SASRecSpec, "hstu": HSTUSpec, "gru4rec": GRU4RecSpec}
DIM, DROPOUT = 64, 0.2
NUM_ROWS, BATCH_SIZE = 3000, 128


class Rows(nn.Module):
    """One table for all features, a row for each id."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_ROWS, DIM))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return {
            key: JaggedTensor(self.weight.index_select(0, features[key].values()), lengths=features[key].lengths())
            for key in SEQUENCE_KEYS
        }


def make_model(kind: str, length: int) -> Any:
    """Return a model of this kind in training."""
    spec = SPECS[kind](kind=kind, embedding_dim=DIM, length=length)
    keys = tuple(Key(name, name, False, "mean") for name in SEQUENCE_KEYS)
    return MODELS[kind](Rows(), spec, ModelInputs(keys, dropout=DROPOUT)).train()


def list_lengths(data: Path, name: str, length: int) -> np.ndarray:
    """Return how many items each user's training list has."""
    columns = pq.read_schema(data / f"{name}.parquet").names
    user = next(column for column in columns if "user" in column)
    users = pq.read_table(data / f"{name}.parquet", columns=[user]).column(0).to_numpy()
    counts = np.unique(users, return_counts=True)[1] - 3  # The last two are held out, and the first has no target.
    return np.minimum(counts[counts > 0], length)


def sampler(lengths: np.ndarray) -> Callable[[], Any]:
    """Return a function that draws a batch of users."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    steps = iter(range(1 << 30))

    def draw() -> Any:
        own = torch.from_numpy(rng.choice(lengths, BATCH_SIZE))
        ids = torch.randint(2, NUM_ROWS, (len(SEQUENCE_KEYS) * int(own.sum()),), generator=generator)
        features = KeyedJaggedTensor(
            keys=list(SEQUENCE_KEYS), values=ids, lengths=own.repeat(len(SEQUENCE_KEYS)), stride=BATCH_SIZE
        )
        return SimpleNamespace(features=features, step=next(steps), sample_offset=0)

    return draw


def padded(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``work`` with all lists of a batch in one group."""

    def padding(batch: Any) -> Any:
        kept, length_groups.WORTH_A_GROUP = length_groups.WORTH_A_GROUP, math.inf
        try:
            return work(batch)
        finally:
            length_groups.WORTH_A_GROUP = kept

    return padding


def all_states(model: Any) -> Callable[[Any], Any]:
    """Return queries by the states at all places."""

    def encode(items: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(items.shape[1])
        positions = (model.length - lengths[:, None] + columns).clamp(max=model.length - 1)
        states = model.hidden(items, positions, lambda x, site: x)
        found: torch.Tensor = model.finished(states[torch.arange(len(lengths)), lengths - 1])
        return found

    @torch.no_grad()
    def query(batch: Any) -> Any:
        kept, model.encode = model.encode, encode
        try:
            return model.queries(model.embeddings(batch.features))
        finally:
            model.encode = kept

    return query


def run(data: Path, name: str, length: int, kind: str, iterations: int) -> Iterator[dict[str, Any]]:
    """Yield a line of training and two of queries."""
    model, draw = make_model(kind, length), sampler(list_lengths(data, name, length))

    def loss(batch: Any) -> torch.Tensor:
        found: torch.Tensor = model.loss(batch).sum()
        return found

    def train(batch: Any) -> None:
        model.zero_grad()
        loss(batch).backward()

    @torch.no_grad()
    def query(batch: Any) -> torch.Tensor:
        found: torch.Tensor = model.queries(model.embeddings(batch.features))
        return found

    batch = draw()
    torch.testing.assert_close(loss(batch), padded(loss)(batch), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(query(batch), padded(query)(batch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(query(batch), all_states(model)(batch), rtol=1e-4, atol=1e-5)
    for bench, work, peer, other in (
        ("train", train, "padded", padded(train)),
        ("query", query, "padded", padded(query)),
        ("last", query, "all states", all_states(model)),
    ):
        times = interleave(draw, work, other, iterations=iterations)
        yield line(bench, f"{kind} {name} length {length} B{BATCH_SIZE} D{DIM}", peer, times, equal="outputs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--iterations", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with steady_memory():
        for name, length in CASES:
            for kind in SPECS:
                for _ in run(options.data, name, length, kind, options.iterations):
                    pass


if __name__ == "__main__":
    main()
