"""Checks and bookkeeping for every request, before routing.

The parts are the Host allow-list, identification of the sender, the rate limit, the body limit, security headers, the
request id, metrics, the log line and the audit log entry.

The body is read only after the sender is identified. Unidentified senders may send at most 64 KiB, which is enough to
exchange a key for a session. Checking a document with pydantic, such as a job, can block the event loop for a few
hundredths of a second. Long documents are therefore checked in turn, with pauses in which other requests are answered.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any, NamedTuple, NoReturn

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.core import errors, logs
from service.core.errors import Problem
from service.core.rows import AuditRow
from service.core.settings import Settings
from service.identity import audit, run_tokens
from service.identity.audit import Audit
from service.identity.auth import identify, unauthorized
from service.identity.keys import Principal
from service.identity.rate_limit import RateLimit

log = logging.getLogger("evenkeel")

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
}
STRANGER_BYTES = 2**16
DOCUMENT_BYTES = 2**20
"""Most bytes in a request's body, unless the body is a list of ids or a report of a run."""
DOCUMENT_VALUES = 5_000
"""Most values, by commas and opening brackets, in a body limited by DOCUMENT_BYTES; a wrong one takes up to 20 us."""
LIST_PATHS = ("/vectors", "/erase", "/readmit")
"""Suffixes of the paths whose bodies are lists of ids; their routes limit the number of ids."""
CHECKED_ALONE_BYTES = 2**13
"""Bodies with more bytes than this are validated in turn, never two at once."""
PAUSE_SECONDS = 0.02
"""Pause between two bodies above CHECKED_ALONE_BYTES, so that other requests are answered in between."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def install(app: FastAPI, settings: Settings) -> None:
    """Add the middleware, using ``metrics`` and ``audit`` from the app's state, and set ``rate`` there."""
    app.state.rate = RateLimit(settings.requests_per_second)
    app.add_middleware(Guard, settings=settings, metrics=app.state.metrics, audit=app.state.audit, rate=app.state.rate)


def host_name(host: str) -> str:
    """Return the name in a Host header in lower case, without port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


class Limits(NamedTuple):
    """Most bytes and most values of a request's body; ``num_values`` is None if its values are not counted."""

    num_bytes: int
    num_values: int | None


class Guard:
    """The middleware, written as plain ASGI so that streamed responses are not buffered."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Any, audit: Audit, rate: RateLimit):
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._audit = audit
        self._rate = rate
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status, started_answer = 500, False
        headers = Headers(scope=scope)
        request_id = logs.take_request_id(headers.get(logs.REQUEST_HEADER))
        named = logs.request_id.set(request_id)

        async def send_with_headers(message: Message) -> None:
            nonlocal status, started_answer
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                await self._enter(scope, message["status"], sent.get("location"))
                status, started_answer = message["status"], True
                sent[logs.REQUEST_HEADER] = request_id
                for name, value in SECURITY_HEADERS.items():
                    sent.setdefault(name, value)
            await send(message)

        try:
            refusal = self._wrong_host(headers) or await self._unknown(scope, headers)
            if refusal is None:
                limits = self._limits(scope)
                refusal = too_long(headers, limits.num_bytes)
            if refusal is not None:
                await refusal(scope, receive, send_with_headers)
            else:
                await self._app(scope, counted(receive, limits, self._turn), send_with_headers)
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            if started_answer:
                raise  # aborts the connection, so that the client does not take a partial response for a complete one
            detail = "The service failed on this request. Its log has the traceback; please report it."
            await Problem(500, "internal-error", detail).response()(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            # Clients may send any word as the method, and each distinct label value would stay in memory.
            method = scope["method"] if scope["method"] in METHODS else "other"
            seconds = time.perf_counter() - started
            self._metrics.request(method, route, status, seconds)
            _log_request(scope, method, route, status, seconds)
            logs.request_id.reset(named)

    def _wrong_host(self, headers: Headers) -> Response | None:
        if host_name(headers.get("host", "")) in self._settings.allowed_hosts:
            return None
        detail = (
            f"This service does not answer to the Host '{headers.get('host', '')}'. "
            "Add the name to EVENKEEL_ALLOWED_HOSTS (separated by commas) where the service runs."
        )
        return Problem(421, "host-not-allowed", detail).response()

    async def _unknown(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the refusal for a request with wrong credentials or over the rate limit, or None.

        The sender is looked up if the request has a body or its route needs a key, and stored in ``state.identified``.
        Any other request is answered without a query to the database.
        """
        path, has_body = scope["path"], headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if path.startswith("/internal/"):
            return self._no_run(headers) if has_body else None
        takes_key = path in ("/", "/metrics") or path.startswith(("/v1/", "/dashboard/"))
        if path == "/session" or not (has_body or takes_key):
            return None
        request = Request(scope)
        try:
            principal = request.state.identified = await identify(request)
        except Exception as error:
            return await errors.answer(request, error)
        problem = None if principal is None else too_often(self._rate, principal, self._settings)
        return None if problem is None else problem.response()

    def _no_run(self, headers: Headers) -> Response | None:
        token = headers.get("authorization", "").partition(" ")[2].strip()
        if run_tokens.read(self._settings.home, token) is None:
            return unauthorized("This route needs the token of a run; the token sent is unknown or expired.").response()
        return None

    def _limits(self, scope: Scope) -> Limits:
        path, most = scope["path"], self._settings.max_body_bytes
        if path.startswith("/internal/"):
            return Limits(most, None)
        if scope.get("state", {}).get("identified") is None:
            return Limits(min(most, STRANGER_BYTES), DOCUMENT_VALUES)
        if path.endswith(LIST_PATHS):
            return Limits(most, None)
        return Limits(min(most, DOCUMENT_BYTES), DOCUMENT_VALUES)

    async def _enter(self, scope: Scope, status: int, location: str | None) -> None:
        state = scope.get("state", {})
        principal = state.get("audited")
        if principal is not None and not state.get("entered"):
            await self._audit.record(entry_of(scope, principal, status, location))


def entry_of(scope: Scope, principal: Principal, status: int, location: str | None) -> AuditRow:
    """Return the audit log entry for a request."""
    tenant = scope.get("state", {}).get("about", principal.tenant)
    action = f"{scope['method']} {getattr(scope.get('route'), 'path', scope['path'])}"
    address = (scope.get("client") or ("",))[0]
    return audit.entry(principal, tenant, action, location or scope["path"], status, address)


def too_often(rate: RateLimit, principal: Principal, settings: Settings) -> Problem | None:
    """Count a request against the key's rate limit and return a 429 if it is exceeded, or None."""
    wait = rate.wait_seconds(principal.key_id)
    if not wait:
        return None
    detail = f"The key sends more than {settings.requests_per_second:g} requests a second. Send fewer."
    return Problem(429, "too-many-requests", detail, headers={"Retry-After": str(math.ceil(wait))})


def too_long(headers: Headers, limit: int) -> Response | None:
    length = headers.get("content-length", "0")
    return too_large(limit).response() if length.isascii() and length.isdigit() and int(length) > limit else None


def _log_request(scope: Scope, method: str, route: str, status: int, seconds: float) -> None:
    """Write the request's log line: the action, the object and the key, but never the content sent."""
    if not logs.access.isEnabledFor(logging.INFO):
        return
    principal = scope.get("state", {}).get("principal")
    fields = {
        "method": method,
        "route": route,
        "status": status,
        "seconds": round(seconds, 6),
        "peer": (scope.get("client") or ("",))[0],
        **({"key_id": principal.key_id} if principal is not None else {}),
        **scope.get("path_params", {}),
    }
    logs.access.info("%s %s %d", method, route, status, extra=logs.with_fields(**fields))


def too_large(limit: int) -> Problem:
    advice = " without an API key" if limit == STRANGER_BYTES else ""
    return Problem(413, "content-too-large", f"A request body may have at most {limit} bytes here{advice}.")


def counted(receive: Receive, limits: Limits, turn: asyncio.Lock) -> Receive:
    """Wrap ``receive`` to check a body's limits while it arrives: a chunked body does not announce its length.

    Args:
        receive: The ASGI ``receive`` function of the server.
        limits: The limits of the body.
        turn: Lock that makes requests with a long body pass it on one at a time.
    """
    num_bytes = num_values = 0

    async def count() -> Message:
        nonlocal num_bytes, num_values
        message = await receive()
        if message["type"] == "http.request":
            body = message.get("body", b"")
            num_bytes += len(body)
            if num_bytes > limits.num_bytes:
                _refuse(too_large(limits.num_bytes))
            if limits.num_values is not None:
                num_values += sum(body.count(mark) for mark in (b",", b"[", b"{"))
                if num_values > limits.num_values:
                    detail = f"A request body may have at most {limits.num_values} values here. Send fewer."
                    _refuse(Problem(413, "content-too-large", detail))
                if num_bytes > CHECKED_ALONE_BYTES and not message.get("more_body", False):
                    others_wait = turn.locked()
                    async with turn:
                        await asyncio.sleep(PAUSE_SECONDS if others_wait else 0)
        return message

    return count


def _refuse(problem: Problem) -> NoReturn:
    """Raise a problem as HTTPException: FastAPI answers 400 for any other exception raised while it reads a body."""
    raise HTTPException(problem.status, problem.detail)
