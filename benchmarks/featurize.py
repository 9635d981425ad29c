"""Work of a refresh on 200,000 vectors (``--full``: a million): features, and alignment with the moving average.

- case ``64->128``: ``RandomFourierFeatures.transform`` on one core, in ``items_per_second``; the peer is the formula in
  plain NumPy over the same rows at once, ``numpy_blocks`` the same in blocks of 16,384 rows.
- case ``fetch 1000``: the time that computing a view adds to a fetch: 1000 ids of the same version through the view,
  and without it (``added_ms``, the difference of the medians).
- case ``align_ema N x 64``: ``seconds`` for the rotation of a candidate onto the served version, the rotated rows and
  their average with the served rows, by the functions of a refresh; the peer computes the formulas in float64, all rows
  at once. The peer's result is compared with ours.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.harness import MIN_ITERATIONS, interleave, line, parse
from embeddings.refresh.merge import plan
from embeddings.refresh.procrustes import procrustes
from embeddings.refresh.served_rows import ServedRows
from embeddings.refresh.settings import MovingAverage
from embeddings.rff import RandomFourierFeatures
from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors, chunks
from embeddings.vectors.lazy_rows import Array

DIM_IN, DIM = 64, 128
NUM_IDS = 1000
# Rows of ServedRows that are read at a time when a version is written.
WRITTEN_ROWS = 8192


def normals(num_rows: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((num_rows, DIM_IN), dtype=np.float32)


def plain_features(h: Array, u: Array) -> Array:
    """Compute the formula, all rows at once."""
    unit = h / np.linalg.norm(h, axis=1, keepdims=True)
    angles = unit @ u.T
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) / np.float32(np.sqrt(len(u)))


def features(num_rows: int, iterations: int) -> list[dict[str, Any]]:
    ours = RandomFourierFeatures(DIM_IN, DIM)
    seeds = iter(range(1_000_000))
    u = ours.frequencies
    probe = normals(5000, 0)
    np.testing.assert_allclose(ours.transform(probe), plain_features(probe, u), rtol=0, atol=1e-6)

    def blocks(h: Array) -> list[Array]:
        return [plain_features(h[part], u) for part in chunks(len(h), 16_384)]

    found = []
    for peer, contestant in (("numpy", lambda h: plain_features(h, u)), ("numpy_blocks", blocks)):
        times = interleave(lambda: normals(num_rows, next(seeds)), ours.transform, contestant, iterations=iterations)
        rates = 1e3 * num_rows / np.median(times, axis=0)
        figures = {
            "items_per_second": round(float(rates[0])),
            "peer_items_per_second": round(float(rates[1])),
            "best_items_per_second": round(1e3 * num_rows / float(times[:, 0].min())),
        }
        found.append(line("featurize", f"{DIM_IN}->{DIM}", peer, times, rows=num_rows, **figures))
    return found


def fetch(folder: Path, num_rows: int, iterations: int) -> dict[str, Any]:
    collection = open_store(folder).collection("items")
    collection.create_view("computed", dim=DIM, dim_in=DIM_IN, anchor_generation=1)
    collection.create_view("raw", kind="identity", dim_in=DIM_IN, anchor_generation=1)
    collection.publish(collection.write(ItemVectors(np.arange(num_rows), normals(num_rows, 0))), None)
    generator = np.random.default_rng(1)
    times = interleave(
        lambda: generator.integers(0, num_rows, NUM_IDS),
        lambda ids: collection.view_lookup("computed", ids),
        lambda ids: collection.view_lookup("raw", ids),
        iterations=max(iterations, 200),
    )
    with_view, without = np.median(times, axis=0)
    return line(
        "featurize", f"fetch {NUM_IDS}", "identity", times, rows=num_rows, added_ms=round(float(with_view - without), 4)
    )


def align_ema(num_rows: int, iterations: int) -> dict[str, Any]:
    """Measure alignment and the moving average.

    Every iteration has another rotation and other noise over the same million items.
    """
    keys = np.arange(num_rows)
    served = normals(num_rows, 0)
    served /= np.linalg.norm(served, axis=1, keepdims=True)
    everybody, nobody = np.ones(num_rows, dtype=np.bool_), np.zeros(num_rows, dtype=np.bool_)
    parent = ItemVectors(keys, served)
    ema = MovingAverage()
    seeds = iter(range(1_000_000))
    written = np.empty_like(served)

    def refreshed() -> Array:
        seed = next(seeds)
        turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((DIM_IN, DIM_IN)))[0].astype(np.float32)
        return (served + 0.05 * normals(num_rows, seed)) @ turn

    def ours(candidate: Array) -> Array:
        rotation = procrustes(candidate, served)
        items = plan(parent, keys, everybody, everybody, nobody, today=0)
        rows = ServedRows(items, candidate, rotation, served, ema)
        for part in chunks(num_rows, WRITTEN_ROWS):
            written[part] = rows[part]
        return written

    def by_formula(candidate: Array) -> Array:
        unit = candidate.astype(np.float64)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        left, _, right = np.linalg.svd(unit.T @ served.astype(np.float64))
        turned = unit @ (left @ right)
        far = np.einsum("nd,nd->n", turned, served) < ema.reset_below_cosine
        mixed = (1 - ema.new_weight) * served + ema.new_weight * turned
        mixed[far] = turned[far]
        mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
        return mixed.astype(np.float32)

    probe = refreshed()
    np.testing.assert_allclose(ours(probe), by_formula(probe), rtol=0, atol=2e-5)
    times = interleave(refreshed, ours, by_formula, iterations=iterations, warm_up=1)
    figures = {
        "seconds": round(float(np.median(times[:, 0])) / 1e3, 4),
        "peer_seconds": round(float(np.median(times[:, 1])) / 1e3, 4),
        "best_seconds": round(float(times[:, 0].min()) / 1e3, 4),
    }
    million = f"{num_rows // 1_000_000}M" if num_rows % 1_000_000 == 0 else str(num_rows)
    return line("featurize", f"align_ema {million} x {DIM_IN}", "numpy_float64", times, rows=num_rows, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument(
        "--iterations", type=int, default=21, help="rounds of each case, at least 15; fetch has 200 at least"
    )
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    options = parse(parser, items=1_000_000)
    if options.iterations < MIN_ITERATIONS:
        parser.error(f"a median of {options.iterations} is not reliable: take at least {MIN_ITERATIONS} iterations")
    torch.set_num_threads(1)
    one_core()
    if options.case in f"{DIM_IN}->{DIM}":
        features(min(options.items, 200_000), options.iterations)
    if options.case in f"fetch {NUM_IDS}":
        with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as folder:
            fetch(Path(folder), options.items, options.iterations)
    if options.case in "align_ema":
        align_ema(options.items, options.iterations)


def one_core() -> None:
    """Keep this process on one core, so that figures are per core, whatever number of threads BLAS would use."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main()
