"""Item rows in Redis: the vectors of some thousand items in one string, and their other columns in another.

    BASE            prefix of a version's rows, PREFIXNAME:rows.TOKEN, with a new random token for every load
    BASE:info       JSON: rows, dim, dtype, chunks, blocks, block_rows
    BASE:chunk:K    all columns but the vectors of some thousand items, as an Arrow stream, ids ascending
    BASE:block:K    the vectors of ``block_rows`` items, one after the other, in the order of the chunks
    BASE:alive      exists from the end of the load until the rows may be removed

Rows are written once, and ``alive`` is written last and removed first. So a reader that finds ``alive`` finds all rows.

Earlier releases wrote a key for each row. The first reader or writer of this release rewrites such rows as blocks
(:func:`repack`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from embeddings.store.files import RowsGone
from embeddings.store.version import key_column, keys_of_column, matrix_of, read_arrow
from embeddings.vectors.item_vectors import Array

Client = Any
"""A redis.Redis client. Its type stubs say that answers are bytes or str; in this package they are bytes."""

CHUNK_ROWS = 8192
BLOCK_BYTES = (1 << 21) - 64
"""Largest size of a block. For a string slightly longer than 2 MiB, Redis' allocator would waste a quarter."""
PIPELINE_BLOCKS = 8
"""Number of blocks that are sent to Redis in one pipeline."""
KEYED_ROWS_SECONDS = 600
"""Time for which the old keys, one per row, are kept after repacking, for readers of the previous release."""


class RowKeys(NamedTuple):
    """Keys of the rows of one version."""

    base: str

    def info(self) -> str:
        return f"{self.base}:info"

    def alive(self) -> str:
        return f"{self.base}:alive"

    def chunk(self, number: int) -> str:
        return f"{self.base}:chunk:{number}"

    def block(self, number: int | str) -> str:
        return f"{self.base}:block:{number}"


def load_rows(client: Client, keys: RowKeys, file: Path) -> None:
    """Load the rows of ``items.arrow``; raise the client's errors."""
    batch = read_arrow(file)
    vectors = matrix_of(batch.column("vector"))
    size = max(BLOCK_BYTES // (vectors.shape[1] * vectors.itemsize), 1)
    num_chunks = -(-len(vectors) // CHUNK_ROWS)
    # First, so that the rows of a dead writer can be found and removed.
    _write_info(client, keys, vectors, num_chunks, size)
    for number in range(num_chunks):
        client.set(keys.chunk(number), columns_stream(batch.slice(number * CHUNK_ROWS, CHUNK_ROWS)))
    _write_blocks(client, keys, vectors, size)
    client.set(keys.alive(), "1")


def _write_info(client: Client, keys: RowKeys, vectors: Array, num_chunks: int, size: int) -> None:
    info = {
        "rows": len(vectors), "dim": vectors.shape[1], "dtype": str(vectors.dtype), "chunks": num_chunks,
        "base": None, "row_keys": "", "blocks": -(-len(vectors) // size), "block_rows": size,
    }  # fmt: skip
    client.set(keys.info(), json.dumps(info))


def _write_blocks(client: Client, keys: RowKeys, vectors: Array, size: int) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for number, start in enumerate(range(0, len(vectors), size)):
            pipeline.set(keys.block(number), np.ascontiguousarray(vectors[start : start + size]).tobytes())
            if len(pipeline) >= PIPELINE_BLOCKS:
                pipeline.execute()
        pipeline.execute()


def remove_rows(client: Client, keys: RowKeys, grace_seconds: float) -> None:
    """Let the rows expire after ``grace_seconds``, during which open readers may still look them up.

    Incompletely loaded rows expire at once. Redis itself removes them, even if this process dies.
    """
    try:
        info = rows_info(client, keys)
    except RowsGone:
        return
    milliseconds = max(int(1000 * grace_seconds), 1) if client.exists(keys.alive()) else 1
    others = [keys.block(number) for number in range(info["blocks"])]
    others += [keys.chunk(number) for number in range(info["chunks"])]
    if milliseconds == 1:
        client.unlink(keys.alive(), *others, keys.info())
        return
    client.pexpire(keys.alive(), milliseconds)
    for name in [*others, keys.info()]:
        client.pexpire(name, milliseconds + 1000)


def rows_info(client: Client, keys: RowKeys) -> dict[str, Any]:
    """Read BASE:info; raise RowsGone if there is none."""
    info = client.get(keys.info())
    if info is None:
        raise gone(keys)
    document: dict[str, Any] = json.loads(info)
    return {"blocks": 0, **document}


def gone(keys: RowKeys) -> RowsGone:
    """Return the error for a reader whose rows are no longer in Redis."""
    return RowsGone(
        f"{keys.base}: the item rows are gone: their version has expired and its grace period is over, or Redis lost "
        "them; open the current version, or publish again"
    )


def read_columns(client: Client, keys: RowKeys, num_chunks: int, id_type: str) -> pa.RecordBatch:
    """Read all columns of all items but the vectors: key, status, norm, count and so on; raise RowsGone."""
    if not num_chunks:  # all items of the version were erased
        key = key_column(np.empty(0, dtype=np.int64 if id_type == "int64" else "S1"))
        types = {"status": pa.uint8(), "norm": pa.float32(), "count": pa.int64()}
        return pa.record_batch({"key": key, **{name: pa.array([], kind) for name, kind in types.items()}})
    contents = [client.get(keys.chunk(number)) for number in range(num_chunks)]
    if None in contents or not client.exists(keys.alive()):
        raise gone(keys)
    table = pa.Table.from_batches([_batch(content) for content in contents]).combine_chunks()
    return table.to_batches()[0] if table.num_rows else _batch(contents[0])


def columns_stream(batch: pa.RecordBatch) -> bytes:
    """Return a batch without its vectors, as an Arrow stream."""
    batch = batch.select([name for name in batch.schema.names if name != "vector"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _batch(content: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(content).read_next_batch()


# --- rows of earlier releases ----------------------------------------------------------------------------------------


def repack(client: Client, keys: RowKeys) -> dict[str, Any]:
    """Rewrite rows of an earlier release, which have a key each, as blocks; return BASE:info.

    A row of an earlier release is vector bytes and one byte of status, at key ``row_keys`` + ID or BASE:id:ID. A
    version may also store only its differences from the rows of a ``base``, with the removed ids in BASE:gone. Several
    processes may call this at once.

    Raises:
        RowsGone: the rows are no longer in Redis.
    """
    info = rows_info(client, keys)
    if info["blocks"] or not info["chunks"]:
        return info
    ids = _stored_ids(read_columns(client, keys, info["chunks"], ""))
    row = str(info.get("row_keys", f"{keys.base}:id:")).encode()
    width = int(info["dim"]) * np.dtype(info["dtype"]).itemsize
    values: list[bytes | None] = []
    for start in range(0, len(ids), CHUNK_ROWS):
        values += client.mget([row + one for one in ids[start : start + CHUNK_ROWS]])
    absent = [number for number, value in enumerate(values) if value is None]
    if absent and info["base"] is not None:
        vectors = _vectors_of_base(client, keys._replace(base=f"{keys.base.rpartition(':')[0]}:{info['base']}"))
        for number in absent:
            values[number] = vectors.get(ids[number])
    found = [value[:width] for value in values if value is not None]
    if len(found) < len(ids) or not client.exists(keys.alive()):
        raise gone(keys)
    matrix = np.frombuffer(b"".join(found), dtype=np.dtype(info["dtype"])).reshape(len(found), int(info["dim"]))
    size = max(BLOCK_BYTES // width, 1)
    _write_blocks(client, keys, matrix, size)
    _write_info(client, keys, matrix, info["chunks"], size)
    gone_ids = client.get(f"{keys.base}:gone")
    if gone_ids is not None:
        ids = ids + _stored_ids(_batch(gone_ids))
    with client.pipeline(transaction=False) as pipeline:
        for number, one in enumerate(ids):
            pipeline.expire(row + one, KEYED_ROWS_SECONDS)
            if number % CHUNK_ROWS == CHUNK_ROWS - 1:
                pipeline.execute()
        pipeline.expire(f"{keys.base}:gone", KEYED_ROWS_SECONDS)
        pipeline.execute()
    if not client.exists(keys.alive()):
        remove_rows(client, keys, 0.0)
        raise gone(keys)
    return rows_info(client, keys)


def _vectors_of_base(client: Client, keys: RowKeys) -> dict[bytes, bytes]:
    """Return the stored vectors, by id, of rows from which another version stores only differences."""
    info = repack(client, keys)
    ids = _stored_ids(read_columns(client, keys, info["chunks"], ""))
    raw = b"".join(client.mget([keys.block(number) for number in range(info["blocks"])]))
    width = len(raw) // len(ids)
    return {one: raw[number * width : (number + 1) * width] for number, one in enumerate(ids)}


def _stored_ids(batch: pa.RecordBatch) -> list[bytes]:
    """Return a batch's ids as bytes, the way Redis' keys contain them: integers as decimal digits."""
    keys = keys_of_column(batch.column("key"))
    return (keys.astype("S20") if keys.dtype.kind == "i" else keys).tolist()
