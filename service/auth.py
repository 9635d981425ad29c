"""From a request to a :class:`~service.keys.Principal`: bearer key or session cookie, scope, and who may send a cookie.

In a route: ``principal: Annotated[Principal, Depends(require("jobs:read"))]``.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import DatabaseError, InterfaceError

from service import keys, tables
from service.database import Database
from service.errors import Problem
from service.keys import Principal

COOKIE = "evenkeel_session"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

_bearer = HTTPBearer(auto_error=False, description="An API key: `Authorization: Bearer ek_...`.")
_cookie = APIKeyCookie(name=COOKIE, auto_error=False, description="The dashboard's session, from `POST /session`.")


class Authenticator:
    """Looks credentials up, and remembers a bounded number of them, so that fetch goes on while the database is down.

    A remembered answer is taken for ``fresh_seconds`` (how late another process's revocation may be seen), and for
    ``stale_seconds`` only while the database cannot be asked.
    """

    def __init__(
        self, database: Database, fresh_seconds: float = 5.0, stale_seconds: float = 24 * 3600, size: int = 1024
    ):
        self._database = database
        self._fresh_seconds = fresh_seconds
        self._stale_seconds = stale_seconds
        self._size = size
        self._known: OrderedDict[str, tuple[Principal, float]] = OrderedDict()

    def forget(self) -> None:
        """After a revocation in this process."""
        self._known.clear()

    async def principal(self, kind: str, secret: str) -> Principal | None:
        """``kind``: ``key`` or ``session``. None: unknown, revoked or expired."""
        name = f"{kind}:{keys.digest(secret)}"
        known, checked = self._known.get(name, (None, 0.0))
        if known is not None and known.expires_at is not None and known.expires_at <= tables.now():
            known = None
        if known is not None and time.monotonic() - checked < self._fresh_seconds:
            return known
        try:
            async with self._database.read() as connection:
                found = await (keys.find if kind == "key" else keys.find_session)(connection, secret)
        except (DatabaseError, InterfaceError, ConnectionError):
            if known is not None and time.monotonic() - checked < self._stale_seconds:
                return known
            raise
        self._known.pop(name, None)
        if found is not None:
            self._known[name] = (found, time.monotonic())
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return found


def unauthorized(detail: str) -> Problem:
    remedy = (
        "Send 'Authorization: Bearer <key>'. The first key is in $EVENKEEL_HOME/admin.key on the service's machine; "
        "'evenkeel keys create' makes more, 'evenkeel keys reset-admin' replaces a lost one."
    )
    error = {"field": "Authorization", "message": detail, "remedy": remedy}
    return Problem(401, "unauthorized", f"{detail} {remedy}", [error], {"WWW-Authenticate": "Bearer"})


def same_origin(request: Request) -> bool:
    """Whether a browser says that the page behind this request is ours (host and port; a proxy may end TLS)."""
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()


async def optional_principal(
    request: Request,
    bearer: HTTPAuthorizationCredentials | None = Depends(_bearer),
    cookie: str | None = Depends(_cookie),
) -> Principal | None:
    """Who sends the request; None without credentials. Wrong ones are a 401, a cross-site cookie a 403."""
    authenticator: Authenticator = request.app.state.authenticator
    if bearer is not None:
        principal = await authenticator.principal("key", bearer.credentials)
        if principal is None:
            raise unauthorized("The key is unknown, revoked or expired.")
        return principal
    if "authorization" in request.headers:
        raise unauthorized("The Authorization header is not 'Bearer <key>'.")
    if cookie is None:
        return None
    if request.method not in SAFE_METHODS and not same_origin(request):
        detail = (
            "A request with the session cookie must come from the dashboard's own page (its Origin header says so)."
        )
        raise Problem(403, "cross-site-request", detail)
    return await authenticator.principal("session", cookie)


def require(scope: str) -> Callable[..., Awaitable[Principal]]:
    """A dependency that returns the principal, or raises 401 (none) or 403 (without ``scope``, which it names)."""
    assert scope in keys.SCOPES, scope

    async def dependency(principal: Principal | None = Depends(optional_principal)) -> Principal:
        if principal is None:
            raise unauthorized("This needs an API key.")
        if not principal.allows(scope):
            detail = (
                f"The key '{principal.name}' lacks the scope {scope} (it has {', '.join(principal.scopes) or 'none'})."
            )
            remedy = f"Use a key with {scope}: an admin makes one with 'evenkeel keys create --scope {scope}'."
            raise Problem(
                403, "missing-scope", detail, [{"field": "scope", "message": f"needs {scope}", "remedy": remedy}]
            )
        return principal

    return dependency
