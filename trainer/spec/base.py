"""Building blocks of specs: an immutable base class, and the types of names and numbers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, model_validator

from trainer.spec.problems import FieldProblem, raise_if_invalid

NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Column = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class May(Enum):
    """Marks in the metadata of a field's type: which changes of its value later jobs or attempts may make."""

    DIFFER_ON_RESUME = "it may differ between attempts of one run"
    DIFFER_ON_WARM_START = "it may differ from the parent job's: no weight depends on it"
    GROW_ON_WARM_START = "sizes of layers, which may be larger than the parent job's"
    DEEPEN_ON_WARM_START = "sizes of layers with ReLU, after which more layers may be added"
    CHANGE_TRAINING = "training depends on it, though it belongs to another part of the spec"


STORED = "stored"
"""Key of pydantic's validation context; its value is True for a spec that only describes finished training. Removed
settings are then dropped, not refused."""


class Removed(NamedTuple):
    """A removed field: reason, remedy, and its old default, which is accepted because it has no effect."""

    reason: str
    remedy: str
    default: Any = None


class Spec(BaseModel):
    """Base of every part of a spec: immutable, and a misspelt field is an error.

    ``old_names``: current names of fields by their old names, which are still read, with a warning. A part that is
    written again has the current names. ``removed``: fields whose use is an error that gives the remedy, for one
    release.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    old_names: ClassVar[dict[str, str]] = {}
    removed: ClassVar[dict[str, Removed]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, document: Any, info: ValidationInfo) -> Any:
        old = cls.removed.keys() & document.keys() if isinstance(document, dict) else set()
        if not old:
            return document
        if not (info.context or {}).get(STORED):
            raise_if_invalid(
                FieldProblem(name, f"was removed: {cls.removed[name].reason}", cls.removed[name].remedy)
                for name in sorted(old)
                if document[name] != cls.removed[name].default
            )
        return {name: value for name, value in document.items() if name not in old}

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, document: Any) -> Any:
        given = cls.old_names.keys() & document.keys() if isinstance(document, dict) else ()
        if not given:
            return document
        document = dict(document)
        for old in sorted(given):
            new = cls.old_names[old]
            if new in document:
                raise ValueError(f"{old} is the old name of {new}, which is given too: leave {old} out")
            warnings.warn(f"{old} is now {new}: the next release removes the old name", FutureWarning, stacklevel=2)
            document[new] = document.pop(old)
        return document

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the values of ``update``, which are not validated.

        Raises:
            KeyError: There is no such field.
        """
        for name in update or {}:
            type(self).model_fields[name]
        return super().model_copy(update=update, deep=deep)

    @classmethod
    def fields_that(cls, may: May) -> set[str]:
        """Return the names of the fields that have the mark ``may``."""
        return {name for name, field in cls.model_fields.items() if may in field.metadata}


def later(default: Any, **constraints: Any) -> Any:
    """Return a pydantic field for a setting that was added when specs without it had already been hashed and stored.

    A dump leaves the field out if it has its default. So a spec that does not set it keeps its hash, and equals specs
    written before the field was added.
    """
    return Field(default=default, exclude_if=lambda value: value == default, **constraints)
