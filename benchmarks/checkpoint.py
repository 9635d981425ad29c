"""Time of a checkpoint: saving it, saving it in the background, loading it, loading it with another sharding plan.

One table with Adam's state, of which two ranks hold half of the rows each; one process simulates both. The peer is
torch.distributed.checkpoint (DCP) with the same tensors, fsynced as ours are; only ours also writes and checks a
sha256 for every file. For ``async_save`` ``stall_seconds`` is the time that holds training up, and ``seconds`` is the
time until the checkpoint is on disk. From files in the page cache, ``load`` fills tables of the same plan, after it has
verified every byte (``verify_seconds``), and ``reshard`` tables of a column-wise plan. DCP can't reshard plain tensors,
so the peer of ``reshard`` is a load in the same plan, both without verification.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.support.harness import MIN_ITERATIONS, Seconds, interleave, line
from embeddings import EmbeddingTables, TableConfig
from embeddings.optim import Adam
from trainer.checkpoint.async_writer import BackgroundSaver
from trainer.checkpoint.format import Checkpoint, TableShard, save

NUM_PIECES = 2


class Tables:
    """The rows that ranks hold: ``NUM_PIECES`` kernels' tables, split by rows or by columns."""

    def __init__(self, num_rows: int, dim: int, columns: bool = False):
        self.pieces = []
        for number in range(NUM_PIECES):
            size = dim if columns else num_rows
            start, stop = size * number // NUM_PIECES, size * (number + 1) // NUM_PIECES
            rows = (0, num_rows) if columns else (start, stop - start)
            width = (start, stop - start) if columns else (0, dim)
            config = TableConfig(
                "t", num_rows, width[1], ("t",), row_start=rows[0], row_count=rows[1],
                column_start=width[0], total_dim=dim,
            )  # fmt: skip
            tables = EmbeddingTables([config], Adam(), backend="reference")
            self.pieces.append((tables, rows, width))
        self.num_rows, self.dim = num_rows, dim

    def fill(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for value in self.tensors().values():
            if value.is_floating_point():
                value.normal_(generator=generator)
            else:
                value.random_(0, 1000, generator=generator)

    def shards(self) -> list[TableShard]:
        return [
            TableShard("t", self.num_rows, rows[0], tables.weight("t"), tables.state("t"), columns[0], self.dim)
            for tables, rows, columns in self.pieces
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor, keyed by a unique name, as views of the tables' storage."""
        return {
            f"{number}.{name}": value
            for number, shard in enumerate(self.shards())
            for name, value in {"weight": shard.weight, **shard.state}.items()
        }

    def load(self, checkpoint: Checkpoint) -> None:
        for tables, rows, columns in self.pieces:
            tables.load("t", *checkpoint.read_rows("t", *rows, *columns))

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards())


def run(num_rows: int, dim: int, iterations: int, folder: Path) -> None:
    """Print the four lines."""
    tables = Tables(num_rows, dim)
    tables.fill()
    case, size = f"N{num_rows} D{dim} adam", tables.nbytes / 1e9

    steps = itertools.count(1)

    def told(case_: str, peer: str, times: np.ndarray, seconds: float, **more: Any) -> None:
        line(
            "checkpoint", f"{case_} {case}", peer, times, seconds=round(seconds, 4),
            gb_per_second=round(size / seconds, 3), bytes=tables.nbytes, **more,
        )  # fmt: skip

    def ours(step: int) -> Path:
        return save(folder / "ours", step=step, tables=tables.shards(), dense={}, extra={}, keep_last=1)

    def theirs(_: Any = None) -> None:
        dcp.save(tables.tensors(), checkpoint_id=str(folder / "dcp"), storage_writer=_writer(folder / "dcp"))

    times = interleave(steps.__next__, ours, theirs, iterations=iterations, warm_up=1)
    told("save", "dcp", times, float(np.median(times[:, 0])) / 1e3, stall_seconds=float(np.median(times[:, 0])) / 1e3)

    saver, until_written = BackgroundSaver(), []

    def ours_async(step: int) -> Seconds:
        start = time.perf_counter()
        saver.save(folder / "ours", step=step, tables=tables.shards(), dense={}, extra={}, keep_last=1)
        stalled = time.perf_counter() - start
        saver.wait()
        until_written.append(time.perf_counter() - start)
        return Seconds(stalled)

    def theirs_async(_: int) -> Seconds:
        start = time.perf_counter()
        future = dcp.async_save(tables.tensors(), storage_writer=_writer(folder / "dcp"))
        stalled = time.perf_counter() - start
        assert isinstance(future, Future)
        future.result()
        return Seconds(stalled)

    times = interleave(steps.__next__, ours_async, theirs_async, iterations=iterations, warm_up=1)
    seconds = float(np.median(until_written[1:]))
    staged = saver.staged_bytes
    saver.close()
    told("async_save", "dcp", times, seconds, stall_seconds=float(np.median(times[:, 0])) / 1e3, staged_bytes=staged)

    checkpoint = Checkpoint(ours(next(steps)))
    theirs()
    loads(tables, checkpoint, folder / "dcp", iterations, told)


def loads(
    tables: Tables, checkpoint: Checkpoint, peer_folder: Path, iterations: int, told: Callable[..., None]
) -> None:
    """Print the lines of ``load`` and ``reshard``; both folders hold ``tables``."""
    other = Tables(tables.num_rows, tables.dim)
    columns = Tables(tables.num_rows, tables.dim, columns=True)
    into = other.tensors()
    verify_seconds = []

    def load(checkpoint: Checkpoint) -> None:
        start = time.perf_counter()
        checkpoint.verify()
        verify_seconds.append(time.perf_counter() - start)
        other.load(checkpoint)

    def load_theirs(_: Checkpoint) -> None:
        dcp.load(into, checkpoint_id=str(peer_folder))

    times = interleave(lambda: checkpoint, load, load_theirs, iterations=iterations, warm_up=1)
    assert all(torch.equal(value, tables.tensors()[name]) for name, value in other.tensors().items())
    verified = round(float(np.median(verify_seconds)), 4)
    told("load", "dcp", times, float(np.median(times[:, 0])) / 1e3, verify_seconds=verified)

    times = interleave(lambda: checkpoint, columns.load, other.load, iterations=iterations, warm_up=1)
    assert torch.equal(
        torch.cat([piece.weight("t") for piece, *_ in columns.pieces], dim=1),
        torch.cat([piece.weight("t") for piece, *_ in tables.pieces]),
    )
    told("reshard", "load", times, float(np.median(times[:, 0])) / 1e3)


def _writer(folder: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(folder, sync_files=True, overwrite=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=MIN_ITERATIONS)
    parser.add_argument("--folder", help="on the disk to measure; left out: a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-", dir=options.folder) as place:
        run(options.rows, options.dim, options.iterations, Path(place))
    dist.destroy_process_group()
