"""The audit log: who did what to which object, when, and from which address.

Every request that needs a scope to change something is recorded, even if it is refused, before its response is sent. So
the log contains every change that was confirmed to a caller. Entries of requests that are answered at the same time
share one transaction. While the database cannot be written, entries go to ``audit_pending.jsonl`` under
``EVENKEEL_HOME`` (0600); the next entry that reaches the database transfers them. If that file cannot be written
either, as on a full disk, the entry becomes a line of the service's log, and the response stays the same.
"""

from __future__ import annotations

import asyncio
import datetime
import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DataError, IntegrityError

from service.core import tables
from service.core.database import Database, insert_new
from service.core.rows import AuditRow, as_row
from service.identity.auth import AWAY
from service.identity.keys import Principal

FILE_NAME = "audit_pending.jsonl"
PATIENCE_SECONDS = 5.0
_LENGTHS = {"action": 128, "object": 255, "address": 64}
log = logging.getLogger("evenkeel")


def entry(principal: Principal, tenant: str, action: str, target: str, status: int, address: str) -> AuditRow:
    """Return a row of the audit table for one request.

    ``tenant``: the owner of the object that the request was about. ``action``: method and route, such as ``DELETE
    /v1/jobs/{job_id}``. ``target``: the path of the object that was created or changed.
    """
    return {
        "id": tables.new_id("audit"),
        "at": tables.now(),
        "tenant": tenant,
        "key_id": principal.key_id,
        "key_name": principal.name,
        "action": action[: _LENGTHS["action"]],
        "object": target[: _LENGTHS["object"]],
        "status": status,
        "address": address[: _LENGTHS["address"]],
    }


class Audit:
    """Writer of the audit log; ``record`` enters one request.

    ``file`` holds the entries that the database could not accept.
    """

    def __init__(self, database: Database, file: Path):
        self._database = database
        self._file = file
        self._waiting: list[tuple[AuditRow, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, row: AuditRow) -> None:
        """Enter one request; raises nothing even if neither database nor disk accepts the entry."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._entered(row)
        except (*AWAY, TimeoutError) as error:
            try:
                await asyncio.to_thread(self._keep, row)
            except OSError as full:
                lost = "audit: entry lost, neither the database (%s) nor the file %s (%s) could be written: %s"
                log.error(lost, error, self._file, full, _text(row))
            else:
                log.error("audit: the database cannot take an entry, which is kept in %s: %s", self._file, error)
        else:
            if self._file.exists() and self._file.stat().st_size:
                await self._take_along()

    async def _entered(self, row: AuditRow) -> None:
        """Wait until the entry is committed; entries that arrive during a commit share the next commit."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_waiting())
        await done

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                # A request that has waited too long has written its entry to the file.
                await self._write([(row, done) for row, done in batch if not done.done()])
        finally:
            self._writing = None

    async def _write(self, batch: list[tuple[AuditRow, asyncio.Future[None]]]) -> None:
        """Insert the entries and settle each one's future; an entry that the database refuses does not block others."""
        if not batch:
            return
        error: Exception | None = None
        try:
            await self._insert([row for row, _ in batch])
        except asyncio.CancelledError:
            for _, done in batch:
                done.cancel()
            raise
        except Exception as failure:
            error = failure
        if isinstance(error, DataError | IntegrityError) and len(batch) > 1:
            for waiting in batch:
                await self._write([waiting])
            return
        for _, done in batch:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

    async def _insert(self, rows: list[AuditRow]) -> None:
        if rows:
            async with self._database.write() as connection:
                await connection.execute(insert_new(connection.dialect.name, tables.audit), rows)

    def _keep(self, row: AuditRow) -> None:
        line = (_text(row) + "\n").encode()
        with _locked(self._file, fcntl.LOCK_EX) as descriptor:
            end = os.lseek(descriptor, 0, os.SEEK_END)
            if end and os.pread(descriptor, 1, end - 1) != b"\n":  # a writer was killed within a line
                line = b"\n" + line
            try:
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, end)  # leave no partial line
                raise

    async def _take_along(self) -> None:
        """Insert the pending entries of ``file`` into the database, and empty the file.

        If the process dies between commit and truncation, the next attempt inserts no entry twice.
        """
        try:
            with _locked(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB) as descriptor:
                waiting = [*_whole(os.pread(descriptor, os.fstat(descriptor).st_size, 0))]
                try:
                    await self._insert(waiting)
                except (DataError, IntegrityError):
                    for row in waiting:
                        try:
                            await self._insert([row])
                        except (DataError, IntegrityError) as error:
                            log.error("audit: the database refuses an entry (%s): %s", error, _text(row))
                os.ftruncate(descriptor, 0)
        except BlockingIOError:
            return  # another process is transferring them
        except (*AWAY, ValueError) as error:
            log.error("audit: the entries in %s could not be transferred yet: %s", self._file, error)


def _whole(text: bytes) -> Iterator[AuditRow]:
    """Yield the complete entries of the file.

    A truncated entry, whose process was killed before it answered the request, becomes a line of the service's log.
    """
    for line in text.splitlines():
        try:
            document = json.loads(line)
            yield as_row(AuditRow, {**document, "at": datetime.datetime.fromisoformat(document["at"])})
        except (ValueError, TypeError, KeyError):
            if line:
                log.error(
                    "audit: an entry was cut off before its request was answered: %s", line.decode(errors="replace")
                )


def _text(row: AuditRow) -> str:
    return json.dumps({**row, "at": row["at"].isoformat()})


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    """Open and lock the file; raise BlockingIOError if another process has locked it and ``how`` does not wait."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)


def listing(
    tenant: str | None, key_id: str | None, since: datetime.datetime | None, until: datetime.datetime | None
) -> sa.Select[Any]:
    """Return a query for the entries that match all filters given; ``tenant`` None selects all tenants."""
    table = tables.audit
    query = sa.select(table)
    for column, value in ((table.c.tenant, tenant), (table.c.key_id, key_id)):
        if value is not None:
            query = query.where(column == value)
    if since is not None:
        query = query.where(table.c.at >= since)
    if until is not None:
        query = query.where(table.c.at < until)
    return query
