"""Lookup and pooling: ``plain`` (rows as stored) and ``training`` (AdamAR: decay and idle momentum at read).

``dense bfloat16``: dense moments stored in half the bytes (``state_dtype`` of a job's table).

The peer of both is FBGEMM's plain lookup of the same number of rows, so the ratio shows the cost of deferred updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.support import peers
from benchmarks.support.harness import Workload, interleave, line, main
from embeddings.optim import SGD, AdamAR

# Steps of training before the timed lookups: momentum then no longer moves most rows, but still some.
NUM_STEPS = 500


def call(module: Any) -> Callable[[Any], Any]:
    return lambda given: module(*given)


def run(workload: Workload, iterations: int) -> Iterator[dict[str, Any]]:
    draw = workload.sampler()
    tables = peers.ours(workload, SGD(0.1))
    peer = peers.fbgemm(workload, tables)
    given = draw()
    torch.testing.assert_close(tables(*given), peer(*given))
    with torch.no_grad():
        times = interleave(draw, call(tables), call(peer), iterations=iterations)
    yield line("plain", str(workload), "fbgemm", times, equal="outputs")
    dense, lazy = AdamAR(1e-3, alpha=1e-5), AdamAR(1e-3, alpha=1e-5, moments="lazy")
    for moments, optimizer, state_dtype in (
        ("dense", dense, torch.float32),
        ("dense bfloat16", dense, torch.bfloat16),
        ("lazy", lazy, torch.float32),
    ):
        tables = peers.ours(workload, optimizer, state_dtype=state_dtype)
        peers.train(tables, draw, NUM_STEPS)
        times = interleave(draw, call(tables), call(peer), iterations=iterations)
        yield line("training", f"{workload} adam_ar {moments}", "fbgemm", times, equal="rows read")


if __name__ == "__main__":
    main(run, __doc__ or "")
