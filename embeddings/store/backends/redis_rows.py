"""Item rows in Redis: how they are loaded, looked up, read whole, and left to go.

    BASE            of a version's rows, PREFIXNAME:rows.TOKEN; the token is drawn anew for every load
    BASE:info       JSON: rows, dim, dtype, chunks, base (the rows this one rests on, or null), row_keys (what is before
                    the ids in their keys), blocks (0; more where vectors lie as redis_packed.py has it)
    BASE:chunk:K    everything of some thousand items but their vectors, as an Arrow stream, ids ascending
    BASE:gone       ids that the base has and this version has not, as an Arrow stream
    BASE:alive      there from the end of the load until the rows may go
    PREFIX.TOKEN:ID vector bytes, then one byte of status; ID in decimals, or the string id itself. Short, as there are
                    as many of them as rows, and no name of a collection begins with a dot

**Deltas.** A version may hold only the rows that differ from an earlier version's, its base, with a tombstone for each
id that the base has and it has not. What is not in the delta is looked up in the base. A base rests on nothing itself,
and stays as long as rows rest on it. Rows are compared byte by byte, never by hashes.

**Never a mix.** Rows are written once. A lookup asks for ``alive`` in the same MGET as for the rows, and a command is
atomic in Redis: either all that was loaded is there, or the reader is told that the version is gone. Whether there was
a switch can be asked in it too.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from redis.backoff import NoBackoff
from redis.retry import Retry

from embeddings.store.files import UnknownVersion
from embeddings.store.version import VersionReader, as_float32, items_of, read_arrow
from embeddings.vectors.item_vectors import MISSING, Array, ItemIdError, ItemVectors, keys_of, shared_rows

Client = Any
"""redis.Redis; its answers are typed as bytes or str, and here they are bytes."""

CHUNK_ROWS = 8192
COMMAND_ROWS = 1024
EXPIRED_ROWS = 256
"""Rows in one command: so many that the way there and back does not count, so few that others need not wait long."""
SAMPLE_ROWS = 1000
DELTA_AT_MOST = 0.3
"""A version of which a larger share is new is loaded whole: lookups of deltas may need two round trips."""


class RowKeys(NamedTuple):
    """Keys of the rows of one version."""

    base: str
    prefix: str

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

    def row(self) -> bytes:
        return f"{self.prefix}.{self.base.rpartition('.')[2]}:".encode()

    def sibling(self, name: str) -> RowKeys:
        return self._replace(base=f"{self.base.rpartition(':')[0]}:{name}")

    @property
    def name(self) -> str:
        return self.base.rpartition(":")[2]


# --- loading ---------------------------------------------------------------------------------------------------------


def load_rows(client: Client, keys: RowKeys, file: Path, parent: RowKeys | None) -> None:
    """Load the rows of ``items.arrow``, as a delta on ``parent``'s where few differ; raise the client's errors."""
    batch = read_arrow(file)
    items = items_of(batch)
    vectors = stored_vectors(batch)
    base = None
    # On rows that Redis lost nothing can rest.
    with contextlib.suppress(UnknownVersion):
        base = None if parent is None else _base_for(client, parent, items, vectors)
    num_chunks = -(-len(items) // CHUNK_ROWS)
    info = {
        "rows": len(items), "dim": items.dim, "dtype": str(vectors.dtype), "chunks": num_chunks,
        "base": None if base is None else base.name, "row_keys": keys.row().decode(), "blocks": 0,
    }  # fmt: skip
    client.set(keys.info(), json.dumps(info))
    gone = np.empty(0, dtype=items.keys.dtype)
    with Loader(client) as loader:
        before = None if base is None else RowsReader(client, base)
        for number in range(num_chunks):
            part = slice(number * CHUNK_ROWS, min((number + 1) * CHUNK_ROWS, len(items)))
            # Which ids are being written is there before they are, so that the rows of a dead writer can be removed.
            loader.send_set(keys.chunk(number), columns_stream(batch.slice(part.start, part.stop - part.start)))
            ids, values = items.keys[part], row_values(vectors[part], items.statuses[part])
            if before is not None:
                changed = (before.values(ids) != values).any(axis=1)
                ids, values = ids[changed], values[changed]
            loader.send_rows(keys.row(), ids, values)
        if before is not None:
            known = before.columns().keys
            gone = known[~np.isin(known, items.keys)]
            loader.send_set(keys.gone(), columns_stream(pa.record_batch({"key": _arrow_keys(gone)})))
            loader.send_rows(keys.row(), gone, np.zeros((len(gone), 1), dtype=np.uint8))
    client.set(keys.alive(), "1")


def _base_for(client: Client, parent: RowKeys, items: ItemVectors, vectors: Array) -> RowKeys | None:
    """Return the rows that a delta may rest on, None where the version is better loaded whole."""
    info = rows_info(client, parent)
    if info["blocks"]:
        return None
    base = parent if info["base"] is None else parent.sibling(info["base"])
    if (info["dim"], info["dtype"]) != (items.dim, str(vectors.dtype)) or not client.exists(base.alive()):
        return None
    reader = RowsReader(client, base)
    rows = np.unique(np.linspace(0, len(items) - 1, SAMPLE_ROWS).astype(np.int64))
    values = reader.values(items.keys[rows])
    if (values != row_values(vectors[rows], items.statuses[rows])).any(axis=1).mean() > DELTA_AT_MOST:
        return None
    known = reader.columns().keys
    if known.dtype.kind != items.keys.dtype.kind:
        return None
    num_gone = len(known) - len(shared_rows(known, items.keys)[0])
    return base if num_gone <= DELTA_AT_MOST * len(items) else None


def row_values(vectors: Array, statuses: Array) -> Array:
    """Return the bytes that are stored, uint8 [n, bytes of a vector + 1]."""
    raw = np.ascontiguousarray(vectors).view(np.uint8)
    return np.concatenate([raw, statuses.reshape(-1, 1)], axis=1)


class Loader:
    """Sends many commands before it asks for their answers.

    A lost connection ends the load: a server that comes back may have lost what was sent before, so there is no going
    on from there.
    """

    def __init__(self, client: Client):
        self._pool = client.connection_pool
        self._connection: Any = None
        self._num_sent = 0

    def __enter__(self) -> Loader:
        self._connection = self._pool.get_connection()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._answers()
            else:
                self._connection.disconnect()
        finally:
            self._pool.release(self._connection)

    def send_set(self, key: str, value: bytes) -> None:
        self._send([*self._connection.pack_command("SET", key, value)])

    def send_rows(self, prefix: bytes, ids: Array, values: Array) -> None:
        for start in range(0, len(ids), COMMAND_ROWS):
            part = slice(start, start + COMMAND_ROWS)
            num_rows = len(ids[part])
            self._send([b"*%d\r\n$4\r\nMSET\r\n" % (2 * num_rows + 1), *packed_rows(prefix, ids[part], values[part])])

    def _send(self, packed: list[bytes]) -> None:
        self._connection.send_packed_command(packed)
        self._num_sent += 1
        if self._num_sent >= CHUNK_ROWS // COMMAND_ROWS:
            self._answers()

    def _answers(self) -> None:
        while self._num_sent:
            self._num_sent -= 1
            self._connection.read_response()


def packed_rows(prefix: bytes, ids: Array, values: Array) -> Iterator[bytes]:
    """Yield key and value of each row as Redis' protocol has them: $LENGTH, bytes, twice.

    Ids of one length are packed at a time: then it is a matrix.
    """
    names = id_bytes(ids)
    lengths = np.char.str_len(names)
    width = values.shape[1]
    for length in np.unique(lengths):
        chosen = np.flatnonzero(lengths == length)
        columns: list[Any] = [
            b"$%d\r\n" % (len(prefix) + length) + prefix,
            # NumPy has no strings without bytes.
            np.ascontiguousarray(names[chosen].astype(f"S{max(length, 1)}"))
            .view(np.uint8)
            .reshape(len(chosen), -1)[:, :length],
            b"\r\n$%d\r\n" % width,
            values[chosen],
            b"\r\n",
        ]
        sizes = [len(column) if isinstance(column, bytes) else column.shape[1] for column in columns]
        packed = np.empty((len(chosen), sum(sizes)), dtype=np.uint8)
        end = 0
        for column, size in zip(columns, sizes, strict=True):
            packed[:, end : end + size] = np.frombuffer(column, np.uint8) if isinstance(column, bytes) else column
            end += size
        yield packed.tobytes()


def id_bytes(keys: Array) -> Array:
    """Return ids as they stand in Redis' keys, bytes ``S`` [n]."""
    return keys.astype("S20") if keys.dtype.kind == "i" else keys


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
        ids = [] if info["blocks"] else id_bytes(_keys_of_batch(_batch(content))).tolist()
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
        found = self._get(ids, given)
        if self._base is not None:
            absent = [number for number, value in enumerate(found) if value is None]
            if absent:
                for number, value in zip(absent, self._base._get(ids[absent], given), strict=True):
                    found[number] = value
        nothing = bytes(self._width)
        # A tombstone is one byte.
        rows = [value if value is not None and len(value) == self._width else nothing for value in found]
        return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), self._width)

    def _get(self, ids: Array, given: Given | None) -> list[bytes | None]:
        found: list[bytes | None] = []
        alive = self.keys.alive().encode()
        # A key twice costs nothing that could be measured, and one form of the answer is simpler than two.
        key, expected = given or (alive, None)
        for start in range(0, len(ids), CHUNK_ROWS) if len(ids) else (0,):
            part = ids[start : start + CHUNK_ROWS]
            now, is_alive, *rows = ask(self.client, packed_mget((key, alive), self._row, part))
            if given is not None and now != expected:
                raise Switched
            if is_alive is None:
                raise gone(self.keys)
            found += rows
        return found

    def split(self, values: Array) -> tuple[Array, Array]:
        """Return (statuses uint8 [n], vectors [n, dim] as stored) of stored bytes."""
        vectors = np.ascontiguousarray(values[:, :-1]).view(self.dtype)
        return values[:, -1].copy(), vectors

    def columns(self) -> Columns:
        """Return everything but the vectors, of all items; raise UnknownVersion."""
        names = [self.keys.chunk(number) for number in range(self._num_chunks)]
        found = [self.client.get(name) for name in names]
        if None in found or not self.client.exists(self.keys.alive()):
            raise gone(self.keys)
        batches = [_batch(content) for content in found]
        table = pa.Table.from_batches(batches).combine_chunks()
        batch = table.to_batches()[0] if table.num_rows else batches[0]
        return Columns(_keys_of_batch(batch), batch)


def packed_mget(first: Sequence[bytes], row: bytes, ids: Array) -> bytes:
    """Return MGET of the keys ``first`` and of ``row + id``, as Redis' protocol has it.

    One formatting of all of them takes a fraction of the time of the client's own packing.
    """
    if ids.dtype.kind == "i":
        lengths, form = decimal_lengths(ids), b"%d"
    else:
        lengths, form = np.char.str_len(ids), b"%b"
    arguments: list[Any] = [None] * (2 * len(ids))
    arguments[::2] = (lengths + len(row)).tolist()
    arguments[1::2] = ids.tolist()
    head = b"*%d\r\n$4\r\nMGET\r\n" % (len(ids) + len(first) + 1)
    head += b"".join([b"$%d\r\n%b\r\n" % (len(key), key) for key in first])
    return head + (b"$%d\r\n" + row.replace(b"%", b"%%") + form + b"\r\n") * len(ids) % tuple(arguments)


def decimal_lengths(numbers: Array) -> Array:
    """Return how many characters each int64 has in decimals, int64 [n]."""
    # The smallest has no absolute value in int64; its neighbour is as long.
    sizes = np.abs(np.maximum(numbers, -np.iinfo(np.int64).max))
    return np.searchsorted(_POWERS_OF_TEN, sizes, side="right") + (numbers < 0) + 1


_POWERS_OF_TEN = 10 ** np.arange(1, 19, dtype=np.int64)


def ask(client: Client, command: bytes, read: Callable[[Any], Any] | None = None) -> Any:
    """Return the answer to a packed command, or what ``read`` takes from the connection.

    It goes straight over a connection, because the client's own way there takes as long as Redis does; a lost
    connection is made again, with the client's own pauses.
    """
    retry: Retry = client.get_retry() or Retry(NoBackoff(), 0)

    def once() -> Any:
        connection = client.connection_pool.get_connection()
        try:
            connection.send_packed_command([command])
            return connection.read_response() if read is None else read(connection)
        except BaseException:
            # What is on its way over this connection answers a question that nobody waits for any more.
            connection.disconnect()
            raise
        finally:
            client.connection_pool.release(connection)

    return retry.call_with_retry(once, lambda error: None)


class RedisReader(VersionReader):
    """Reads one version whose rows are in Redis: a lookup is one MGET.

    Ids, statuses, norms and vectors of the whole version are read when they are first asked for, into memory.
    """

    def __init__(
        self,
        client: Client,
        keys: RowKeys,
        manifest: dict[str, Any],
        reach: Callable[[], AbstractContextManager[None]],
    ):
        self.manifest = manifest
        self.version = manifest["version"]
        self.dim = manifest["dim"]
        self._reach = reach
        self._rows = RowsReader(client, keys)

    def __len__(self) -> int:
        return int(self.manifest["rows"])

    def lookup(self, ids: Any) -> tuple[Array, Array]:
        return self._lookup(ids, None)

    def lookup_given(self, ids: Any, key: bytes, value: bytes) -> tuple[Array, Array] | None:
        """Return :meth:`lookup` if Redis has ``value`` at ``key``, else None.

        Both are asked in the same command.
        """
        try:
            return self._lookup(ids, Given(key, value))
        except Switched:
            return None

    def _lookup(self, ids: Any, given: Given | None) -> tuple[Array, Array]:
        queries = self._queries(ids)
        with self._reach():
            status, vectors = self._rows.split(self._rows.values(queries, given))
        return status, as_float32(vectors)

    def _queries(self, ids: Any) -> Array:
        queries = keys_of(ids, query=True)
        if len(queries) and (queries.dtype.kind == "i") != (self.manifest["id_type"] == "int64"):
            here, asked = ("integers", "strings") if queries.dtype.kind != "i" else ("strings", "integers")
            raise ItemIdError(f"the ids here are {here}, those asked for are {asked}")
        return queries

    @functools.cached_property
    def _columns(self) -> Columns:
        with self._reach():
            return self._rows.columns()

    @functools.cached_property
    def keys(self) -> Array:  # type: ignore[override]
        return self._columns.keys

    @functools.cached_property
    def statuses(self) -> Array:  # type: ignore[override]
        return self._columns.batch.column("status").to_numpy()

    @functools.cached_property
    def norms(self) -> Array:  # type: ignore[override]
        return self._columns.batch.column("norm").to_numpy()

    @functools.cached_property
    def counts(self) -> Array | None:  # type: ignore[override]
        return self._items.counts

    @functools.cached_property
    def vectors(self) -> Array:  # type: ignore[override]
        return stored_vectors(self._batch)

    @functools.cached_property
    def _items(self) -> ItemVectors:  # type: ignore[override]
        return items_of(self._batch)

    @functools.cached_property
    def _batch(self) -> pa.RecordBatch:  # type: ignore[override]
        with self._reach():
            vectors = self._all_vectors()
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), self.dim)
        return self._columns.batch.append_column("vector", column)

    def _all_vectors(self) -> Array:
        """Return all vectors as they are stored, [n, d]."""
        vectors = np.empty((len(self.keys), self.dim), dtype=self._rows.dtype)
        for start in range(0, len(vectors), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            statuses, vectors[part] = self._rows.split(self._rows.values(self.keys[part]))
            if (statuses == MISSING).any():
                raise gone(self._rows.keys)
        return vectors


# --- Arrow -----------------------------------------------------------------------------------------------------------


def stored_vectors(batch: pa.RecordBatch) -> Array:
    """Return the vectors of ``items.arrow`` as they are stored, [n, d]."""
    column = batch.column("vector")
    rows: Array = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return rows


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


def _keys_of_batch(batch: pa.RecordBatch) -> Array:
    key = batch.column("key")
    dtype = "<i8" if pa.types.is_int64(key.type) else f"S{key.type.byte_width}"
    start, end = key.offset, key.offset + len(key)
    return np.frombuffer(key.buffers()[1], dtype=dtype)[start:end]


def _arrow_keys(keys: Array) -> pa.Array:
    if keys.dtype.kind == "i":
        return pa.array(keys)
    buffer = pa.py_buffer(np.ascontiguousarray(keys))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(keys.dtype.itemsize), len(keys), [None, buffer])
