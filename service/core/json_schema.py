"""Additions to the OpenAPI schema of a request's body that the types of its fields do not express."""

from __future__ import annotations

from typing import Any


def either(*groups: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of a body that has all fields in one of ``groups`` and no field of any other group.

    A field that is null counts as left out.
    """
    null = {"type": "null"}
    names = sorted(name for group in groups for name in group)
    return {
        "oneOf": [
            {"required": list(group), "properties": {name: {"not": null} if name in group else null for name in names}}
            for group in groups
        ]
    }


def without_defaults(schema: dict[str, Any]) -> None:
    """Remove the defaults from the schema of a PATCH body: a field left out of the body keeps its present value."""
    for field in schema["properties"].values():
        field.pop("default", None)
