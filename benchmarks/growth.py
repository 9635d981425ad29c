"""Dynamic tables and TorchRec's zero-collision modules: time for each id, share of ids with a row, time of a step.

Ids are 64-bit, drawn by Zipf (exponent 1.05) from three million at a time, of which a thousandth is replaced by new ids
at each step, so that a table of a million rows is full after a while and old ids have to go. Bench ``assign``: our
:class:`embeddings.dynamic.id_map.DynamicIdMap` and the peer get the same ids in turns in one process; the time is that
of mapping a step's ids to rows, after ``--steps`` steps that are not timed. ``own_row``: share of the timed ids that
share their row with no other id.

Peers: ``mch_lru``, ``mch_lfu``: MCHManagedCollisionModule, which sorts its ids and lets ids in and out every
``EVICTION_INTERVAL`` batches. (HashZchManagedCollisionModule trains only on CUDA.) ``find`` compares the peer's lookup
in evaluation mode with ours. Bench ``step`` compares lookup, backward and step of AdamAR on raw ids with the same work
on row numbers.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.support.harness import interleave, line
from embeddings.dynamic.id_map import DynamicIdMap
from embeddings.dynamic.settings import UNKNOWN_ROW, IdMapSettings
from embeddings.dynamic.tables import DynamicTables
from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import AdamAR
from embeddings.tables.config import InitConfig, TableConfig

CAPACITY = 1_000_000
NUM_IDS = 3_000_000
BATCH = 53_248
NEW_SHARE = 0.001
# Batches between two evictions; TorchRec's own examples use 1 to 10. Batches in between get no new rows.
EVICTION_INTERVAL = 10
DIM = 64


class Stream:
    """Batches of raw ids, int64 [BATCH]; some of the frequent ids are new."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        self._raw = self._generator.integers(0, 2**60, NUM_IDS)
        weights = np.arange(1, NUM_IDS + 1, dtype=np.float64) ** -1.05
        self._cumulative = np.cumsum(weights) / weights.sum()

    def __call__(self) -> np.ndarray:
        places = self._generator.integers(0, NUM_IDS, int(NEW_SHARE * NUM_IDS))
        self._raw[places] = self._generator.integers(0, 2**60, len(places))
        ranks = np.searchsorted(self._cumulative, self._generator.random(BATCH))
        return self._raw[np.minimum(ranks, NUM_IDS - 1)]


class Managed:
    """One of TorchRec's modules as a function from raw ids to rows; ids without a row share the last row."""

    def __init__(self, policy: Any) -> None:
        from torchrec import JaggedTensor
        from torchrec.modules.mc_modules import MCHManagedCollisionModule

        self._jagged, self._lengths = JaggedTensor, torch.tensor([BATCH])
        self.module = MCHManagedCollisionModule(
            zch_size=CAPACITY,
            device=torch.device("cpu"),
            eviction_policy=policy,
            eviction_interval=EVICTION_INTERVAL,
            input_hash_size=2**60,
        )

    def __call__(self, raw: np.ndarray) -> torch.Tensor:
        found = self.module({"item": self._jagged(values=torch.from_numpy(raw), lengths=self._lengths)})
        return found["item"].values()  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.module.buffers())


def managed_modules() -> dict[str, Callable[[], Managed]]:
    from torchrec.modules.mc_modules import LFU_EvictionPolicy, LRU_EvictionPolicy

    return {"mch_lru": lambda: Managed(LRU_EvictionPolicy()), "mch_lfu": lambda: Managed(LFU_EvictionPolicy())}


def assign(peer: str, growth: IdMapSettings, steps: int, iterations: int) -> None:
    """Print the lines of benches ``assign`` and ``find``, compared with one peer."""
    stream, ours, theirs = Stream(), DynamicIdMap(growth), managed_modules()[peer]()
    step, own = 0, np.zeros(2)

    def give(raw: np.ndarray) -> None:
        nonlocal step
        step += 1
        own[0] += (ours.assign(raw, step).entries >= 0).mean()

    def give_theirs(raw: np.ndarray) -> None:
        own[1] += float((theirs(raw) < CAPACITY - 1).float().mean())

    for _ in range(steps):
        raw = stream()
        give(raw)
        give_theirs(raw)
    own[:] = 0
    times = interleave(stream, give, give_theirs, iterations=iterations, warm_up=0)
    shares = {"own_row": round(own[0] / iterations, 4), "peer_own_row": round(own[1] / iterations, 4)}
    sizes = {"bytes_per_row": num_bytes(ours) // CAPACITY, "peer_bytes_per_row": theirs.num_bytes // CAPACITY}
    case = f"capacity {CAPACITY} ids {BATCH} admission_threshold {growth.admission_threshold}"
    line("assign", case, peer, times, **means(times), **shares, **sizes, rows=len(ours), warm_up_steps=steps)
    theirs.module.eval()
    times = interleave(stream, ours.find, theirs, iterations=iterations)
    line("find", case, peer, times)


def means(times: np.ndarray) -> dict[str, float]:
    """Return the mean milliseconds of both; medians would miss the few steps that make room for later steps."""
    ours, theirs = times.mean(axis=0)
    return {"ours_mean_ms": round(float(ours), 4), "peer_mean_ms": round(float(theirs), 4)}


def num_bytes(ids: DynamicIdMap) -> int:
    """Return the bytes of all arrays of a map."""
    return sum(value.nbytes for value in vars(ids).values() if isinstance(value, np.ndarray))


def whole_step(steps: int, iterations: int) -> None:
    """Print the line of bench ``step``."""
    growth = IdMapSettings(CAPACITY)
    config = TableConfig("item", growth.num_rows, DIM, ("item",), init=InitConfig("hash"), grows=True)
    growing = DynamicTables({"item": growth}, [config], AdamAR(0.001, alpha=1e-5))
    known = EmbeddingTables([TableConfig("item", growth.num_rows, DIM, ("item",))], AdamAR(0.001, alpha=1e-5))
    stream, offsets, gradient = Stream(), torch.arange(BATCH + 1), torch.rand(BATCH, DIM)
    rows = torch.full((BATCH,), UNKNOWN_ROW)

    def step_growing(raw: np.ndarray) -> None:
        nonlocal rows
        rows = growing.rows_of(torch.from_numpy(raw), offsets)
        growing.tables(rows, offsets).backward(gradient)
        growing.step(growing.tables.completed_steps + 1)

    def step_known(raw: np.ndarray) -> None:
        known(rows, offsets).backward(gradient)
        known.step(known.completed_steps + 1)

    for _ in range(steps):
        raw = stream()
        step_growing(raw)
        step_known(raw)
    before = len(growing.ids["item"])
    growing.take_gone("item")
    times = interleave(stream, step_growing, step_known, iterations=iterations, warm_up=0)
    num_new = len(growing.ids["item"]) - before + len(growing.take_gone("item"))
    case = f"capacity {CAPACITY} ids {BATCH} D{DIM}"
    line(
        "step", case, "known rows", times, **means(times), rows=len(growing.ids["item"]), new_rows=num_new // iterations
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps before the timed ones")
    parser.add_argument("--iterations", type=int, default=101)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=UserWarning)
    for peer in managed_modules():
        assign(peer, IdMapSettings(CAPACITY), options.steps, options.iterations)
    assign("mch_lru", IdMapSettings(CAPACITY, admission_threshold=2), options.steps, options.iterations)
    whole_step(options.steps, options.iterations)


if __name__ == "__main__":
    main()
