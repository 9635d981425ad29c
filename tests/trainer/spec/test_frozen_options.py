"""Options are frozen: who adds one adds it to options.txt, and says in the commit what it replaces."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from service.core.environment import VARIABLES
from trainer.spec import DatasetSpec, JobSpec

OPTIONS = Path(__file__).with_name("options.txt")


def specs_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the specs that a field's type names, in any nesting."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from specs_in(part)


def fields(spec: type[BaseModel], above: tuple[type[BaseModel], ...] = ()) -> Iterator[str]:
    for name, field in spec.model_fields.items():
        yield f"{spec.__name__}.{name}"
        for part in specs_in(field.annotation):
            if part not in above:
                yield from fields(part, (*above, part))


def test_the_list_of_options_is_that_of_the_specs() -> None:
    found = {*fields(JobSpec), *fields(DatasetSpec)}
    found |= {f"EVENKEEL_{one.name}" for variables in VARIABLES.values() for one in variables}
    text = "".join(f"{one}\n" for one in sorted(found))
    if os.environ.get("EVENKEEL_WRITE_EXAMPLES") == "1":
        OPTIONS.write_text(text, "utf-8")
    kept = set(OPTIONS.read_text("utf-8").split())
    added, gone = sorted(found - kept), sorted(kept - found)
    assert not added, f"{added}: say in the commit which option each replaces, and enter it in {OPTIONS.name}"
    assert not gone, f"{gone}: take them out of {OPTIONS.name}"
