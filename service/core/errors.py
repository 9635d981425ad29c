"""Errors as users see them: RFC 9457 ``application/problem+json``, each with the cause, its place and a remedy."""

from __future__ import annotations

import http
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from sqlalchemy.exc import DatabaseError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from trainer.spec import NAME_PATTERN
from trainer.spec.problems import FieldProblem
from trainer.spec.reading import problems_of

MEDIA_TYPE = "application/problem+json"
REMEDIES = {
    "job": "'evenkeel jobs' (GET /v1/jobs) lists them",
    "dataset": "'evenkeel datasets list' (GET /v1/datasets) lists them",
    "schedule": "'evenkeel schedules list' (GET /v1/schedules) lists them",
    "key": "'evenkeel keys list' (GET /v1/keys) lists them, by their ids",
}
VERSION = r"^v[0-9]{6,}$"
CURRENT_OR_VERSION = r"^(current|v[0-9]{6,})$"
PATTERN_MESSAGES = {
    NAME_PATTERN: "a name is 1 to 63 of a-z, 0-9, _ and -, and begins with a letter or digit",
    VERSION: "a version is v and at least six digits, such as v000001",
    CURRENT_OR_VERSION: "a version is v and at least six digits, such as v000001, or current",
}
"""Message for a value that does not match, by pattern."""
MAX_PROBLEMS = 20
MAX_FIELD_LENGTH = 200
MAX_TEXT_LENGTH = 4000
log = logging.getLogger("evenkeel")

FieldErrors = Iterable[Mapping[str, str]]


class FieldError(BaseModel):
    """One error: the path of the field in the request, a message, and a remedy."""

    field: str
    message: str
    remedy: str = ""


class ProblemBody(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldError] = []


class Problem(Exception):
    """An error that may be raised anywhere below a route and is answered as problem+json.

    ``code`` is a stable word such as ``job-not-found`` (its URN is ``type``); ``errors`` lists the invalid fields, each
    with ``field``, ``message`` and, if known, ``remedy``.
    """

    def __init__(
        self, status: int, code: str, detail: str, errors: FieldErrors = (), headers: Mapping[str, str] | None = None
    ):
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = shortened(detail)
        self.errors = [
            {name: shortened(error.get(name, "")) for name in ("field", "message", "remedy")} for error in errors
        ]
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return Problem, (self.status, self.code, self.detail, self.errors, self.headers)

    @property
    def remedy(self) -> str:
        """The remedies of all errors in one line of text, each once."""
        return "; ".join(dict.fromkeys(error["remedy"] for error in self.errors if error["remedy"]))

    def body(self) -> dict[str, Any]:
        return {
            "type": f"urn:evenkeel:{self.code}",
            "title": self.code.replace("-", " ").capitalize(),
            "status": self.status,
            "detail": self.detail,
            "errors": self.errors,
        }

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, headers=self.headers, media_type=MEDIA_TYPE)


def shortened(text: str) -> str:
    """Cut out the middle of a text that is too long to read: names chosen by users may have any length."""
    if len(text) <= MAX_TEXT_LENGTH:
        return text
    half = MAX_TEXT_LENGTH // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


def not_found(kind: str, name: str) -> Problem:
    """Return a 404 for an object named by a path."""
    detail = f"There is no {kind} '{name}'."
    remedy = REMEDIES.get(kind)
    return Problem(404, f"{kind}-not-found", detail, [{"message": detail, "remedy": remedy}] if remedy else ())


def invalid(*problems: FieldProblem, num_more: int = 0) -> Problem:
    """Return a 422 for invalid fields of a request.

    If there are many problems, the first are listed and the others counted, including ``num_more`` that are not given.
    """
    num_more += len(problems[MAX_PROBLEMS:])
    shown = [*problems[:MAX_PROBLEMS], *([FieldProblem("", f"and {num_more} more")] if num_more else ())]
    detail = "; ".join(str(problem._replace(remedy="")) for problem in shown)
    return Problem(
        422, "invalid-request", detail or "The request is not valid.", [problem._asdict() for problem in shown]
    )


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the argument ``responses`` of a route, which documents each status as problem+json."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}
    return {status: {"description": http.HTTPStatus(status).phrase, "content": content} for status in statuses}


_EXAMPLES: dict[int, tuple[str, str, dict[str, str]]] = {
    401: ("unauthorized", "The key is unknown, revoked or expired.", {"field": "Authorization"}),
    403: ("missing-scope", "The key 'reader' lacks the scope jobs:write (it has jobs:read).", {"field": "scope"}),
    404: ("not-found", "There is no job 'job_0': 'evenkeel jobs' lists them.", {}),
    406: ("not-acceptable", "This is served as application/json: set Accept to it.", {}),
    409: ("conflict", "The object is in a state that does not allow this.", {}),
    413: ("content-too-large", "A request body may have at most 8388608 bytes here.", {}),
    421: ("host-not-allowed", "This service does not answer to the Host 'elsewhere.example'.", {}),
    422: ("invalid-request", "batch_size: Input should be greater than 0", {"field": "batch_size"}),
    429: ("too-many-requests", "The key sends more than 2000 requests a second. Send fewer.", {}),
    503: ("database-unavailable", "The database cannot be used. Runs go on; see the log.", {}),
    507: ("store-full", "There is no room on the store's disk: free some.", {}),
}


def example_of(status: int) -> dict[str, Any]:
    """Return an example of a problem with that status."""
    phrase = http.HTTPStatus(status).phrase
    code, detail, field = _EXAMPLES.get(status, (phrase.lower().replace(" ", "-"), f"{phrase}.", {}))
    return Problem(status, code, detail, [{"message": detail, **field}]).body()


def also(status: int, description: str) -> dict[int | str, dict[str, Any]]:
    """Return an entry of a route's argument ``responses`` for an additional successful status."""
    return {status: {"description": description}}


def _in_request(item: dict[str, Any]) -> Iterator[FieldProblem]:
    """Convert one of pydantic's errors in a request to messages for users."""
    where = item["loc"]
    if where and where[0] in ("body", "query", "path", "header", "cookie"):
        where = where[1:]
    if item["type"] == "json_invalid":
        yield FieldProblem("", f"the body is not JSON: {item.get('ctx', {}).get('error', '')}")
        return
    for problem in problems_of([{**item, "loc": where}]):
        message = problem.message
        if item["type"] == "string_pattern_mismatch":
            message = PATTERN_MESSAGES.get(item["ctx"]["pattern"], message)
        yield problem._replace(field=problem.field[:MAX_FIELD_LENGTH], message=message)


async def answer(request: Request, error: Exception) -> Response:
    """Return the response that :func:`install` defines for an error, for code that runs before the routes.

    Errors without such a response are raised.
    """
    handlers = request.app.exception_handlers
    handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), None)
    if handler is None:
        raise error
    response: Response = await handler(request, error)
    return response


def install(app: FastAPI) -> None:
    """Answer every failed request with problem+json: our errors, validation, the router's 404 and 405, the database.

    Bugs are included: :class:`service.api.middleware.Guard` answers those, with the same headers.
    """

    @app.exception_handler(Problem)
    async def _problem(request: Request, error: Problem) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        problems = [problem for item in errors[:MAX_PROBLEMS] for problem in _in_request(item)]
        return invalid(*problems, num_more=max(len(errors) - MAX_PROBLEMS, 0)).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # FastAPI's, for a body that is not even text
            return invalid(FieldProblem("", "the body is not JSON")).response()
        phrase = http.HTTPStatus(error.status_code).phrase
        headers = dict(error.headers or {})
        if error.status_code == 405 and "route" in request.scope:
            # The router names the methods of one route only; the path may have several.
            headers["Allow"] = ", ".join(request.app.state.methods[request.scope["route"].path])
        detail = error.detail if error.detail != phrase else f"{phrase}: {request.method} {request.url.path}"
        return Problem(error.status_code, phrase.lower().replace(" ", "-"), detail, headers=headers).response()

    @app.exception_handler(DatabaseError)
    async def _damaged(request: Request, error: DatabaseError) -> Response:
        if type(error) is not DatabaseError:
            raise error  # a statement that the database refuses is a bug of ours
        log.error("database: %s", error)
        remedy = "stop the service and restore a backup of the database; runs and published vectors are intact"
        detail = f"The database is damaged: {error.orig}."
        return Problem(503, "database-damaged", detail, [{"message": str(error.orig), "remedy": remedy}]).response()

    @app.exception_handler(OperationalError)
    @app.exception_handler(PoolTimeoutError)
    @app.exception_handler(InterfaceError)
    @app.exception_handler(ConnectionError)
    async def _database(request: Request, error: Exception) -> Response:
        log.error("database: %s", error)
        # SQLite's message contains only the fault; a server's error may reveal its address to strangers.
        cause = f": {error.orig}" if isinstance(error, DatabaseError) and request.app.state.database.is_sqlite else ""
        detail = f"The database cannot be used{cause}. Runs go on; make room if a disk is full, and see the log."
        return Problem(503, "database-unavailable", detail, headers={"Retry-After": "5"}).response()
