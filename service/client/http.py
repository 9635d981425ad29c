"""HTTP part of the client: address, key, pages, and error responses as exceptions with a remedy."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from .. import DEFAULT_PORT

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"

IDEMPOTENCY_KEY = "Idempotency-Key"
RESEND_SECONDS = (0.5, 1.0, 2.0)
"""Pauses before a request with an Idempotency-Key is repeated because its response was lost."""

Json = dict[str, Any]


def once(key: str | None = None) -> dict[str, str]:
    """Return the header Idempotency-Key, with which a repeated request takes effect once; None creates a new key."""
    return {IDEMPOTENCY_KEY: key or str(uuid.uuid4())}


class ServiceError(Exception):
    """Error for a service that could not be reached or refused the request, with the cause and the remedy."""

    def __init__(self, message: str, remedy: str = ""):
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.remedy)


class Unreachable(ServiceError):
    """Error for a service address that does not respond."""


class Lost(Unreachable):
    """Error for a connection that broke once established: the service may or may not have acted on the request."""


class ProblemError(ServiceError):
    """Error response of the service, with the fields of RFC 9457: ``status``, ``title``, ``detail`` and ``errors``.

    ``errors`` is a list of ``{field, message, remedy}``; ``kind`` is the last part of ``type``.
    """

    def __init__(
        self, status: int, title: str, detail: str = "", errors: Iterable[Mapping[str, Any]] = (), kind: str = ""
    ):
        self.status = status
        self.kind = kind
        self.title = title
        self.detail = detail
        self.errors = [dict(error) for error in errors]
        remedies = list(dict.fromkeys(str(error["remedy"]) for error in self.errors if error.get("remedy")))
        text = detail
        for remedy in remedies:  # remedies are printed on a separate line
            text = text.replace(remedy, "").strip()
        lines = [text or title or f"HTTP {status}"]
        for error in self.errors:
            field, message = error.get("field"), error.get("message", "")
            line = f"{field}: {message}" if field else str(message)
            if line and line not in lines and str(message) not in lines:
                lines.append(line)
        super().__init__("\n".join(lines), "; ".join(remedies))

    def __reduce__(self) -> tuple[Any, ...]:
        return ProblemError, (self.status, self.title, self.detail, self.errors, self.kind)


def home() -> Path:
    """Return ``$EVENKEEL_HOME`` (default ``.evenkeel``)."""
    return Path(os.environ.get("EVENKEEL_HOME") or ".evenkeel")


def default_key() -> str | None:
    """Return ``EVENKEEL_API_KEY``, else the service's admin key in ``$EVENKEEL_HOME/admin.key``, else None."""
    key = os.environ.get("EVENKEEL_API_KEY")
    if key:
        return key.strip()
    try:
        return (home() / "admin.key").read_text("utf-8").strip() or None
    except OSError:
        return None


class Session:
    """An address, a key and a connection pool; :class:`service.client.Client` adds the named calls."""

    def __init__(self, url: str | None = None, api_key: str | None = None, *, timeout_seconds: float = 60.0):
        self.url = (url or os.environ.get("EVENKEEL_URL") or DEFAULT_URL).rstrip("/")
        key = api_key or default_key()
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ServiceError(
                "the API key holds characters that are not allowed in keys", "set EVENKEEL_API_KEY to the key alone"
            )
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            _ = urlsplit(self.url).port  # raises ValueError for an invalid port, which httpx accepts
            self._http = self._connection(base_url=self.url, headers=headers, timeout=timeout_seconds)
        except (httpx.InvalidURL, ValueError) as error:
            raise Unreachable(f"'{self.url}' is not a usable address: {error}", "set EVENKEEL_URL") from None

    @property
    def is_local(self) -> bool:
        """True if the service's address is a loopback address, which is on this machine."""
        return self._http.base_url.host in ("127.0.0.1", "localhost", "::1")

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def items(
        self, path: str, limit: int | None = None, headers: Mapping[str, str] | None = None, /, **filters: str | None
    ) -> Iterator[Json]:
        """Yield the items of a list at ``path``, requested page by page; at most ``limit`` items, all if None."""
        params: dict[str, Any] = {name: value for name, value in filters.items() if value is not None}
        left = limit
        while left is None or left > 0:
            size = {} if left is None else {"limit": min(left, 100)}
            page = self.json("GET", path, params=params | size, headers=headers)
            items = page["items"] if left is None else page["items"][:left]
            yield from items
            left = None if left is None else left - len(items)
            if not page.get("next_cursor"):
                return
            params["cursor"] = page["next_cursor"]

    def json(self, method: str, path: str, **options: Any) -> Any:
        """Return the decoded body of a response; ``{}`` if it has none."""
        answer = self.request(method, path, **options)
        try:
            return answer.json() if answer.content else {}
        except ValueError:
            raise ServiceError(
                f"{self.url} answered with something that is not JSON", "check that EVENKEEL_URL is an Evenkeel service"
            ) from None

    def request(
        self, method: str, path: str, *, prefix: str = "/v1", stream: bool = False, **options: Any
    ) -> httpx.Response:
        """Send a request and return the response.

        With ``stream`` the response's body is not read yet, and the caller must close the response.

        A request with an Idempotency-Key whose response was lost on its way is sent again (RESEND_SECONDS).

        Raises:
            ProblemError: The service answered with an error.
            Unreachable: There was no response.
        """
        pauses = RESEND_SECONDS if IDEMPOTENCY_KEY in (options.get("headers") or {}) else ()
        sent = False
        for pause in (*pauses, None):
            try:
                return self._request(method, path, prefix, stream, options)
            except ProblemError as error:
                # The service is still processing the first request, whose response was lost.
                if not (sent and error.status == 409 and error.kind == "request-in-flight") or pause is None:
                    raise
            except Lost as error:
                sent = True
                if pause is None:
                    raise Unreachable(error.message, error.remedy) from None
            except Unreachable:
                if not sent or pause is None:
                    raise
            self._pause(pause)
        raise AssertionError("the last attempt returns or raises")

    # --- waiting: overridden by the asynchronous client ---------------------------------------------------------------

    _connection: Callable[..., Any] = httpx.Client

    def _send(self, request: httpx.Request, stream: bool) -> httpx.Response:
        answer: httpx.Response = self._http.send(request, stream=stream)
        return answer

    def _read(self, answer: httpx.Response) -> None:
        answer.read()

    def _lines(self, answer: httpx.Response) -> Iterator[str]:
        return answer.iter_lines()

    def _bytes(self, answer: httpx.Response) -> Iterator[bytes]:
        return answer.iter_bytes()

    def _end(self, answer: httpx.Response) -> None:
        answer.close()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _request(self, method: str, path: str, prefix: str, stream: bool, options: dict[str, Any]) -> httpx.Response:
        try:
            request = self._http.build_request(method, prefix + path, **options)
            answer = self._send(request, stream)
            if answer.is_error and stream:
                self._read(answer)
        except (UnicodeEncodeError, httpx.LocalProtocolError) as error:
            raise ServiceError(
                f"the request cannot be written: {error}",
                "use only ASCII letters, digits and signs in idempotency keys, tenant names and event ids",
            ) from None
        except httpx.ConnectError:
            raise Unreachable(
                f"no service answers at {self.url}", "start one with `evenkeel serve`, or set EVENKEEL_URL"
            ) from None
        except httpx.TimeoutException:
            raise Unreachable(
                f"{self.url} did not answer in time", "look at the service's log, then try again"
            ) from None
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            raise Lost(f"{self.url}: {error or type(error).__name__}", "check EVENKEEL_URL") from None
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url}: {error or type(error).__name__}", "check EVENKEEL_URL") from None
        if answer.is_success or answer.status_code == 304:
            return answer
        raise _problem(answer)


def part(text: str) -> str:
    """Quote one path segment: a name with a slash in it must not become another route."""
    return quote(str(text), safe="")


def plain(document: Any) -> Any:
    """Return a pydantic model or a mapping as JSON values: dictionaries, lists, strings, numbers."""
    return document.model_dump(mode="json", exclude_unset=True) if hasattr(document, "model_dump") else document


def _problem(answer: httpx.Response) -> ProblemError:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return ProblemError(
            answer.status_code, answer.reason_phrase, f"HTTP {answer.status_code} {answer.reason_phrase}"
        )
    errors = body.get("errors")
    return ProblemError(
        answer.status_code,
        str(body.get("title") or answer.reason_phrase),
        str(body.get("detail") or ""),
        [error for error in errors if isinstance(error, dict)] if isinstance(errors, list) else (),
        str(body.get("type") or "").rpartition(":")[2],
    )
