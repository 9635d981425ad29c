"""Nearest items of a large version: the index against the exact search over the same rows.

    python -m benchmarks.neighbors [--full] [--items 200000] [--dim 64] [--rows clusters|uniform] [--queries 200]

Rows ``clusters`` are what training makes: items around 2,000 centres, coordinates of falling variance (the 1/k law, an
effective rank of about dim / 4). ``uniform`` directions have no structure, which is the worst case for any index.
Queries are rows of the version, which are left out of their own answers.

build_seconds, build_cpu_seconds: of one thread. items_per_second: items over build_cpu_seconds, so that other programs
do not count. index_bytes: of the file, which is mapped. added_memory_bytes: anonymous memory that opening and searching
adds.
recall_at_10: share of the exact ten that the index finds. p50_ms, p95_ms of a query; cpu_ms: processor time of a query.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.support.harness import interleave, line, parse
from embeddings.store.nearest_neighbors import NeighborSearch, build_index
from embeddings.vectors.item_vectors import FOUND, Array

NUM_CENTRES = 2_000
SPREAD = 0.7
"""Standard deviation of the items around their centre; the centres' coordinates have variance 1."""
K = 10


def rows_of(kind: str, num_items: int, dim: int) -> Array:
    """Return unit rows, float16 [n, dim], as they are published."""
    generator = np.random.default_rng(dim)
    scale = np.ones(dim) if kind == "uniform" else 1.0 / np.sqrt(1.0 + np.arange(dim))
    centres = generator.standard_normal((NUM_CENTRES, dim)) * scale
    rows = np.empty((num_items, dim), dtype=np.float16)
    for start in range(0, num_items, 65_536):
        part = generator.standard_normal((min(65_536, num_items - start), dim)) * scale
        if kind == "clusters":
            part = centres[generator.integers(0, NUM_CENTRES, len(part))] + SPREAD * part
        rows[start : start + len(part)] = part / np.linalg.norm(part, axis=1, keepdims=True)
    return rows


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, which no file backs."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def measure(kind: str, num_items: int, dim: int, num_queries: int) -> dict[str, Any]:
    vectors = rows_of(kind, num_items, dim)
    statuses = np.full(num_items, FOUND, dtype=np.uint8)
    with tempfile.TemporaryDirectory(prefix="evenkeel-neighbors-") as folder:
        path = Path(folder) / "index"
        started, used = time.perf_counter(), time.process_time()
        build_index(vectors, statuses, path)
        build_seconds, build_cpu_seconds = time.perf_counter() - started, time.process_time() - used
        exact = NeighborSearch(vectors, statuses)
        before = anonymous_bytes()
        indexed = NeighborSearch(vectors, statuses, path)
        queries = iter(np.random.default_rng(1).choice(num_items, num_queries + 3, replace=False))
        recalls: list[float] = []
        cpu_ms: list[float] = []
        found: dict[int, set[int]] = {}

        def compared(row: int, search: NeighborSearch) -> None:
            used = time.process_time()
            rows, _ = search.search(vectors[row], K, int(row))
            if search is indexed:
                cpu_ms.append(1e3 * (time.process_time() - used))
            answer = set(rows.tolist())
            if row in found:
                recalls.append(len(found.pop(row) & answer) / K)
            else:
                found[row] = answer

        times = interleave(
            lambda: int(next(queries)),
            lambda row: compared(row, indexed),
            lambda row: compared(row, exact),
            iterations=num_queries,
        )
        return line(
            "neighbors", f"{kind} {num_items} x {dim}", "exact", times,
            build_seconds=round(build_seconds, 1),
            build_cpu_seconds=round(build_cpu_seconds, 1),
            items_per_second=round(num_items / build_cpu_seconds),
            index_bytes=path.stat().st_size,
            added_memory_bytes=anonymous_bytes() - before,
            recall_at_10=round(float(np.mean(recalls)), 4),
            p50_ms=round(float(np.percentile(times[:, 0], 50)), 3),
            p95_ms=round(float(np.percentile(times[:, 0], 95)), 3),
            cpu_ms=round(float(np.median(cpu_ms)), 3),
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows", choices=("clusters", "uniform"), default="clusters")
    parser.add_argument("--queries", type=int, default=200)
    options = parse(parser, arguments, items=1_000_000)
    measure(options.rows, options.items, options.dim, options.queries)


if __name__ == "__main__":
    main()
