"""Output of a running job: its log by offset, and its events as a stream that a reader can resume."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from fastapi.sse import format_sse_event

from service.core import tables
from service.core.database import Database
from service.core.errors import invalid
from service.core.settings import Settings
from service.jobs.states import TERMINAL
from trainer.runs.protocol import LOG_FILE
from trainer.spec.problems import FieldProblem

LOG_BYTES = 2**20
STREAM_LOG_BYTES = 2**16
EVENTS_AT_ONCE = 500
KEEP_ALIVE_SECONDS = 15.0


def read_log(run_dir: Path, offset: int, limit: int = LOG_BYTES) -> bytes:
    """Return at most ``limit`` bytes of the log from byte ``offset`` on; b"" if there is no log yet.

    A UTF-8 character is never cut at the limit.
    """
    try:
        with open(run_dir / LOG_FILE, "rb") as file:
            if offset >= os.fstat(file.fileno()).st_size:
                return b""
            file.seek(offset)
            text = file.read(limit)
    except FileNotFoundError:
        return b""
    return text if len(text) < limit else text[: whole_characters(text)]


def whole_characters(text: bytes) -> int:
    """Return the length of ``text`` in bytes without an incomplete UTF-8 character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    return len(text) - len(decoder.getstate()[0])


def log_offset(run_dir: Path, offset: int) -> int:
    """Return ``offset``, or 0 if the log is shorter: the run directory was then removed and a new log begun."""
    try:
        return offset if offset <= (run_dir / LOG_FILE).stat().st_size else 0
    except FileNotFoundError:
        return 0


class Position(NamedTuple):
    """A reader's position in the stream, written as its Last-Event-ID ``<event>-<log offset>``."""

    event: int = 0
    log: int = 0

    def __str__(self) -> str:
        return f"{self.event}-{self.log}"


def position(last_event_id: str | None) -> Position:
    """Parse a Last-Event-ID; None or an empty text means the beginning of the stream.

    Raises:
        Problem: 422 for an id that this stream did not issue.
    """
    if not last_event_id:
        return Position()
    match = re.fullmatch(r"(\d{1,18})-(\d{1,18})", last_event_id)
    if match is None:
        raise invalid(
            FieldProblem(
                "Last-Event-ID", f"'{last_event_id[:64]}' is not an id of this stream", "leave it out to start anew"
            )
        )
    return Position(int(match[1]), int(match[2]))


class Batch(NamedTuple):
    """Encoded events, the position after them, and True if no more events can follow."""

    chunks: list[bytes]
    position: Position
    ended: bool


async def batch(database: Database, settings: Settings, job_id: str, at: Position) -> Batch:
    """Return the events after position ``at`` in the order in which they were recorded, then new lines of the log."""
    events = tables.job_event.c
    query = sa.select(events.id, events.type, events.data).where(events.job_id == job_id, events.id > at.event)
    async with database.read() as connection:
        job = tables.job.c
        row = (await connection.execute(sa.select(job.state, job.released).where(job.id == job_id))).first()
        happened = (await connection.execute(query.order_by(events.id).limit(EVENTS_AT_ONCE))).all()
    chunks = []
    for event in happened:
        at = at._replace(event=event.id)
        chunks.append(_encode(event.type, event.data, at))
    ended = row is None or (row.state in TERMINAL and row.released)
    at = at._replace(log=await asyncio.to_thread(log_offset, settings.run_dir(job_id), at.log))
    text = await asyncio.to_thread(read_log, settings.run_dir(job_id), at.log, STREAM_LOG_BYTES)
    end = text.rfind(b"\n") + 1
    full = len(text) > STREAM_LOG_BYTES - 4  # the limit may have cut off a character
    if (end or not full) and not (ended and not full):
        text = text[:end]  # an incomplete last line is sent with the next batch
    if text:
        at = at._replace(log=at.log + len(text))
        chunks.append(_encode("log", {"text": text.decode("utf-8", "replace"), "next_offset": at.log}, at))
    return Batch(chunks, at, ended and not chunks)


async def stream(
    database: Database, settings: Settings, job_id: str, first: Batch, may_read: Callable[[], Awaitable[bool]]
) -> AsyncIterator[bytes]:
    """Yield server-sent events until the job has ended and everything was sent, or the reader may not read any more."""
    following, quiet_since = first, time.monotonic()
    while True:
        for chunk in following.chunks:
            yield chunk
        if following.ended:
            return
        if following.chunks:
            quiet_since = time.monotonic()
        else:
            if time.monotonic() - quiet_since > KEEP_ALIVE_SECONDS:
                quiet_since = time.monotonic()
                yield b": still here\n\n"
            await asyncio.sleep(settings.follow_seconds)
        if not await may_read():
            return
        following = await batch(database, settings, job_id, following.position)


def _encode(kind: str, data: dict[str, Any], at: Position) -> bytes:
    return format_sse_event(data_str=json.dumps(data, separators=(",", ":")), event=kind, id=str(at))
