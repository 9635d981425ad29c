"""The feature store in Redis, and in servers that speak its protocol.

    PREFIXcollections                       set of names of collections
    PREFIXNAME:INDEX                        map of files to objects; replacing it is the switch
    PREFIXNAME:revision                     changes with the index; readers poll it
    PREFIXNAME:LOCK                         token of the one writer, with an expiry
    PREFIXNAME:objects                      set of objects
    PREFIXNAME:object:OBJECT                a document or file, in pieces
    PREFIXNAME:rows.TOKEN:WHAT              item rows (redis_rows.py)

The index is replaced by a script that first checks the lock, so a writer that lost the lock commits nothing. A server
that restarted during the load of rows may have lost some: its run id is compared before the commit. See
docs/adr/0019-remote-stores.md.
"""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, OutOfMemoryError, ReadOnlyError, TimeoutError
from redis.retry import Retry

from embeddings.store.backends.redis_reader import RedisReader
from embeddings.store.backends.redis_rows import Client, RowKeys, load_rows, remove_rows, repack
from embeddings.store.backends.remote import content_name
from embeddings.store.backends.remote_store import RemoteStore
from embeddings.store.files import RowsGone, StoreBusy, StoreError, StoreFull, StoreUnavailable
from embeddings.store.lease import Lease, leased
from embeddings.store.manifest import VersionManifest, is_items_file
from embeddings.store.url import REDIS_PREFIX, StoreUrl, parse_store_url
from embeddings.store.version import VersionReader
from embeddings.vectors.item_vectors import Array

FOLLOW_SECONDS = 0.0
GRACE_SECONDS = 600.0
OPTIONS = ("prefix", "grace_seconds", "rows")
_PIECE_BYTES = 1 << 22
_CONNECT_SECONDS = 3.0
_SOCKET_SECONDS = 20.0
_RETRIES = 3
_LONGEST_WAIT_SECONDS = 1.0
_LOST_CONNECTION = (ConnectionError, TimeoutError, BusyLoadingError)

_COMMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[3], ARGV[3])
redis.call('SADD', KEYS[4], ARGV[4])
return 1
"""
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


def open_redis(text: str) -> RemoteStore:
    """Return the store at ``redis://HOST:PORT/DB``.

    Options in its query: ``prefix``, with which all keys begin (default ``evenkeel:``), ``grace_seconds``, for which
    the rows of an expired version stay readable (default 600), and the options of every remote store. ``rows=packed``
    is accepted and changes nothing.

    Raises:
        ValueError: an unknown option, or an invalid value.
    """
    url = parse_store_url(text, FOLLOW_SECONDS, OPTIONS)
    prefix = url.options.get("prefix", REDIS_PREFIX)
    try:
        client = connect(url.address)
    except ValueError as error:
        raise ValueError(f"store url '{url.url}': {error}") from None

    try:
        grace_seconds = float(url.options.get("grace_seconds", GRACE_SECONDS))
    except ValueError:
        grace_seconds = -1.0
    if not grace_seconds >= 0:
        raise ValueError(f"store url '{url.url}': grace_seconds is {url.options['grace_seconds']!r}, expected seconds")

    if url.options.get("rows", "packed") != "packed":
        raise ValueError(
            f"store url '{url.url}': rows={url.options['rows']} was removed: versions are loaded packed, and those "
            "that have a key for each row are read as before: leave rows out"
        )

    def names() -> list[str]:
        with reaching(url.url):
            return [name.decode() for name in client.smembers(f"{prefix}collections")]

    store = RemoteStore(url, names, lambda name: InRedis(client, prefix, name, url, grace_seconds))
    weakref.finalize(store, client.connection_pool.disconnect)
    return store


def connect(address: str) -> Client:
    """Return a client that connects when it is first used, and reconnects with growing pauses."""
    backoff = ExponentialBackoff(cap=_LONGEST_WAIT_SECONDS, base=0.05)
    return redis.Redis.from_url(
        address,
        protocol=2,
        retry=Retry(backoff, _RETRIES, supported_errors=_LOST_CONNECTION),
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_SOCKET_SECONDS,
        socket_keepalive=True,
    )


@contextlib.contextmanager
def reaching(where: str) -> Iterator[None]:
    """Turn errors of the Redis client inside this context into errors of the store; ``where`` begins the message.

    Raises:
        StoreFull: Redis has reached its memory limit.
        StoreUnavailable: Redis cannot be reached or takes no writes.
        StoreError: Redis refused the command.
    """
    unchanged = "nothing was published and what is served is unchanged"
    try:
        yield
    except OutOfMemoryError as error:
        raise StoreFull(
            f"{where}: {error}: {unchanged}; raise maxmemory or keep fewer versions, then run again"
        ) from error
    except (*_LOST_CONNECTION, ReadOnlyError) as error:
        raise StoreUnavailable(
            f"{where}: Redis cannot be reached or refuses writes: {error}. What is served is unchanged; see that "
            "the server is up, then try again"
        ) from error
    except redis.RedisError as error:
        raise StoreError(f"{where}: Redis refused: {error}") from error


class InRedis:
    """One collection in Redis."""

    items_stay_there = True

    def __init__(self, client: Client, prefix: str, name: str, url: StoreUrl, grace_seconds: float):
        self._client = client
        self._all_names = f"{prefix}collections"
        self._name = name
        self._base = f"{prefix}{name}"
        self._where = f"{url.url} ({self._base})"
        self._lease_seconds = url.lease_seconds
        self._grace_seconds = grace_seconds
        self._revision = f"{self._base}:revision".encode()
        self._known: tuple[bytes | None, bytes | None] = (None, None)
        self._run_id = ""

    def index(self) -> bytes | None:
        with reaching(self._where):
            revision = self._client.get(self._revision)
            if revision is None:
                return None
            known = self._known
            if revision != known[0]:
                # One command, so that revision and index match.
                known = tuple(self._client.mget(self._revision, f"{self._base}:INDEX"))  # type: ignore[assignment]
                self._known = known
            return known[1]

    def commit(self, index: bytes, before: bytes | None, lease: Lease) -> None:
        lease.check()
        with reaching(self._where):
            if self._server() != self._run_id:
                raise StoreUnavailable(
                    f"{self._where}: Redis was restarted while this was written, and may have lost a part of it: "
                    "nothing was published and what is served is unchanged; run again"
                )
            keys = [f"{self._base}:LOCK", f"{self._base}:INDEX", f"{self._base}:revision", self._all_names]
            revision = uuid.uuid4().hex
            done = self._client.eval(_COMMIT, len(keys), *keys, lease.token, index, revision, self._name)
        if not done:
            raise StoreBusy(
                f"{self._where}: another writer holds the lock by now: nothing was published and what is served is "
                "unchanged; run again"
            )

    def put(self, path: str, file: Path, sha256: str) -> str:
        with reaching(self._where):
            if is_items_file(PurePosixPath(path).name):
                name = f"rows.{uuid.uuid4().hex[:12]}"
                self._refuse_eviction()
                self._client.sadd(f"{self._base}:objects", name)
                load_rows(self._client, self._keys(name), file)
                return name
            name = content_name(path, sha256)
            key = f"{self._base}:object:{name}"
            with open(file, "rb") as source, self._client.pipeline(transaction=False) as pipeline:
                pipeline.sadd(f"{self._base}:objects", name)
                pipeline.delete(key)
                while piece := source.read(_PIECE_BYTES):
                    pipeline.rpush(key, piece)
                    if len(piece) == _PIECE_BYTES:
                        pipeline.execute()
                pipeline.execute()
        return name

    def fetch(self, name: str, to: Path) -> None:
        key = f"{self._base}:object:{name}"
        with reaching(self._where), open(to, "wb") as target:
            number = 0
            while piece := self._client.lindex(key, number):
                target.write(piece)
                number += 1
            if not number:
                raise FileNotFoundError(key)

    def sweep(self, named: set[str], lease: Lease) -> None:
        with reaching(self._where):
            for name in named:
                # A version whose rows Redis lost must not prevent the publication of others.
                with contextlib.suppress(RowsGone):
                    if name.startswith("rows."):
                        repack(self._client, self._keys(name))
            for member in self._client.smembers(f"{self._base}:objects"):
                name = member.decode()
                if name in named:
                    continue
                lease.check()
                if name.startswith("rows."):
                    remove_rows(self._client, self._keys(name), self._grace_seconds)
                else:
                    self._client.unlink(f"{self._base}:object:{name}")
                self._client.srem(f"{self._base}:objects", name)

    @contextlib.contextmanager
    def lock(self) -> Iterator[Lease]:
        with leased(self, uuid.uuid4().hex, self._lease_seconds, self._where) as lease:
            with reaching(self._where):
                self._run_id = self._server()
            yield lease

    def reader(self, manifest: VersionManifest, name: str) -> VersionReader:
        with reaching(self._where):
            return RedisReader(self._client, self._keys(name), manifest, partial(reaching, self._where))

    def lookup(self, reader: VersionReader, ids: Any, index: bytes) -> tuple[Array, Array] | None:
        assert isinstance(reader, RedisReader)
        revision, known = self._known
        return reader.lookup_given(ids, self._revision, revision) if revision is not None and known == index else None

    # --- the lock --------------------------------------------------------------------------------------------------

    def acquire(self, token: str) -> bool:
        with reaching(self._where):
            return bool(self._client.set(f"{self._base}:LOCK", token, nx=True, px=self._lease_milliseconds()))

    def renew(self, token: str) -> None:
        with reaching(self._where):
            is_ours = self._client.eval(_RENEW, 1, f"{self._base}:LOCK", token, self._lease_milliseconds())
        if not is_ours:
            raise StoreBusy(f"{self._where}: another writer holds the lock by now")

    def release(self, token: str) -> None:
        with reaching(self._where):
            self._client.eval(_RELEASE, 1, f"{self._base}:LOCK", token)

    def _lease_milliseconds(self) -> int:
        return max(int(1000 * self._lease_seconds), 1)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _keys(self, name: str) -> RowKeys:
        return RowKeys(f"{self._base}:{name}")

    def _server(self) -> str:
        return str(self._client.info("server").get("run_id", ""))

    def _refuse_eviction(self) -> None:
        memory = self._client.info("memory")
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        if int(memory.get("maxmemory", 0)) and policy.startswith("allkeys"):
            raise StoreError(
                f"{self._where}: Redis has maxmemory-policy {policy}: rows that it evicts would be served as missing; "
                "set noeviction or one of the volatile policies"
            )
