"""Logs of the service: one JSON object per line for machines, plain lines for a terminal.

``request_id`` and ``job_id`` of the current work are context variables, so that every line logged while a request is
processed contains its id. A run's own log is separate: ``log.txt`` in its run directory.
"""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import re
import secrets
import sys
import time
from typing import Literal

request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
job_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("job_id", default=None)

Format = Literal["json", "text"]
REQUEST_HEADER = "X-Request-Id"
access = logging.getLogger("evenkeel.access")
_CONTEXT = {"request_id": request_id, "job_id": job_id}
_FIELDS = "fields"
NO_FILES_SECONDS = 10.0
"""Shortest time between two lines that say that no connection can be taken."""


class JsonLines(logging.Formatter):
    """Formatter of JSON lines.

    A line has ``time, level, logger, message``, the current ids, the call's fields, and ``traceback`` after an error.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class TextLines(logging.Formatter):
    """Formatter of plain text lines with the content of JsonLines; ids and fields are at the end of the line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        named = {**_ids(), **getattr(record, _FIELDS, {})}
        suffix = "".join(f" {name}={value}" for name, value in named.items())
        # A path may contain any character, even a line break.
        return "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in super().formatMessage(record) + suffix
        )


class NoMoreFiles(logging.Filter):
    """Shortens asyncio's error for connections that cannot be taken, and drops those of the next NO_FILES_SECONDS."""

    _quiet_until = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.getMessage().startswith("socket.accept() out of system resource"):
            return True
        if time.monotonic() < self._quiet_until:
            return False
        self._quiet_until = time.monotonic() + NO_FILES_SECONDS
        remedy = "raise `ulimit -n`, or end clients that keep connections open"
        record.msg, record.args = f"no connection can be taken: too many open files: {remedy}", ()
        record.exc_info = None
        return True


def install(form: Format, access_log: bool) -> None:
    """Send the process's log to stderr in this form; with ``access_log``, the log has a line for each request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("asyncio").addFilter(NoMoreFiles())
    logging.getLogger("evenkeel").setLevel(logging.INFO)
    access.setLevel(logging.INFO if access_log else logging.WARNING)


def with_fields(**fields: object) -> dict[str, dict[str, object]]:
    """Return ``extra`` for a log call that adds fields, such as ``log.info("...", extra=with_fields(rows=3))``."""
    return {_FIELDS: fields}


def take_request_id(offered: str | None) -> str:
    """Return the id offered by a proxy or client if it is safe to log, else a new id."""
    if offered is not None and re.fullmatch(r"[A-Za-z0-9._-]{8,64}", offered):
        return offered
    return secrets.token_hex(8)


def _ids() -> dict[str, str]:
    return {name: value for name, variable in _CONTEXT.items() if (value := variable.get()) is not None}
