"""What the parts of a spec are made of: an immutable base, and the types of names and numbers."""

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
    """A field that came after specs had been hashed, kept and compared: where it is at its default a dump leaves it
    out, so that what asked for the same before is the same still."""
    return Field(default=default, exclude_if=lambda value: value == default, **constraints)
