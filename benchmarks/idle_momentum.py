"""How far rows with deferred momentum are from Algorithm 1 over every row at every step, in float64.

``error``: the largest difference of any element at any step, in learning rates, by the size of the gradients; ``all``
draws the size of each element log-uniformly between 1e-8 and 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.support.harness import cpu, versions
from embeddings.embedding_tables import EmbeddingTables
from embeddings.optim import Adam, AdamAR, AdamW, RowwiseAdam
from embeddings.optim.idle_decay import ACROSS_EPOCHS
from embeddings.tables.config import InitConfig, TableConfig

RATE = 0.01
OPTIMIZERS: dict[str, Adam] = {
    "adam": Adam(RATE),
    "adamw": AdamW(RATE, weight_decay=0.1),
    "adam_ar, alpha 1e-5": AdamAR(RATE, alpha=1e-5),
    "adam_ar, alpha .02: stored as it is": AdamAR(RATE, alpha=0.02),
    "adam_ar by epoch": AdamAR(RATE, alpha=1e-6, decay="by_epoch", epoch_steps=90),
    "adam_ar by epoch: stored as it is": AdamAR(RATE, alpha=5e-5, decay="by_epoch", epoch_steps=90),
    "rowwise_adam": RowwiseAdam(RATE),
    "adam, beta2 .98": Adam(RATE, beta2=0.98),
    "adam, beta1 .5, beta2 .9": Adam(RATE, beta1=0.5, beta2=0.9),
    "adam, beta2 .95": Adam(RATE, beta2=0.95),
    "adam_ar, beta2 .95, alpha 1e-4": AdamAR(RATE, beta2=0.95, alpha=1e-4),
    "adam_ar by epoch, beta2 .98, alpha 4.5e-6": AdamAR(
        RATE, beta2=0.98, alpha=4.5e-6, decay="by_epoch", epoch_steps=90
    ),
    "adam_ar by epoch, beta2 .95: stored as it is": AdamAR(
        RATE, beta2=0.95, alpha=5e-5, decay="by_epoch", epoch_steps=90
    ),
}
SIZES: dict[str, tuple[float, float]] = {"1": (0, 0), **{f"1e-{d}": (-d, -d) for d in (2, 4, 6, 7, 8)}, "all": (-8, 0)}
NUM_ROWS, DIM = 40, 16


def touches(num_steps: int, size: tuple[float, float], seed: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (step, rows, their gradients): a few rows often, most rarely."""
    generator = np.random.default_rng(seed)
    chance = np.geomspace(0.5, 0.005, NUM_ROWS)
    for k in range(1, num_steps + 1):
        rows = np.flatnonzero(generator.random(NUM_ROWS) < chance)
        shape = len(rows), DIM
        yield k, rows, generator.choice([-1.0, 1.0], shape) * 10.0 ** generator.uniform(*size, shape)


def largest_error(optimizer: Adam, size: tuple[float, float], num_steps: int, backend: Any, seed: int) -> float:
    """Return the largest error of any element after any step, in learning rates."""
    table = TableConfig("t", NUM_ROWS, DIM, ("f",), init=InitConfig("normal", 1.0), first_live_row=0)
    tables = EmbeddingTables([table], optimizer, backend=backend, dtype=torch.float64)
    theta = tables.weight("t").numpy().copy()
    m, v, last = np.zeros_like(theta), np.zeros_like(theta), np.zeros((NUM_ROWS, 1))
    error = 0.0
    for k, rows, grads in touches(num_steps, size, seed):
        tables(torch.from_numpy(rows), torch.arange(len(rows) + 1)).backward(torch.from_numpy(grads))
        tables.step(k)
        dense = np.zeros_like(theta)
        dense[rows] = grads
        square = dense**2
        if optimizer.row_state_names:
            square[:] = square.mean(axis=1, keepdims=True)
        known = (last > 0) | np.isin(np.arange(NUM_ROWS), rows)[:, None]
        if optimizer.moments_decay:
            now, before = by_epoch(optimizer, last, k), by_epoch(optimizer, last, k - 1)
            waiting = known & ~np.isin(np.arange(NUM_ROWS), rows)[:, None]
            theta *= np.where(waiting, np.divide(now, before, out=np.zeros_like(now), where=before > 0), 1.0)
            m[rows], v[rows] = m[rows] * before[rows], v[rows] * before[rows] ** 2
        else:
            theta *= np.where(last > 0, 1.0 - np.minimum(1.0, optimizer.idle_alpha * (k - last - 1)), 1.0)
        theta *= np.where(known, 1.0 - RATE * optimizer.constant_decay, 1.0)
        m, v = optimizer.beta1 * m + (1 - optimizer.beta1) * dense, optimizer.beta2 * v + (1 - optimizer.beta2) * square
        mhat, vhat = m / (1 - optimizer.beta1**k), v / (1 - optimizer.beta2**k)
        inside = optimizer.eps_inside_root
        theta -= RATE * mhat / (np.sqrt(vhat + optimizer.eps) if inside else np.sqrt(vhat) + optimizer.eps)
        last[rows] = k
        error = max(error, float(np.abs(tables.read("t").numpy() - theta).max()))
    return error / RATE


def by_epoch(optimizer: Any, last: np.ndarray, completed: int) -> np.ndarray:
    """Return the factor of decay by epoch of rows touched at steps ``last``, after so many steps (docs/adr/0068)."""
    begun = max(completed - 1, 0) // optimizer.epoch_steps * optimizer.epoch_steps
    alphas = np.where(last <= begun, ACROSS_EPOCHS, 1.0) * optimizer.alpha if begun else np.zeros(last.shape)
    lambdas = np.minimum(1.0, alphas * np.arange(completed))
    return np.prod(np.where(np.arange(completed) < completed - last, 1.0 - lambdas, 1.0), axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--backend", default="cpu", choices=("reference", "cpu"))
    options = parser.parse_args()
    settings: dict[str, Any] = {"steps": options.steps, "seeds": options.seeds, "backend": options.backend}
    for name, plain in OPTIMIZERS.items():
        for inside in (False, True):
            optimizer = dataclasses.replace(plain, eps_inside_root=inside)
            errors = {}
            for size, ends in SIZES.items():
                of_seeds = (
                    largest_error(optimizer, ends, options.steps, options.backend, seed)
                    for seed in range(options.seeds)
                )
                errors[size] = f"{max(of_seeds):.1e}"
            where = "inside" if inside else "outside"
            print(json.dumps({"optimizer": name, "eps": where, "error": errors, **settings}), flush=True)
    print(json.dumps({"cpu": cpu(), "versions": versions()}))


if __name__ == "__main__":
    main()
