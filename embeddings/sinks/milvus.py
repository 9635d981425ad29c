"""Collections of Milvus: ``milvus://HOST:PORT/DATABASE?token=T``, or a file of Milvus Lite, ``milvus:///FILE.db``.

Readers use an alias with the collection's name. A load fills a new collection, then moves the alias to it in one step.
The collection before stays until the next load, for readers that iterate over it, or until ids are erased.

Milvus has no locks. So a loading process gives its collection a second alias, and renews a property of it. If the
property stops changing, another process removes the collection, and the first process, if alive, fails at its switch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from embeddings.sinks.base import Content, SinkBusy, SinkError
from embeddings.vectors.item_vectors import STATUS_NAMES, arrow_of

LEASE_SECONDS = 10.0
"""Time after which a loading process that renews nothing is considered dead."""
LOAD_SECONDS = 7200
"""Longest wait for a server to write, to index or to show the rows of a load; the client knows only whole seconds."""
REQUEST_BYTES = 1 << 24
"""Approximate bytes of one insert; servers refuse more than 64 MiB."""
INDEXES: dict[str, dict[str, Any]] = {
    "none": {"index_type": "FLAT"},
    "hnsw": {"index_type": "HNSW", "params": {"M": 16, "efConstruction": 200}},
}
_FIELDS = ("id", "status", "norm", "vector", "version")
_BEAT = "evenkeel.beat"


class MilvusSink:
    """A database whose aliases lead to collections with the fields id, status (a word), norm, vector and version.

    Options of the URL: ``token``, ``secure=true`` (TLS) and ``index``: ``none`` (exact search) or ``hnsw``.
    """

    def __init__(self, url: str):
        parts = urlsplit(url)
        try:
            import pymilvus

            if not parts.hostname:
                import milvus_lite
        except ImportError as error:
            raise ImportError(f"Milvus cannot be used ({error}): pip install 'evenkeel[milvus]'") from error
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        token, secure, index = (options.pop(*option) for option in (("token", ""), ("secure", ""), ("index", "none")))
        if options or secure not in ("", "true") or index not in INDEXES:
            raise SinkError("a URL of Milvus has the options token, secure=true and index=none or hnsw, and no others")
        if not parts.hostname and not parts.path.endswith(".db"):
            raise SinkError("a URL of Milvus is milvus://HOST:PORT/DATABASE, or milvus:///FILE.db for Milvus Lite")
        self._milvus, self._index = pymilvus, INDEXES[index]
        self._beats: dict[str, tuple[Any, float]] = {}
        self._options: dict[str, Any] = {"uri": unquote(parts.path)}
        self._close_file = None if parts.hostname else milvus_lite.server_manager_instance.release_server
        if parts.hostname:
            token = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else token
            address = f"{'https' if secure else 'http'}://{parts.hostname}:{parts.port or 19530}"
            self._options |= {"uri": address, "token": token, "db_name": unquote(parts.path.strip("/"))}

    def holds(self, table: str) -> str | None:
        with self._client() as client:
            return _identity(table, _target(client, _names(table)[0]))

    def load(self, content: Content) -> None:
        alias, _, prefix = _names(content.table)
        with self._client() as client:
            served = self._clear(client, content.table)
            identity = _identity(content.table, served)
            if identity == content.identity:
                return
            if (served is not None and identity is None) or alias in client.list_collections():
                raise SinkError(f"'{alias}' there is not Evenkeel's: rename it, or use another database")
            name = f"{prefix}{content.identity}_{uuid.uuid4().hex[:8]}"
            client.create_collection(name, schema=self._schema(client, content), properties={_BEAT: "0"})
            try:
                with self._locked(client, content.table, name):
                    self._fill(client, content, name)
                    (client.create_alias if served is None else client.alter_alias)(name, alias)
            except BaseException:
                # If the server is away, the next load removes it.
                with contextlib.suppress(Exception):
                    if _target(client, alias) != name:
                        _remove(client, name)
                raise

    def purge(self, table: str) -> None:
        with self._client() as client:
            self._clear(client, table)

    def drop(self, table: str) -> None:
        with self._client() as client:
            served = self._clear(client, table)
            if served and _identity(table, served):
                _remove(client, served)

    def _schema(self, client: Any, content: Content) -> Any:
        types, schema = self._milvus.DataType, client.create_schema(auto_id=False, enable_dynamic_field=False)
        text = {"datatype": types.VARCHAR, "max_length": 65535}
        id_type = text if content.id_type == "string" else {"datatype": types.INT64}
        vector = {"datatype": types.FLOAT_VECTOR, "dim": content.dim}
        for field, options in zip(_FIELDS, (id_type, text, {"datatype": types.FLOAT}, vector, text), strict=True):
            schema.add_field(field, is_primary=field == "id", **options)
        return schema

    def _fill(self, client: Any, content: Content, name: str) -> None:
        step = max(1, REQUEST_BYTES // (4 * content.dim + 512))
        for batch in content.batches():
            words, version = [STATUS_NAMES[status] for status in batch.statuses], itertools.repeat(content.version)
            columns = arrow_of(batch.keys).to_pylist(), words, batch.norms.tolist(), batch.vectors, version
            rows = [dict(zip(_FIELDS, row, strict=True)) for row in zip(*columns, strict=False)]
            for start in range(0, len(rows), step):
                client.insert(name, rows[start : start + step])
        client.flush(name, timeout=LOAD_SECONDS)
        index = client.prepare_index_params()
        index.add_index("vector", metric_type="COSINE", **self._index)
        client.create_index(name, index, timeout=LOAD_SECONDS)
        client.load_collection(name, timeout=LOAD_SECONDS)
        deadline = time.monotonic() + LOAD_SECONDS
        # From the switch on, readers see all rows whatever consistency they ask for.
        question = {"filter": "", "output_fields": ["count(*)"], "consistency_level": "Eventually"}
        while (count := client.query(name, **question)[0]["count(*)"]) != content.num_rows:
            if time.monotonic() > deadline:
                raise SinkError(f"'{name}': the server shows {count} of {content.num_rows} rows: see its log")
            time.sleep(0.1)

    def _clear(self, client: Any, table: str) -> str | None:
        """Remove all collections of a table but that which readers see, and return the name of that collection."""
        alias, lock, _ = _names(table)
        # A loading process makes its collection first: collections made after this check stay.
        found = [name for name in client.list_collections() if _identity(table, name)]
        holder, served = _target(client, lock), _target(client, alias)
        if holder is not None:
            beat, now = (holder, client.describe_collection(holder)["properties"].get(_BEAT)), time.monotonic()
            last, since = self._beats.get(table, (None, now))
            if holder != served and (beat != last or now - since < LEASE_SECONDS):
                self._beats[table] = beat, since if beat == last else now
                raise SinkBusy(f"another process is loading '{table}'")
            client.drop_alias(lock)
        for name in found:
            if name != served:
                _remove(client, name)
        return served

    @contextlib.contextmanager
    def _locked(self, client: Any, table: str, name: str) -> Iterator[None]:
        """Hold a table's lock by a collection while the block runs; once readers see the collection, it is no lock."""
        lock = _names(table)[1]
        try:
            client.create_alias(name, lock)
        except self._milvus.MilvusException:
            if _target(client, lock) in (None, name):
                raise
            raise SinkBusy(f"another process is loading '{table}'") from None
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(LEASE_SECONDS / 5):
                # A process that does not answer for too long counts as dead.
                with contextlib.suppress(Exception):
                    client.alter_collection_properties(name, {_BEAT: uuid.uuid4().hex})

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            try:
                if self._close_file is not None:
                    Path(self._options["uri"]).parent.mkdir(parents=True, exist_ok=True)
                    # Other processes can open the file afterwards.
                    stack.callback(self._close_file, self._options["uri"])
                client = self._milvus.MilvusClient(**self._options)
            except self._milvus.exceptions.ConnectionConfigException:
                if self._close_file is None:
                    raise
                raise SinkBusy(f"{self._options['uri']} cannot be opened: another process may have it open") from None
            yield stack.enter_context(contextlib.closing(client))


def _names(table: str) -> tuple[str, str, str]:
    """Return a table's alias for readers, the alias that is its lock, and the prefix of its collections' names."""
    # Milvus takes no hyphens, and no digit in front.
    alias = "_" * table[0].isdigit() + table.replace("-", "_")
    prefix = f"{alias}_{hashlib.blake2b(table.encode(), digest_size=4).hexdigest()}_"
    return alias, f"{prefix}lock", prefix


def _identity(table: str, name: str | None) -> str | None:
    """Return the ``Content.identity`` in the name of a collection; None if the collection is not one of the table's."""
    found = re.fullmatch(rf"{_names(table)[2]}([0-9a-f]+)_[0-9a-f]{{8}}", name or "")
    return found[1] if found else None


def _target(client: Any, alias: str) -> str | None:
    """Return the collection that an alias leads to; None if there is no such alias."""
    return client.describe_alias(alias)["collection_name"] if alias in client.list_aliases()["aliases"] else None


def _remove(client: Any, name: str) -> None:
    """Remove a collection with its aliases: the server refuses to drop a collection that has aliases."""
    for alias in client.list_aliases(name)["aliases"]:
        client.drop_alias(alias)
    client.drop_collection(name)
