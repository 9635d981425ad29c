"""Peers of the feature store: a table of ids and vector bytes in SQLite and in LMDB.

Also a Redis server for our store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

Array = np.ndarray


class SQLite:
    """SQLite, written in one transaction, read by primary key in one statement."""

    name = "sqlite"

    def __init__(self, path: Path, dim: int):
        self._width = 2 * dim
        self._connection = sqlite3.connect(path / "items.sqlite", isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, vector BLOB NOT NULL)")

    def write(self, keys: Array, vectors: Array) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("DELETE FROM items")
        self._connection.executemany("INSERT INTO items VALUES (?, ?)", zip(keys.tolist(), rows(vectors), strict=True))
        self._connection.execute("COMMIT")

    def get(self, ids: Array) -> Array:
        marks = ",".join("?" * len(ids))
        found = dict(self._connection.execute(f"SELECT id, vector FROM items WHERE id IN ({marks})", ids.tolist()))
        return decoded([found.get(one) for one in ids.tolist()], self._width)


class LMDB:
    """LMDB, written in one transaction in the order of the ids (the fastest way), read row by row by mmap."""

    name = "lmdb"

    def __init__(self, path: Path, dim: int):
        self._width = 2 * dim
        self._environment = lmdb.open(str(path / "items.lmdb"), map_size=1 << 34, subdir=False)

    def write(self, keys: Array, vectors: Array) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.drop(self._environment.open_db(None, transaction), delete=False)
            pairs = zip(map(bytes, big_endian(keys)), rows(vectors), strict=True)
            with transaction.cursor() as cursor:
                cursor.putmulti(pairs, append=True)

    def get(self, ids: Array) -> Array:
        with self._environment.begin(buffers=True) as transaction:
            return decoded([transaction.get(bytes(key)) for key in big_endian(ids)], self._width)


def big_endian(keys: Array) -> Any:
    return keys.astype(">i8").view("V8")


def rows(vectors: Array) -> Iterator[bytes]:
    """Yield each float16 vector as bytes."""
    return map(bytes, np.ascontiguousarray(vectors).view(f"V{vectors.shape[1] * vectors.itemsize}").reshape(-1))


def decoded(found: list[Any], width: int) -> Array:
    """Return float16 bytes as float32 [n, dim], zeros for None."""
    nothing = bytes(width)
    joined = b"".join([nothing if value is None else value for value in found])
    return np.frombuffer(joined, np.float16).reshape(len(found), -1).astype(np.float32)


@contextlib.contextmanager
def redis_server(folder: Path, large_pages: bool = False) -> Iterator[str | None]:
    """Yield the URL of a new Redis process on a free port, without persistence; None if Redis is not installed."""
    if shutil.which("redis-server") is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    environment = dict(os.environ)
    if large_pages:
        command += ["--disable-thp", "no"]
        environment["MALLOC_CONF"] = "thp:always"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"redis-server does not answer on port {port}")
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
