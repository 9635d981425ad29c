"""Problems of a spec, field by field, and the errors that carry them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class FieldProblem(NamedTuple):
    """One problem: the path of the field (empty for the whole document), the message and the remedy."""

    field: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


class InvalidFieldsError(ValueError):
    """A spec whose fields are invalid together; ``problems`` names the fields."""

    def __init__(self, problems: Iterable[FieldProblem]):
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class SpecError(InvalidFieldsError):
    """A document that is not a valid spec; ``where`` names it, such as the path of its file."""

    def __init__(self, where: str, problems: Iterable[FieldProblem]):
        self.where = where
        super().__init__(problems)

    def __str__(self) -> str:
        return f"{self.where}: {super().__str__()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.problems)


def raise_if_invalid(problems: Iterable[FieldProblem]) -> None:
    """Raise one error for all problems, if there are any.

    Raises:
        InvalidFieldsError: There is a problem; the message names every problem.
    """
    if given := tuple(problems):
        raise InvalidFieldsError(given)
