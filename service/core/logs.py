"""Logs of the service: one JSON object a line for machines, plain lines for a terminal.

``request_id`` and ``job_id`` of what is being worked on are context variables: a line that is logged on the way of a
request, in whichever module, says which request it was. The run's own log is another thing (``D/log.txt``).
"""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import re
import secrets
import sys
from typing import Literal

request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
job_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("job_id", default=None)

Format = Literal["json", "text"]
REQUEST_HEADER = "X-Request-Id"
access = logging.getLogger("evenkeel.access")
_CONTEXT = {"request_id": request_id, "job_id": job_id}
_FIELDS = "fields"


class JsonLines(logging.Formatter):
    """``time, level, logger, message``, the ids at hand, ``fields`` of the call, ``traceback`` where there is one."""

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
    """The same for people: ids and fields at the end of the line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        named = {**_ids(), **getattr(record, _FIELDS, {})}
        said = "".join(f" {name}={value}" for name, value in named.items())
        # A path may hold anything, the end of a line too.
        return "".join(
            one if one.isprintable() else one.encode("unicode_escape").decode()
            for one in super().formatMessage(record) + said
        )


def install(form: Format, access_log: bool) -> None:
    """Sends the process's log to stderr in this form; ``access_log``: with a line for each request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("evenkeel").setLevel(logging.INFO)
    access.setLevel(logging.INFO if access_log else logging.WARNING)


def with_fields(**fields: object) -> dict[str, dict[str, object]]:
    """``log.info("...", extra=with_fields(rows=3))``: figures that a machine need not read out of a sentence."""
    return {_FIELDS: fields}


def take_request_id(offered: str | None) -> str:
    """The id that a proxy or client offers, where it is fit to be written into a log; else a new one."""
    if offered is not None and re.fullmatch(r"[A-Za-z0-9._-]{8,64}", offered):
        return offered
    return secrets.token_hex(8)


def _ids() -> dict[str, str]:
    return {name: value for name, variable in _CONTEXT.items() if (value := variable.get()) is not None}
