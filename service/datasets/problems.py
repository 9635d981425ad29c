"""Errors in a user's data, as the API answers them."""

from __future__ import annotations

from service.core.errors import Problem, invalid
from trainer.data.errors import DataAwayError, DataError
from trainer.spec.problems import FieldProblem


def data_problem(error: DataError, field: str) -> Problem:
    """Return a 422 at ``field`` for an error in a user's data; a 503 where their storage does not answer."""
    problem = FieldProblem(field, f"{error.where}: {error.what}", error.remedy)
    if isinstance(error, DataAwayError):
        detail = f"{problem.field}: {problem.message}"
        return Problem(503, "data-unavailable", detail, [problem._asdict()], {"Retry-After": "10"})
    return invalid(problem)
