"""Additions to the OpenAPI schema of a request body beyond its fields' types."""

from __future__ import annotations

from typing import Any


def either(*groups: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of a body that has all fields of one group, and none of the others'.

    Null counts as left out.
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
    """Take defaults out of the schema of a patch: a field that is left out stays as it is."""
    for field in schema["properties"].values():
        field.pop("default", None)
