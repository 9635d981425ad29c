"""Where optimizer state should lie: the memory traffic of an Adam update and of a lookup under four layouts.

Each contestant reads, changes and writes the same floats of the same random distinct rows, and their last steps; only
the places differ. ``ours`` is the layout of embeddings/kernels/layout.py: weights, [m | v], steps apart. The decision
is in docs/adr/0002-kernel-layout.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numba import njit

from benchmarks.harness import Workload, interleave, line, main
from embeddings.kernels.cpu import simd
from embeddings.kernels.layout import _zeros

AHEAD = 12


@njit(cache=True, error_model="numpy")
def _update(weights, m, v, steps, rows, grad, dim, strides, starts, k):  # type: ignore[no-untyped-def]
    """w, m, v and s of row r start at starts[i] + r * strides[i] of their arrays."""
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            ahead = rows[i + AHEAD]
            simd.prefetch_write(weights, starts[0] + ahead * strides[0], dim)
            simd.prefetch_write(m, starts[1] + ahead * strides[1], dim)
            simd.prefetch_write(v, starts[2] + ahead * strides[2], dim)
            simd.prefetch_write(steps, starts[3] + ahead * strides[3], 1)
        row = rows[i]
        one = (np.float32(0.5),)
        simd.add_scaled(weights, starts[0] + row * strides[0], grad, i * dim, one, dim)
        simd.add_scaled(m, starts[1] + row * strides[1], grad, i * dim, one, dim)
        simd.add_scaled(v, starts[2] + row * strides[2], grad, i * dim, one, dim)
        steps[starts[3] + row * strides[3]] = k


@njit(cache=True, error_model="numpy")
def _lookup(weights, steps, rows, output, dim, strides, starts, k):  # type: ignore[no-untyped-def]
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            ahead = rows[i + AHEAD]
            simd.prefetch_read(weights, starts[0] + ahead * strides[0], dim)
            simd.prefetch_read(steps, starts[3] + ahead * strides[3], 1)
        row = rows[i]
        factor = np.float32(1.0 / (1 + k - steps[starts[3] + row * strides[3]]))
        simd.put_scaled(output, i * dim, weights, starts[0] + row * strides[0], (factor,), dim)


class Layout:
    """Arrays for w, m, v and s, some of them the same array, with their strides and first elements."""

    def __init__(self, num_rows: int, dim: int, kind: str) -> None:
        def array(count: int) -> np.ndarray:
            made: np.ndarray = _zeros(count, torch.float32, torch.device("cpu")).numpy()
            return made

        if kind == "all in one":
            width = 3 * dim + 1
            whole = array(num_rows * width)
            self.w = self.m = self.v = whole
            self.s, strides, starts = whole.view(np.int32), [width] * 4, [0, dim, 2 * dim, 3 * dim]
        else:
            self.w = array(num_rows * dim)
            if kind == "[m|v|s]":
                width = 2 * dim + 1
                self.m = self.v = array(num_rows * width)
                self.s, strides, starts = self.m.view(np.int32), [dim, width, width, width], [0, 0, dim, 2 * dim]
            else:
                self.s = array(num_rows).view(np.int32)
                if kind == "[m|v]":
                    self.m = self.v = array(num_rows * 2 * dim)
                    strides, starts = [dim, 2 * dim, 2 * dim, 1], [0, 0, dim, 0]
                else:
                    self.m, self.v = array(num_rows * dim), array(num_rows * dim)
                    strides, starts = [dim, dim, dim, 1], [0, 0, 0, 0]
        self.strides, self.starts, self.dim = np.array(strides), np.array(starts), dim

    def update(self, grad: np.ndarray) -> Callable[[np.ndarray], None]:
        return lambda rows: _update(
            self.w, self.m, self.v, self.s, rows, grad, self.dim, self.strides, self.starts, np.int32(1)
        )

    def lookup(self, output: np.ndarray) -> Callable[[np.ndarray], None]:
        return lambda rows: _lookup(self.w, self.s, rows, output, self.dim, self.strides, self.starts, 2)


def run(workload: Workload, iterations: int) -> Iterator[dict[str, Any]]:
    if workload.distribution != "uniform" or torch.get_num_threads() > 1:
        return
    count, num_rows = workload.num_tables * workload.batch_size, workload.num_tables * workload.num_rows
    generator = np.random.default_rng(0)
    buffer = np.ones(count * workload.dim, dtype=np.float32)
    kinds = ("[m|v]", "apart", "[m|v|s]", "all in one")
    layouts = [Layout(num_rows, workload.dim, kind) for kind in kinds]

    def draw() -> np.ndarray:
        rows: np.ndarray = generator.choice(num_rows, count, replace=False)
        return rows

    for name, functions in {
        "update": [layout.update(buffer) for layout in layouts],
        "lookup": [layout.lookup(buffer) for layout in layouts],
    }.items():
        times = interleave(draw, *functions, iterations=iterations)
        for j, kind in enumerate(kinds[1:], start=1):
            yield line("layout", f"{workload} {name}", kind, times[:, [0, j]])


if __name__ == "__main__":
    main(run, __doc__ or "")
