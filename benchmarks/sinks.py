"""Sinks under kills: what readers see while loaders are killed, that erased ids are gone, and rows per second.

    python -m benchmarks.sinks [--rows 100000] [--dim 64] [--kills 20] [--only lancedb|milvus|postgresql] [--seed 0]

Prints one JSON line per sink: a LanceDB directory, a Milvus Lite server that the benchmark starts, and the PostgreSQL
at EVENKEEL_TEST_POSTGRES. A sink that is not installed is left out, and so is a PostgreSQL without pgvector. A version
is loaded and refreshed three times without readers: ``rows_per_second`` is the median of the three loads. Then a reader
reads all rows, over and over. Meanwhile the collection is refreshed three times more, promoted and rolled back, and
processes that load it are killed (SIGKILL) at random times; after half of the kills, the load is done again to its end:

- ``killed_while_loading``: kills that came before the process had ended;
- ``reads``, ``switches_seen``, ``mixed``: reads, changes of version between them, and reads that were not the whole of
  one version;
- ``refused``: reads that ended in an error;
- ``final``: True if the sink then has each row as it is served;
- ``erased_left``: erased ids that any table or version of the sink still has.

The exit code is 1 if ``mixed`` is above 0, the final rows differ, an erased id is left, or fewer than 20,000 rows a
second were loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks.support.harness import parse, say
from embeddings.sinks.follow import attach, is_behind, sync_when_free
from embeddings.sinks.registry import open_sink
from embeddings.store import Collection, open_store
from embeddings.vectors.item_vectors import Array, ItemVectors

NAME = "sink"
TABLE = "items"
GOAL_ROWS_PER_SECOND = 20_000
REFRESHES = 3
ERASED_IDS = 100
POSTGRES = "postgresql://postgres@127.0.0.1:5432/test"
START_SECONDS = 60.0
"""Longest start of a server of Milvus Lite."""
READ_ROWS = 16_000
"""Rows of one answer; Milvus gives no more than 16,384."""
LOADER = f"""
import os, sys
from embeddings.sinks.follow import sync_when_free
from embeddings.sinks.registry import open_sink
from embeddings.store import open_store
sink, collection = open_sink(sys.argv[2]), open_store(sys.argv[1]).collection({TABLE!r})
collection.open()
print("ready", flush=True)
sys.stdin.readline()
sync_when_free(collection, {NAME!r}, sink)
os._exit(0)
"""
"""Program that loads a sink once a line arrives on stdin: it imports little, and is gone as soon as it has loaded."""


class Look(NamedTuple):
    """One read of a table: number of rows, and smallest and largest norm, first coordinate and version."""

    rows: int
    norms: tuple[float, float]
    firsts: tuple[float, float]
    versions: tuple[str, str]


class Reader(Protocol):
    """A program that reads a sink, and knows nothing of Evenkeel."""

    url: str

    def look(self) -> Look:
        """Read all rows of the table once."""
        ...

    def rows(self) -> tuple[Array, Array]:
        """Return the ids int64 [n], ascending, and the vectors float32 [n, dim]."""
        ...

    def ids_anywhere(self) -> set[int]:
        """Return the ids in all tables and versions that the sink keeps."""
        ...


class LanceReader:
    def __init__(self, folder: Path):
        import lancedb

        self.url = f"lancedb://{folder}"
        self._database = lancedb.connect(folder)

    def look(self) -> Look:
        rows = self._database.open_table(TABLE).to_arrow().combine_chunks()
        versions = sorted(rows["version"].unique().to_pylist())
        return Look(len(rows), _ends(rows["norm"].to_numpy()), _ends(_vectors(rows)[:, 0]), (versions[0], versions[-1]))

    def rows(self) -> tuple[Array, Array]:
        rows = self._database.open_table(TABLE).to_arrow().combine_chunks()
        return rows["id"].to_numpy(), _vectors(rows)

    def ids_anywhere(self) -> set[int]:
        table, ids = self._database.open_table(TABLE), set[int]()
        for version in table.list_versions():
            table.checkout(version["version"])
            ids |= set(table.to_arrow()["id"].to_pylist())
        return ids


def _vectors(rows: Any) -> Array:
    vectors: Array = rows["vector"].combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
    return vectors


def _ends(values: Array) -> tuple[float, float]:
    return float(values.min()), float(values.max())


class MilvusReader:
    """A server of Milvus Lite in a process of its own, until ``close``."""

    def __init__(self, folder: Path):
        from pymilvus import MilvusClient, MilvusException

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        program = "import sys; from milvus_lite.cmdline import main; main(sys.argv[1:])"
        place = ["--data-dir", str(folder), "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
        command = [sys.executable, "-c", program, "server", *place]
        logging.getLogger("pymilvus").setLevel(logging.ERROR)  # it warns of each read that Milvus Lite has no clock
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"milvus://{address}"
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._client = MilvusClient(f"http://{address}")
                return
            except MilvusException:
                if time.monotonic() > deadline or self._server.poll() is not None:
                    self.close()
                    raise

    def look(self) -> Look:
        # One version is one collection: the alias may move between two answers.
        name = self._client.describe_alias(TABLE)["collection_name"]
        rows = self._read(name, "norm", "vector", "version")
        norms, firsts, versions = zip(*((row["norm"], row["vector"][0], row["version"]) for row in rows), strict=True)
        return Look(len(rows), *((min(column), max(column)) for column in (norms, firsts, versions)))

    def rows(self) -> tuple[Array, Array]:
        rows = sorted((row["id"], row["vector"]) for row in self._read(TABLE, "id", "vector"))
        return np.array([row[0] for row in rows]), np.array([row[1] for row in rows], np.float32)

    def ids_anywhere(self) -> set[int]:
        return {row["id"] for name in self._client.list_collections() for row in self._read(name, "id")}

    def _read(self, name: str, *fields: str) -> list[dict[str, Any]]:
        iterator = self._client.query_iterator(name, READ_ROWS, filter="id >= 0", output_fields=[*fields])
        parts = [*iter(iterator.next, [])]
        iterator.close()
        return [row for part in parts for row in part]

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


class PostgreSQLReader:
    def __init__(self, address: str):
        self._address, self.schema = address, f"bench_{uuid.uuid4().hex[:12]}"
        self.url = f"{address}?schema={self.schema}"

    def look(self) -> Look:
        columns = ("norm", "(vector::real[])[1]", "version")
        ends = ", ".join(f"min({column}), max({column})" for column in columns)
        ((rows, *found),) = self.ask(f'SELECT count(*), {ends} FROM {self.schema}."{TABLE}"')
        return Look(rows, (found[0], found[1]), (found[2], found[3]), (found[4], found[5]))

    def rows(self) -> tuple[Array, Array]:
        rows = self.ask(f'SELECT id, vector::real[] FROM {self.schema}."{TABLE}" ORDER BY id')
        return np.array([row[0] for row in rows]), np.array([row[1] for row in rows], np.float32)

    def ids_anywhere(self) -> set[int]:
        tables = self.ask(f"SELECT tablename FROM pg_tables WHERE schemaname = '{self.schema}'")
        return {row[0] for (name,) in tables for row in self.ask(f'SELECT id FROM {self.schema}."{name}"')}

    def ask(self, statement: str) -> list[Any]:
        import asyncpg  # type: ignore[import-untyped]

        async def asked() -> list[Any]:
            connection = await asyncpg.connect(self._address, timeout=10)
            try:
                return list(await connection.fetch(statement))
            finally:
                await connection.close()

        return asyncio.run(asked())


@contextlib.contextmanager
def readers(only: str | None, folder: Path) -> Iterator[dict[str, Reader]]:
    """Yield the sinks that are installed here, by kind of sink; print the names of the others."""
    found: dict[str, Reader] = {}
    if only in (None, "lancedb"):
        try:
            found["lancedb"] = LanceReader(folder / "lance")
        except ImportError:
            print("lancedb: left out, pip install 'evenkeel[lancedb]'", file=sys.stderr)
    if only in (None, "milvus"):
        try:
            found["milvus"] = milvus = MilvusReader(folder / "milvus")
        except ImportError:
            print("milvus: left out, pip install 'evenkeel[milvus]'", file=sys.stderr)
    address = os.environ.get("EVENKEEL_TEST_POSTGRES", POSTGRES).replace("+asyncpg", "")
    server = PostgreSQLReader(address)
    if only in (None, "postgresql"):
        try:
            if not server.ask("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"):
                raise OSError("the server has no pgvector")
            found["postgresql"] = server
        except OSError as error:
            print(f"postgresql: left out, {address}: {error}", file=sys.stderr)
    try:
        yield found
    finally:
        if "milvus" in found:
            milvus.close()
        if "postgresql" in found:
            server.ask(f"DROP SCHEMA IF EXISTS {server.schema} CASCADE")


class Watch:
    """A thread that reads a sink all the time, and counts what it sees."""

    def __init__(self, reader: Reader, whole: dict[str, Look]):
        self.reads = self.mixed = self.switches = self.refused = 0
        self._reader, self._whole = reader, whole
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        before = None
        while not self._ended.is_set():
            try:
                look = self._reader.look()
            except Exception as error:
                self.refused += 1
                logging.warning("a read was refused: %s: %s", type(error).__name__, error)
                continue
            self.reads += 1
            self.mixed += look != self._whole.get(look.versions[0])
            self.switches += before is not None and look.versions[0] != before
            before = look.versions[0]


class Run:
    """A collection with one sink. Rows of version number k have norm k and first coordinate k."""

    def __init__(self, store: Path, reader: Reader, rows: int, dim: int):
        self.store, self.reader, self._shape = store, reader, (rows, dim)
        self.collection: Collection = open_store(store).collection(TABLE)
        self.whole: dict[str, Look] = {}

    def refresh(self) -> None:
        number = float(len(self.whole) + 1)
        rows, dim = self._shape
        vectors = np.random.default_rng(int(number)).standard_normal((rows, dim), dtype=np.float32)
        vectors[:, 0] = number
        items = ItemVectors(np.arange(rows), vectors, norms=np.full(rows, number, np.float32))
        version = self.collection.write(items, parent=self.collection.current())
        self.whole[version] = Look(rows, (number, number), (number, number), (version, version))
        self.collection.publish(version, self.collection.current())
        attach(self.collection, [NAME])

    def change(self, generator: random.Random) -> None:
        """Serve another version, older or newer, if the sink has the served version."""
        if not is_behind(self.collection, self.collection.settings("sink")[NAME]):
            others = sorted(self.whole.keys() - {self.collection.current()})
            self.collection.promote(generator.choice(others), "a change for the benchmark")

    def load(self) -> float:
        """Bring the sink up to date; return the seconds that it took."""
        start = time.perf_counter()
        sync_when_free(self.collection, NAME, open_sink(self.reader.url))
        return time.perf_counter() - start

    def killed(self, seconds: float) -> bool:
        """Kill a process that loads after so many seconds; return True if it had not ended before."""
        command = [sys.executable, "-c", LOADER, str(self.store), self.reader.url]
        loader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert loader.stdin is not None
        assert loader.stdout is not None
        assert loader.stdout.readline() == b"ready\n", loader.communicate()[1].decode()
        loader.stdin.write(b"go\n")
        loader.stdin.flush()
        time.sleep(seconds)
        loader.send_signal(signal.SIGKILL)
        loader.communicate()
        return loader.returncode == -signal.SIGKILL


def measure(kind: str, run: Run, kills: int, generator: random.Random) -> dict[str, Any]:
    run.refresh()
    run.load()
    seconds = []
    for _ in range(REFRESHES):
        run.refresh()
        seconds.append(run.load())
    rows = run._shape[0]
    typical, counts = float(np.median(seconds)), [0, 0]
    with Watch(run.reader, run.whole) as watch:
        for number in range(kills):
            if number % max(kills // REFRESHES, 1) == 0 and number < REFRESHES * max(kills // REFRESHES, 1):
                run.refresh()
            run.change(generator)
            # With a reader at work a load takes longer than without.
            counts[run.killed(generator.uniform(0, 1.5 * typical))] += 1
            if generator.random() < 0.5:
                run.load()
        run.load()
    reader = run.collection.open()
    ids, vectors = run.reader.rows()
    final = np.array_equal(ids, reader.keys) and np.array_equal(vectors, reader.vectors)
    erased = generator.sample(range(rows), min(ERASED_IDS, rows // 2))
    run.collection.erase(erased, "a request in the benchmark")
    run.load()
    return {
        "bench": "sinks", "case": f"{kind} {rows} D{run._shape[1]}", "rows_per_second": round(rows / typical),
        "kills": kills, "killed_while_loading": counts[True], "reads": watch.reads, "switches_seen": watch.switches,
        "mixed": watch.mixed, "refused": watch.refused, "final": final,
        "erased_left": len(set(erased) & run.reader.ids_anywhere()),
        "rows_left": len(run.reader.rows()[0]) == rows - len(erased),
    }  # fmt: skip


def holds(line: dict[str, Any]) -> bool:
    """Return True if an output line shows what sinks promise."""
    is_whole = line["mixed"] == 0 and line["final"] and line["erased_left"] == 0 and line["rows_left"]
    return bool(is_whole and line["reads"] and line["rows_per_second"] >= GOAL_ROWS_PER_SECOND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=("lancedb", "milvus", "postgresql"))
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser)
    with tempfile.TemporaryDirectory(prefix="evenkeel-sinks-") as name:
        with readers(options.only, Path(name)) as found:
            lines = []
            for kind, reader in found.items():
                run = Run(Path(name) / f"store-{kind}", reader, options.rows, options.dim)
                lines.append(measure(kind, run, options.kills, random.Random(options.seed)))
                say(lines[-1])
    if not all(map(holds, lines)):
        sys.exit(1)


if __name__ == "__main__":
    main()
