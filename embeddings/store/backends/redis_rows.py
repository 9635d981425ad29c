"""Item rows in Redis: what every version has, and versions that earlier releases loaded with a key for each row.

    BASE            of a version's rows, PREFIXNAME:rows.TOKEN; the token is drawn anew for every load
    BASE:info       JSON: rows, dim, dtype, chunks, and blocks, block_rows (redis_packed.py)
    BASE:chunk:K    everything of some thousand items but their vectors, as an Arrow stream, ids ascending
    BASE:alive      there from the end of the load until the rows may go

Versions without blocks are read and removed, not written; their ``info`` has row_keys (what is before the ids in their
keys) and base (the rows that these rest on, or null).

    BASE:gone       ids that the base has and this version has not, as an Arrow stream
    PREFIX.TOKEN:ID vector bytes, then one byte of status; ID in decimals, or the string id itself

Such a version may hold only the rows that differ from its base, with a tombstone for each id that the base has and it
has not. What it does not hold is looked up in the base, which rests on nothing itself, and stays as long as rows rest
on it.

**Never a mix.** Rows are written once. A lookup asks for ``alive`` in the same MGET as for the rows, and a command is
atomic in Redis: either all that was loaded is there, or the reader is told that the version is gone. Whether there was
a switch can be asked in it too.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from embeddings.store.backends.redis_protocol import Client
from embeddings.store.files import UnknownVersion
from embeddings.store.version import key_column, keys_of_column
from embeddings.vectors.item_vectors import Array

CHUNK_ROWS = 8192
EXPIRED_ROWS = 256
"""Rows in one command: so many that the way there and back does not count, so few that others need not wait long."""


class RowKeys(NamedTuple):
    """Keys of the rows of one version."""

    base: str

    def info(self) -> str:
        return f"{self.base}:info"

    def alive(self) -> str:
        return f"{self.base}:alive"

    def gone(self) -> str:
        return f"{self.base}:gone"

    def chunk(self, number: int) -> str:
        return f"{self.base}:chunk:{number}"

    def block(self, number: int) -> str:
        return f"{self.base}:block:{number}"

    def sibling(self, name: str) -> RowKeys:
        return self._replace(base=f"{self.base.rpartition(':')[0]}:{name}")


_EXPIRE = "for i = 2, #ARGV do redis.call('PEXPIRE', KEYS[1] .. ARGV[i], ARGV[1]) end"


def remove_rows(client: Client, keys: RowKeys, grace_seconds: float) -> None:
    """Let the rows expire after ``grace_seconds``, in which open readers may still look them up.

    Rows that were never complete expire at once. Redis removes them, whatever becomes of this process.
    """
    try:
        info = rows_info(client, keys)
    except UnknownVersion:
        return
    row = info["row_keys"].encode()
    complete = client.exists(keys.alive())
    milliseconds = max(int(1000 * grace_seconds), 1) if complete else 1
    # First what says that they are there, and sooner than the first row.
    if milliseconds > 1:
        client.pexpire(keys.alive(), milliseconds)
    else:
        client.delete(keys.alive())
    later = milliseconds + (1000 if complete else 0)
    expire = client.register_script(_EXPIRE)
    for number in range(info["blocks"]):
        if milliseconds > 1:
            client.pexpire(keys.block(number), later)
        else:
            client.unlink(keys.block(number))
    num_chunks = int(info["chunks"])
    for name in [*(keys.chunk(number) for number in range(num_chunks)), keys.gone()]:
        content = client.get(name)
        if content is None:
            continue
        ids = [] if info["blocks"] else _id_bytes(keys_of_column(_batch(content).column("key")))
        for start in range(0, len(ids), EXPIRED_ROWS):
            part = ids[start : start + EXPIRED_ROWS]
            if milliseconds > 1:
                expire(keys=[row], args=[later, *part])
            else:
                client.unlink(*[row + one for one in part])
        client.pexpire(name, later)
    client.pexpire(keys.info(), later)


# --- reading ---------------------------------------------------------------------------------------------------------


class Columns(NamedTuple):
    """Everything about all items but their vectors.

    ``batch``: key, status, norm, count and so on.
    """

    keys: Array
    batch: pa.RecordBatch


def rows_info(client: Client, keys: RowKeys) -> dict[str, Any]:
    """Return BASE:info; raise UnknownVersion."""
    info = client.get(keys.info())
    if info is None:
        raise gone(keys)
    document: dict[str, Any] = json.loads(info)
    # Rows that were loaded before this was said lie under their version's own name.
    return {"row_keys": f"{keys.base}:id:", "blocks": 0, **document}


def gone(keys: RowKeys) -> UnknownVersion:
    """Return the error of a reader whose rows are not there any more."""
    return UnknownVersion(
        f"{keys.base}: the item rows are gone: their version has expired and its time of grace is over, or Redis lost "
        "them; open the current version, or publish again"
    )


class Given(NamedTuple):
    """A key, and the value that it must have for an answer to count."""

    key: bytes
    value: bytes


class Switched(Exception):
    """The key has another value."""


class RowsReader:
    """Looks up rows of one load, and of the base it rests on."""

    def __init__(self, client: Client, keys: RowKeys):
        self.client = client
        self.keys = keys
        info = rows_info(client, keys)
        self.dim = int(info["dim"])
        self.dtype = np.dtype(info["dtype"])
        self.num_rows = int(info["rows"])
        self._num_chunks = int(info["chunks"])
        self._row = info["row_keys"].encode()
        self.block_rows = int(info.get("block_rows", 0))
        self._width = self.dim * self.dtype.itemsize + 1
        self._base = None if info["base"] is None else RowsReader(client, keys.sibling(info["base"]))

    def values(self, ids: Array, given: Given | None = None) -> Array:
        """Return the stored bytes of keys, uint8 [n, width], zero (status missing) where there is none.

        Raises:
            UnknownVersion: the rows are gone.
            Switched: ``given`` does not hold any more.
        """
        values = self._get(ids, given)
        if self._base is not None:
            absent = [number for number, value in enumerate(values) if value is None]
            if absent:
                for number, value in zip(absent, self._base._get(ids[absent], given), strict=True):
                    values[number] = value
        nothing = bytes(self._width)
        # A tombstone is one byte.
        rows = [value if value is not None and len(value) == self._width else nothing for value in values]
        return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), self._width)

    def _get(self, ids: Array, given: Given | None) -> list[bytes | None]:
        values: list[bytes | None] = []
        alive = self.keys.alive().encode()
        # A key twice costs nothing that could be measured, and one form of the answer is simpler than two.
        key, expected = given or (alive, None)
        for start in range(0, len(ids), CHUNK_ROWS) if len(ids) else (0,):
            part = ids[start : start + CHUNK_ROWS]
            now, is_alive, *rows = self.client.mget([key, alive, *(self._row + one for one in _id_bytes(part))])
            if given is not None and now != expected:
                raise Switched
            if is_alive is None:
                raise gone(self.keys)
            values += rows
        return values

    def split(self, values: Array) -> tuple[Array, Array]:
        """Return (statuses uint8 [n], vectors [n, dim] as stored) of stored bytes."""
        vectors = np.ascontiguousarray(values[:, :-1]).view(self.dtype)
        return values[:, -1].copy(), vectors

    def columns(self) -> Columns:
        """Return everything but the vectors, of all items; raise UnknownVersion."""
        names = [self.keys.chunk(number) for number in range(self._num_chunks)]
        contents = [self.client.get(name) for name in names]
        if None in contents or not self.client.exists(self.keys.alive()):
            raise gone(self.keys)
        batches = [_batch(content) for content in contents]
        table = pa.Table.from_batches(batches).combine_chunks()
        batch = table.to_batches()[0] if table.num_rows else batches[0]
        return Columns(keys_of_column(batch.column("key")), batch)


def no_columns(id_type: str) -> Columns:
    """Return the columns of a version all of whose items were erased: it has no chunk that says what they are."""
    keys = np.empty(0, dtype=np.int64 if id_type == "int64" else "S1")
    columns = {
        "key": key_column(keys),
        "status": pa.array([], pa.uint8()),
        "norm": pa.array([], pa.float32()),
        "count": pa.array([], pa.int64()),
    }
    return Columns(keys, pa.record_batch(columns))


def _id_bytes(keys: Array) -> list[bytes]:
    """Return ids as they stand in Redis' keys."""
    ids: list[bytes] = (keys.astype("S20") if keys.dtype.kind == "i" else keys).tolist()
    return ids


# --- Arrow -----------------------------------------------------------------------------------------------------------


def columns_stream(batch: pa.RecordBatch) -> bytes:
    """Return a batch without its vectors, as an Arrow stream."""
    batch = batch.select([name for name in batch.schema.names if name != "vector"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _batch(content: bytes) -> pa.RecordBatch:
    return pa.ipc.open_stream(content).read_next_batch()
