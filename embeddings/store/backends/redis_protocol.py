"""Redis' protocol where the client's own way takes as long as the server does: packed commands, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from redis.backoff import NoBackoff
from redis.retry import Retry

from embeddings.vectors.item_vectors import Array

Client = Any
"""redis.Redis; its answers are typed as bytes or str, and here they are bytes."""

COMMAND_ROWS = 1024
UNANSWERED_COMMANDS = 8
"""So many are sent before their answers are read."""


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
        if self._num_sent >= UNANSWERED_COMMANDS:
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
