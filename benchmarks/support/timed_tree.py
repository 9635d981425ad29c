"""A process that times the tables of its checkout; ``benchmarks.two_trees`` talks to it through a pipe.

The program imports nothing from the benchmarks, whose names may differ in that checkout. It reads one JSON line with
the case; then each line has a number of calls to make, and the answer has the milliseconds of each call.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import embeddings
from embeddings import EmbeddingTables, TableConfig
from embeddings.optim import SGD, Adam, AdamAR
from embeddings.tables.config import InitConfig

RATE = 1e-3
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: SGD(0.1),
    "adam": lambda: Adam(RATE),
    "adam_inside": lambda: Adam(RATE, eps_inside_root=True),
    "adam_ar": lambda: AdamAR(RATE, alpha=1e-5),
    "adam_lazy": lambda: Adam(RATE, moments="lazy"),
}


def main() -> None:
    if not Path(embeddings.__file__).is_relative_to(Path.cwd()):
        sys.exit(f"{Path.cwd()} is no checkout: embeddings would be that of {embeddings.__file__}")
    case = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    dim, num_rows, num_ids = case["dim"], case["num_rows"], case["num_ids"]
    tables = EmbeddingTables(
        [TableConfig("t", num_rows, dim, ("f",), init=InitConfig("normal", 0.1))], OPTIMIZERS[case["optimizer"]]()
    )
    generator = np.random.default_rng(0)
    offsets = torch.arange(num_ids + 1)
    grad = 1e-3 * torch.randn(num_ids, dim, generator=torch.Generator().manual_seed(0))

    def draw() -> torch.Tensor:
        return torch.from_numpy(generator.integers(2, num_rows, num_ids))

    def step(ids: torch.Tensor) -> None:
        tables(ids, offsets).backward(grad)
        tables.step(tables.completed_steps + 1)

    def lookup(ids: torch.Tensor) -> None:
        with torch.no_grad():
            tables(ids, offsets)

    for _ in range(case["num_steps"]):
        step(draw())
    timed = {"lookup": lookup, "step": step}[case["what"]]
    print("[]", flush=True)
    for line in sys.stdin:
        milliseconds = []
        for _ in range(int(line)):
            ids = draw()
            start = time.perf_counter()
            timed(ids)
            milliseconds.append(1e3 * (time.perf_counter() - start))
        print(json.dumps(milliseconds), flush=True)


if __name__ == "__main__":
    main()
