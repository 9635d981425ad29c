"""Item rows in Redis as a few long strings, for readers that hold the ids: less memory there, and fewer places to look.

    BASE            as in redis_rows.py, with info, chunks (ids and statuses) and alive; info says ``blocks`` and
                    ``block_rows``, how many vectors are in each but the last
    BASE:block:K    the vectors of some thousand items, one after the other, in the order of the chunks

A reader takes the ids of a version when it first looks something up, some 25 bytes an item for integers, and asks for
ranges of blocks: all of a lookup in one round trip, with ``alive`` asked behind them. ``alive`` is removed before the
blocks are: a reader that sees it had everything that was loaded. docs/adr/0019-remote-stores.md has what it saves and
what it costs.
"""

from __future__ import annotations

import functools
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
from redis.exceptions import ConnectionError, TimeoutError

from embeddings.store.backends.redis_protocol import Client, Loader, ask
from embeddings.store.backends.redis_reader import RedisReader
from embeddings.store.backends.redis_rows import (
    CHUNK_ROWS,
    Given,
    RowKeys,
    Switched,
    columns_stream,
    gone,
)
from embeddings.store.version import matrix_of, read_arrow
from embeddings.vectors.half_precision import as_float32
from embeddings.vectors.item_vectors import MISSING, Array

BLOCK_BYTES = (1 << 21) - 64
"""A little less than two megabytes: of a string that is a little longer Redis' allocator wastes a quarter."""
PIPELINE_ROWS = 2048


def block_rows(row_bytes: int) -> int:
    """Return the number of vectors in a block, for vectors of ``row_bytes``."""
    return max(BLOCK_BYTES // row_bytes, 1)


def load_packed(client: Client, keys: RowKeys, file: Path) -> None:
    """Load the rows of ``items.arrow``; raise the client's errors."""
    batch = read_arrow(file)
    vectors = matrix_of(batch.column("vector"))
    size = block_rows(vectors.shape[1] * vectors.itemsize)
    starts = range(0, len(vectors), size)
    num_chunks = -(-len(vectors) // CHUNK_ROWS)
    info = {
        "rows": len(vectors), "dim": vectors.shape[1], "dtype": str(vectors.dtype), "chunks": num_chunks,
        "base": None, "row_keys": "", "blocks": len(starts), "block_rows": size,
    }  # fmt: skip
    # First, so that what a dead writer loaded can be found and removed.
    client.set(keys.info(), json.dumps(info))
    with Loader(client) as loader:
        for number in range(num_chunks):
            loader.send_set(keys.chunk(number), columns_stream(batch.slice(number * CHUNK_ROWS, CHUNK_ROWS)))
        for number, start in enumerate(starts):
            part = vectors[start : start + size]
            loader.send_set(keys.block(number), np.ascontiguousarray(part).tobytes())
    client.set(keys.alive(), "1")


class PackedReader(RedisReader):
    """Reads one version whose vectors are in blocks."""

    def _lookup(self, ids: Any, given: Given | None) -> tuple[Array, Array]:
        queries = self._queries(ids)
        rows = self.find_rows(queries)
        absent = np.flatnonzero(rows < 0)
        if not len(absent):
            stored = self._read(rows, given)
            return self.statuses.take(rows), as_float32(stored)
        status = np.full(len(rows), MISSING, dtype=np.uint8)
        vectors = np.zeros((len(rows), self.dim), dtype=np.float32)
        present = np.flatnonzero(rows >= 0)
        status[present] = self.statuses.take(rows[present])
        vectors[present] = as_float32(self._read(rows[present], given))
        return status, vectors

    def _read(self, rows: Array, given: Given | None) -> Array:
        """Return vectors as they are stored, [n, d], of rows int64 [n]; raise UnknownVersion, Switched."""
        with self._reach():
            parts = [
                self._read_part(rows[start : start + PIPELINE_ROWS], given)
                for start in range(0, max(len(rows), 1), PIPELINE_ROWS)
            ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_part(self, rows: Array, given: Given | None) -> Array:
        size = self._rows.block_rows
        pieces: list[Any] = [None] * (2 * len(rows))
        pieces[::2] = self._heads[rows // size].tolist()
        pieces[1::2] = _ranges(self._row_bytes, size)[rows % size].tolist()
        # Behind the ranges: what says that they were whole is younger than they are.
        key, expected = given or (self._alive, None)
        pieces.append(
            b"*3\r\n$4\r\nMGET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(self._alive), self._alive)
        )

        def answers(connection: Any) -> tuple[Array | None, Any]:
            stored = _receive(connection, len(rows), self._row_bytes)
            return stored, None if stored is None else connection.read_response()

        stored, last = ask(self._rows.client, b"".join(pieces), answers)
        if stored is None:
            raise gone(self._rows.keys)
        now, is_alive = last
        if given is not None and now != expected:
            raise Switched
        if is_alive is None:
            raise gone(self._rows.keys)
        return stored.view(self._rows.dtype)

    @property
    def _row_bytes(self) -> int:
        return self.dim * int(self._rows.dtype.itemsize)

    @functools.cached_property
    def _alive(self) -> bytes:
        return self._rows.keys.alive().encode()

    @functools.cached_property
    def _heads(self) -> Array:
        """The beginning of a GETRANGE of each block, as Redis' protocol has it, [blocks]."""
        keys = self._rows.keys
        num_blocks = -(-len(self) // self._rows.block_rows)
        names = [keys.block(number).encode() for number in range(num_blocks)]
        return np.array([b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names], dtype=object)

    def _all_vectors(self) -> Array:
        vectors = np.empty((len(self), self.dim), dtype=self._rows.dtype)
        size = self._rows.block_rows
        for number, start in enumerate(range(0, len(self), size)):
            block = self._rows.client.get(self._rows.keys.block(number))
            part = vectors[start : start + size]
            if block is None or len(block) != part.nbytes:
                raise gone(self._rows.keys)
            part[:] = np.frombuffer(block, dtype=self._rows.dtype).reshape(part.shape)
        return vectors


@functools.lru_cache(maxsize=8)
def _ranges(row_bytes: int, num_rows: int) -> Array:
    """Return the end of a GETRANGE of each row of a block, [rows of a block]."""
    ends = []
    for row in range(num_rows):
        first, last = (b"%d" % offset for offset in (row * row_bytes, (row + 1) * row_bytes - 1))
        ends.append(b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(first), first, len(last), last))
    return np.array(ends, dtype=object)


def _receive(connection: Any, num_rows: int, row_bytes: int) -> Array | None:
    """Return so many answers of ``row_bytes`` each, uint8 [n, row_bytes], without an object for each.

    None where one has another size. What comes behind them is left to be read.
    """
    head = b"$%d\r\n" % row_bytes
    stride = len(head) + row_bytes + 2
    buffer = bytearray(num_rows * stride)
    answers = np.frombuffer(buffer, dtype=np.uint8).reshape(num_rows, stride)
    into, end, checked = memoryview(buffer), 0, 0
    expected = np.frombuffer(head, dtype=np.uint8)
    while end < len(buffer):
        try:
            received = connection._sock.recv_into(into[end:])
        except OSError as error:  # the client makes these its own where it reads itself
            kind = TimeoutError if isinstance(error, socket.timeout) else ConnectionError
            raise kind(f"while Redis was answering: {error}") from error
        if not received:
            raise ConnectionError("Redis closed the connection while it was answering")
        end += received
        # A shorter answer must be seen before more is waited for than there is: its own head has come by now.
        begun = -(-(end - len(head) + 1) // stride) if end >= len(head) else 0
        if (answers[checked:begun, : len(head)] != expected).any():
            return None
        checked = begun
    return np.ascontiguousarray(answers[:, len(head) : -2])
