"""What holds for every request, before routing: Host allow-list, body limit, security headers, counting."""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Problem
from service.settings import Settings

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
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def install(app: FastAPI, settings: Settings) -> None:
    app.add_middleware(Guard, settings=settings, metrics=app.state.metrics)


def host_name(host: str) -> str:
    """The name in a Host header, lower case, without port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


class Guard:
    """Plain ASGI, so that streams pass through unbuffered."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Any):
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status, started_answer = 500, False

        async def send_with_headers(message: Message) -> None:
            nonlocal status, started_answer
            if message["type"] == "http.response.start":
                status, started_answer = message["status"], True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            limit = self._limit(scope["path"], headers)
            refusal = self._refusal(headers, limit)
            if refusal is not None:
                await refusal.response()(scope, receive, send_with_headers)
            else:
                await self._app(scope, counted(receive, limit), send_with_headers)
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            if started_answer:
                raise  # the connection is broken off: the reader must not take what came for the whole
            detail = "The service failed on this request. Its log has the traceback; please report it."
            await Problem(500, "internal-error", detail).response()(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            # Anyone may send any word as a method: as a label each would stay in memory.
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.request(method, route, status, time.perf_counter() - started)

    def _limit(self, path: str, headers: Headers) -> int:
        """How long a body may be. Who sends no credentials has nothing to say that is long, and is not listened to."""
        stranger = path == "/session" or not ("authorization" in headers or "cookie" in headers)
        return min(self._settings.max_body_bytes, STRANGER_BYTES) if stranger else self._settings.max_body_bytes

    def _refusal(self, headers: Headers, limit: int) -> Problem | None:
        if host_name(headers.get("host", "")) not in self._settings.allowed_hosts:
            detail = (
                f"This service does not answer to the Host '{headers.get('host', '')}'. "
                "Add the name to EVENKEEL_ALLOWED_HOSTS (separated by commas) where the service runs."
            )
            return Problem(421, "host-not-allowed", detail)
        length = headers.get("content-length", "0")
        return too_large(limit) if length.isdigit() and int(length) > limit else None


def too_large(limit: int) -> Problem:
    advice = " without an API key" if limit == STRANGER_BYTES else ""
    return Problem(413, "content-too-large", f"A request body may have {limit} bytes here{advice}.")


def counted(receive: Receive, limit: int) -> Receive:
    """A chunked body tells no length before: count what arrives."""
    total = 0

    async def count() -> Message:
        nonlocal total
        message = await receive()
        if message["type"] == "http.request":
            total += len(message.get("body", b""))
            if total > limit:
                # FastAPI turns any other exception of the body's reading into a 400.
                problem = too_large(limit)
                raise HTTPException(problem.status, problem.detail)
        return message

    return count
