"""Rejection of text that no database or encoder can hold: NUL and unpaired surrogates.

JSON can contain both as escapes; a path or query can contain NUL as ``%00``. The check is a dependency of the whole
application, so that it runs before any value is validated, shown in an error or stored.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import Request

from service.core.errors import invalid
from trainer.spec.problems import FieldProblem

_ODD = re.compile("[\x00\ud800-\udfff]")
_ESCAPED = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
FIELD_LENGTH = 200

Location = tuple["Location | None", str]
"""Position in a document: the position of the enclosing object or list, and the name or index within it."""


async def refuse_odd_text(request: Request) -> None:
    """Reject a request that contains NUL or an unpaired surrogate; a body without such escapes (most) is not parsed.

    Raises:
        Problem: 422 that names the field of the text.
    """
    for name, value in (*request.path_params.items(), *request.query_params.items()):
        if _is_odd(str(value)) or _is_odd(name):
            raise _refusal(name)
    if request.url.path.startswith("/internal/"):
        return  # a run's reports are stored unchanged; if refused, the run would send them again and again
    body = await request.body()
    if _ESCAPED.search(body):
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return  # invalid JSON: the code that reads the body reports it
        location = _find_odd_text(document)
        if location is not None:
            raise _refusal(_path(location))


def storable(text: str) -> str:
    """Replace each NUL and unpaired surrogate in ``text`` by a mark, so that a run's text can be stored and shown."""
    return _ODD.sub("\ufffd", text)


def _refusal(where: str) -> Exception:
    field = where[:FIELD_LENGTH].encode("ascii", "backslashreplace").decode().replace("\x00", "\\x00")
    message = "holds a character that cannot be stored: NUL, or half of a surrogate pair"
    return invalid(FieldProblem(field, message, "leave it out"))


def _is_odd(text: str) -> bool:
    return _ODD.search(text) is not None


def _find_odd_text(document: Any) -> Location | None:
    """Return the position of the first text with NUL or an unpaired surrogate; None without such a text.

    Anyone may send this document, so there is no recursion, and no path is built before it is needed.
    """
    todo: list[tuple[Any, Location | None]] = [(document, None)]
    while todo:
        value, location = todo.pop()
        if isinstance(value, str):
            if _is_odd(value):
                return location or (None, "")
        elif isinstance(value, dict):
            for name, inner in value.items():
                if _is_odd(name):
                    return location, name
                todo.append((inner, (location, name)))
        elif isinstance(value, list):
            todo.extend((inner, (location, str(number))) for number, inner in enumerate(value))
    return None


def _path(location: Location | None) -> str:
    names: list[str] = []
    while location is not None:
        location, name = location
        names.append(name)
    return ".".join(reversed(names))
