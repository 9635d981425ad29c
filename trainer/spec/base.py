"""Building blocks of specs: an immutable base class, and the types of names and numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Column = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Spec(BaseModel):
    """Base of every part of a spec: immutable, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def later(default: Any, **constraints: Any) -> Any:
    """Return a field that was added after specs had been hashed, kept and compared.

    A dump leaves the field out where it has its default, so that a spec that does not set it keeps its hash and still
    equals the specs written before the field was added.
    """
    return Field(default=default, exclude_if=lambda value: value == default, **constraints)
