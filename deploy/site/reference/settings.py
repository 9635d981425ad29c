"""The environment variables of the service and the commands."""

from __future__ import annotations

import dataclasses

from deploy.site.reference.text import bullets, page, paragraph
from service import DEFAULT_PORT
from service.core.environment import VARIABLES, Variable
from service.core.settings import RetentionDays, Settings


def settings_page() -> str:
    """Return the page of all variables with their defaults."""
    intro = (
        "Environment variables of `evenkeel serve` and the other commands. An unset or empty variable has its "
        "default; an invalid value is refused when a command starts. OpenTelemetry and OpenLineage have variables of "
        "their own: "
        "[operations](../guides/operations.md#opentelemetry)."
    )
    parts = [paragraph(intro)]
    for subject, variables in VARIABLES.items():
        lines = [f"`EVENKEEL_{one.name}`: {one.meaning}; default: {_default(one)}" for one in variables]
        parts += [f"## {subject}", bullets(lines)]
    return page("Settings", "`service/core/environment.py`", *parts)


def _default(variable: Variable) -> str:
    if variable.default is not None:
        return variable.default.format(port=DEFAULT_PORT)
    name = variable.name.lower()
    found = {field.name: field.default for field in dataclasses.fields(Settings)}
    found |= {f"keep_{field.name}_days": field.default for field in dataclasses.fields(RetentionDays)}
    return f"{found[name]:,g}" if found[name] < 2**20 else f"{found[name] / 2**30:g} GiB"  # type: ignore[operator, str-bytes-safe]
