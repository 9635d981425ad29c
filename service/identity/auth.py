"""Authentication of requests: from a bearer key or session cookie to a :class:`~service.identity.keys.Principal`.

In a route: ``principal: Annotated[Principal, Depends(require("jobs:read"))]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]
from fastapi import Depends, Header, Request
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import DatabaseError, InterfaceError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from service.core import tables
from service.core.database import Database
from service.core.errors import Problem
from service.core.tenants import HEADER
from service.identity import keys
from service.identity.keys import Principal
from service.identity.rate_limit import RateLimit
from trainer.spec import NAME_PATTERN

COOKIE = "evenkeel_session"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
ANSWER_SECONDS = 10.0
"""Longest wait for the database when it must look up a credential that is not cached."""
SAVED_AGAIN_SECONDS = 60.0
WRONG_PER_SECOND, WRONG_AT_ONCE = 20.0, 400.0
"""Rate and burst of an address's wrong credentials above which unknown keys are refused without a database lookup."""
log = logging.getLogger("evenkeel")

_bearer = HTTPBearer(auto_error=False, description="An API key: `Authorization: Bearer ek_...`.")
_cookie = APIKeyCookie(name=COOKIE, auto_error=False, description="The dashboard's session, from `POST /session`.")


AWAY = (DatabaseError, InterfaceError, PoolTimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)
"""Errors of an unreachable database; asyncpg's own are raised while a connection is opened."""


@dataclasses.dataclass
class _Cached:
    """A cached principal, with the times when the database confirmed it (since 1970) and was last asked (monotonic)."""

    principal: Principal
    confirmed: float
    asked: float


class Authenticator:
    """Looks up credentials and caches a bounded number, so that vectors can be fetched while the database is down.

    A cached result is valid for ``fresh_seconds``, the longest delay of a revocation in another process. While the
    database cannot be reached, it stays valid for ``stale_seconds``. For a cached key the database is tried for
    ``patience_seconds``, and not again within ``retry_seconds``. ``file`` is where :meth:`keep_informed` saves the
    keys.
    """

    def __init__(
        self,
        database: Database,
        fresh_seconds: float = 5.0,
        stale_seconds: float = 24 * 3600,
        size: int = 4096,
        *,
        patience_seconds: float = 2.0,
        retry_seconds: float = 1.0,
        file: Path | None = None,
    ):
        self._database = database
        self._fresh_seconds = fresh_seconds
        self._stale_seconds = stale_seconds
        self._size = size
        self._patience_seconds = patience_seconds
        self._retry_seconds = retry_seconds
        self._file = file
        self._saved: tuple[dict[str, Principal], float] = ({}, 0.0)
        self._away_until = 0.0
        self._informing = False
        self._forgotten = 0
        self._known: OrderedDict[str, _Cached] = OrderedDict()
        self._wrong = RateLimit(WRONG_PER_SECOND, WRONG_AT_ONCE)

    def forget(self) -> None:
        """Clear the cache after a revocation in this process."""
        self._forgotten += 1
        self._known.clear()

    async def principal(self, kind: str, secret: str, address: str = "") -> Principal | None:
        """Return the principal of a credential; None if it is unknown, revoked or expired.

        ``kind`` is ``key`` or ``session``.

        Raises:
            Problem: 429 for a credential that is not cached, from an address that has sent too many wrong credentials.
            ConnectionError: The credential is not cached and the database does not answer.
            SQLAlchemyError: The credential is not cached and the database cannot be queried.
        """
        name = f"{kind}:{keys.digest(secret)}"
        cached = self._known.get(name)
        expires_at = None if cached is None else cached.principal.expires_at
        if expires_at is not None and expires_at <= tables.now():
            cached = None
        now = time.monotonic()
        if cached is not None:
            usable = time.time() - cached.confirmed < self._stale_seconds
            if now - cached.asked < self._fresh_seconds or (usable and now < self._away_until):
                return cached.principal
            # This request asks the database; those that arrive meanwhile are answered from the cache.
            cached.asked = now
        elif self._informing and now < self._away_until:
            raise ConnectionError("the database cannot be reached, and this credential is not cached")
        network = network_of(address)
        wait = 0.0 if cached is not None else self._wrong.wait_seconds(network, count=False)
        if wait:
            detail = "Too many wrong keys have come from this address."
            raise Problem(429, "too-many-requests", detail, headers={"Retry-After": str(math.ceil(wait))})
        forgotten = self._forgotten
        try:
            async with self._in_time(self._patience_seconds if cached is not None else ANSWER_SECONDS):
                async with self._database.read() as connection:
                    principal = await (keys.find if kind == "key" else keys.find_session)(connection, secret)
        except AWAY as error:
            self._away_until = time.monotonic() + self._retry_seconds
            if cached is not None and time.time() - cached.confirmed < self._stale_seconds:
                return cached.principal
            if isinstance(error, (SQLAlchemyError, ConnectionError)):
                raise
            raise ConnectionError(f"the database cannot be reached: {error}") from error
        self._known.pop(name, None)
        if principal is None:
            self._wrong.wait_seconds(network)
        if principal is not None and forgotten == self._forgotten:
            self._remember(name, principal, time.time())
        return principal

    def recall(self) -> None:
        """Load the keys that an earlier process saved to ``file``, in case the database is down."""
        if self._file is not None:
            earlier = keys.load_known(self._file)
            now = time.time()
            # If the clock ran ahead when the file was saved, keys must not stay valid for longer now.
            confirmed = earlier.confirmed_at if earlier.confirmed_at <= now else now
            for digest, principal in earlier.principals.items():
                self._remember(f"key:{digest}", principal, confirmed)

    async def keep_informed(self) -> None:
        """Read the live keys every ``fresh_seconds``, until cancelled.

        A process that serves vectors thus knows every key before its first use, forgets revoked keys, and never makes a
        request wait for the database.
        """
        trouble = False
        self._informing = True
        while True:
            try:
                await self.inform()
            except Exception as error:  # nothing awaits this task, so it must survive any error
                # Count the database as away until the next round has finished, even if the database hangs.
                self._away_until = time.monotonic() + self._retry_seconds + ANSWER_SECONDS + 1
                if not trouble:
                    log.warning("keys cannot be read from the database, cached ones stay valid: %s", error)
                trouble = True
            else:
                if trouble:
                    log.warning("keys can be read from the database again")
                trouble = False
            await asyncio.sleep(self._retry_seconds if trouble else self._fresh_seconds)

    async def inform(self) -> None:
        """Do one round of :meth:`keep_informed`.

        Raises:
            Exception: An error of a type in AWAY, if the database cannot be reached.
        """
        forgotten = self._forgotten
        async with self._in_time(ANSWER_SECONDS), self._database.read() as connection:
            live = await keys.live(connection, self._size)
        if forgotten != self._forgotten:
            return  # the keys were read before a revocation in this process: the next round reads them again
        now = time.time()
        if len(live) < self._size:  # all usable keys were read, so a missing one was revoked
            for name in [name for name in self._known if name.startswith("key:") and name[4:] not in live]:
                del self._known[name]
        for digest, principal in live.items():
            self._remember(f"key:{digest}", principal, now)
        self._away_until = 0.0
        saved, at = self._saved
        if self._file is not None and (live != saved or now - at > SAVED_AGAIN_SECONDS):
            self._saved = live, now
            try:
                keys.save_known(self._file, live, now)
            except OSError as error:
                log.warning("%s cannot be written, so a restart needs the database: %s", self._file, error)

    def _remember(self, name: str, principal: Principal, confirmed: float) -> None:
        # Keys from the file were confirmed some time ago, so that their first request asks the database.
        asked = time.monotonic() - (time.time() - confirmed)
        self._known.pop(name, None)
        self._known[name] = _Cached(principal, confirmed, asked)
        if len(self._known) > self._size:
            self._known.popitem(last=False)

    @contextlib.asynccontextmanager
    async def _in_time(self, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise ConnectionError(f"the database did not answer within {seconds:g} s") from None


def unauthorized(detail: str) -> Problem:
    remedy = (
        "Send 'Authorization: Bearer <key>'. The first key is in $EVENKEEL_HOME/admin.key on the service's machine; "
        "'evenkeel keys create' makes more, 'evenkeel keys reset-admin' replaces a lost one."
    )
    error = {"field": "Authorization", "message": detail, "remedy": remedy}
    return Problem(401, "unauthorized", f"{detail} {remedy}", [error], {"WWW-Authenticate": "Bearer"})


def address_of(request: Request) -> str:
    """Return the address of the peer, which is the proxy's address if there is a proxy."""
    return request.client.host if request.client is not None else ""


def network_of(address: str) -> str:
    """Return the network that one sender is assumed to control: the /64 of an IPv6 address, else the address itself."""
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))


def same_origin(request: Request) -> bool:
    """Return True if the browser sent the request from one of our pages (same host and port; a proxy may end TLS)."""
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()


KEY_IS_OPTIONAL: dict[str, Any] = {"security": [{}]}
"""``openapi_extra`` of a route that also answers without credentials."""


async def optional_principal(
    request: Request,
    bearer: HTTPAuthorizationCredentials | None = Depends(_bearer),
    cookie: str | None = Depends(_cookie),
    tenant: Annotated[
        str | None, Header(alias=HEADER, pattern=NAME_PATTERN, description="The tenant that an operator acts for.")
    ] = None,
) -> Principal | None:
    """Return the sender of the request, stored in ``request.state.principal``; None without credentials.

    Raises:
        Problem: 401 for wrong credentials; 403 for a cross-site cookie, or for another tenant's name from anyone but an
            operator.
    """
    principal = request.state.identified if hasattr(request.state, "identified") else await identify(request)
    if principal is not None and tenant is not None:
        if principal.is_operator:
            principal = dataclasses.replace(principal, tenant=tenant, acting=True)
        elif tenant != principal.tenant:
            detail = f"Only an admin key of the default tenant may name another tenant in {HEADER}."
            raise Problem(403, "not-operator", detail)
    request.state.principal = principal
    return principal


async def identify(request: Request) -> Principal | None:
    """Return the sender of the request, using only its headers, before its body is read."""
    authenticator: Authenticator = request.app.state.authenticator
    authorization = request.headers.get("authorization")
    if authorization is not None:
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise unauthorized("The Authorization header is not 'Bearer <key>'.")
        principal = await authenticator.principal("key", secret.strip(), address_of(request))
        if principal is None:
            raise unauthorized("The key is unknown, revoked or expired.")
        return principal
    cookie = request.cookies.get(COOKIE)
    if cookie is None:
        return None
    if request.method not in SAFE_METHODS and not same_origin(request):
        detail = (
            "A request with the session cookie must come from the dashboard's own page (its Origin header says so)."
        )
        raise Problem(403, "cross-site-request", detail)
    return await authenticator.principal("session", cookie, address_of(request))


def require(scope: str) -> Callable[..., Awaitable[Principal]]:
    """Return a dependency that yields the principal if it has the scope.

    The dependency raises 401 without a principal and 403 without ``scope``, which the error names. A request that needs
    a scope to change something is recorded in the audit log (service.identity.audit).
    """
    assert scope in keys.SCOPES, scope

    async def dependency(request: Request, principal: Principal | None = Depends(optional_principal)) -> Principal:
        if principal is None:
            raise unauthorized("This needs an API key.")
        if not scope.endswith(":read") and request.method not in SAFE_METHODS:
            request.state.audited = principal
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


JobsReader = Annotated[Principal, Depends(require("jobs:read"))]
JobsWriter = Annotated[Principal, Depends(require("jobs:write"))]
FeaturesWriter = Annotated[Principal, Depends(require("features:write"))]
Admin = Annotated[Principal, Depends(require("admin"))]
read_features = Depends(require("features:read"))
write_features = Depends(require("features:write"))
