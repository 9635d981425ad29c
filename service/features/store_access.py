"""Helpers of the feature store's routes: calls off the event loop, and the store's errors as problem+json."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from embeddings.store import Collection, Store, files, queries
from embeddings.store.files import RowsGone
from embeddings.vectors.item_vectors import ItemIdError
from service.core import tenants
from service.core.errors import Problem

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_DECIMAL = re.compile(r"0|-?[1-9][0-9]{0,18}")

# The first matching entry applies, so a class comes before its base class.
_ANSWERS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (RowsGone, 500, "store-corrupt", "restore the store's server from a backup, or publish again"),
    (files.UnknownCollection, 404, "collection-not-found", "'evenkeel collections' (GET /v1/collections) lists them"),
    (
        files.UnknownVersion,
        404,
        "version-not-found",
        "'evenkeel versions NAME' (GET /v1/collections/NAME/versions) lists them",
    ),
    (files.UnknownView, 404, "view-not-found", "GET /v1/views lists them"),
    (files.NoUsers, 409, "no-users", "publish users by publish.users of the job, or name a version that has them"),
    (
        queries.NoTower,
        409,
        "no-query-tower",
        "publish users by publish.users of a job of two_tower, sasrec, gru4rec or hstu, or ask for ids of users",
    ),
    (
        queries.RuntimeMissing,
        501,
        "onnxruntime-missing",
        "install it where the service runs: pip install 'evenkeel[queries]'",
    ),
    (files.ViewExists, 409, "view-exists", "take another name"),
    (files.StaleParent, 409, "stale-version", "look at the current version, then decide again"),
    (files.GateHeld, 409, "held-by-gate", "set override_gate: true to serve it anyway"),
    (files.StoreBusy, 503, "store-busy", "try again in a moment; if the error remains, stop the writer that hangs"),
    (
        files.StoreUnavailable,
        503,
        "store-unavailable",
        "try again; check that EVENKEEL_STORE_URL can be read and written",
    ),
    (files.StoreFull, 507, "store-full", "free some space on the store's disk"),
    (files.NewerStore, 500, "store-newer", "install the version that wrote it, or restore a backup"),
    (files.CorruptStore, 500, "store-corrupt", "restore the version's files, or promote another version"),
    (ItemIdError, 422, "invalid-ids", "give ids of the collection's own type, all integers or all strings"),
    (ValueError, 422, "invalid-request", ""),
)


def store_of(request: Request) -> Store:
    """Return the store of the tenant that the request is about, for routes that require a key."""
    return tenants.store_of(request.app.state.store, request.state.principal.tenant)


async def in_store(call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Run ``call``, which reads files, in a thread, and turn the store's errors into the matching Problem."""
    with store_problems():
        return await run_in_threadpool(call, *args, **kwargs)


def rereading(collection: Collection, call: Callable[[], Result]) -> Result:
    """Return ``call()``; if an open reader's rows are gone, reopen the collection's readers and call again.

    Rows of an open reader are gone if the store was restored from a backup.
    """
    try:
        return call()
    except RowsGone:
        collection.open_anew()
        return call()


@contextlib.contextmanager
def store_problems() -> Iterator[None]:
    """Turn errors that the store raises within the block into the matching Problem."""
    try:
        yield
    except ValueError as error:
        raise problem_of(error) from error


def problem_of(error: ValueError) -> Problem:
    status, code, remedy = next(
        (status, code, remedy) for kind, status, code, remedy in _ANSWERS if isinstance(error, kind)
    )
    message = str(error)
    errors = [{"field": "", "message": message, "remedy": remedy}] if remedy else []
    return Problem(status, code, message, errors, {"Retry-After": "5"} if status == 503 else {})


def ids_as(id_type: str, ids: list[Any]) -> list[Any]:
    """Convert ``ids`` (all integers or all strings, as in JSON) to the collection's id type.

    Decimal strings are accepted for int64 ids, because JavaScript loses integers beyond 2^53; integers for string ids
    become their decimals.

    Raises:
        ItemIdError: An id cannot be converted; the message names the first such id.
    """
    kinds = set(map(type, ids))
    if kinds - {int, str} or len(kinds) > 1:
        raise ItemIdError(
            f"ids hold {', '.join(sorted(kind.__name__ for kind in kinds))}: give all integers or all strings"
        )
    if id_type == "string":
        return ids if kinds != {int} else [str(identifier) for identifier in ids]
    if kinds == {str}:
        wrong = next((identifier for identifier in ids if not _DECIMAL.fullmatch(identifier)), None)
        if wrong is not None:
            raise ItemIdError(f"id {wrong!r} is not an integer, but the ids of this collection are")
        ids = [int(identifier) for identifier in ids]
    if ids and (min(ids) < -(2**63) or max(ids) >= 2**63):
        raise ItemIdError("an id does not fit into int64, the type of this collection's ids")
    return ids


def accepted(accept: str | None, offered: tuple[str, ...]) -> str:
    """Return the offered media type that an Accept header prefers.

    Without a header, or with ``*/*``, this is the first of ``offered``.

    Raises:
        Problem: 406 if none of them is acceptable.
    """
    if not accept or not accept.strip():
        return offered[0]
    ranges: list[tuple[float, str]] = []
    for part in accept.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
        try:
            ranges.append((float(quality), name))
        except ValueError:
            continue
    for weight, name in sorted(ranges, key=lambda weighted: -weighted[0]):
        if weight <= 0:
            continue
        for media_type in offered:
            if name in (media_type, "*/*", media_type.partition("/")[0] + "/*"):
                return media_type
    raise Problem(406, "not-acceptable", f"This is served as {' or '.join(offered)}: set Accept to one of these.")


def unchanged(request: Request, etag: str) -> bool:
    """Return True if If-None-Match matches (weak comparison, RFC 9110 section 13.1.2)."""
    header = request.headers.get("if-none-match")
    if header is None:
        return False
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in header.split(","))
