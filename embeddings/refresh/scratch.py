"""Names of the scratch collections to which the null refreshes of a calibration are published."""

from __future__ import annotations

import re
import secrets

_NAME = re.compile(r".+-nulls-[0-9a-f]{8}")


def scratch_name(collection: str) -> str:
    """Return a new name for the nulls of a collection."""
    return f"{collection[:50]}-nulls-{secrets.token_hex(4)}"


def is_scratch(name: str) -> bool:
    """Return whether a collection has such a name: nobody is served from it, nor refreshes it."""
    return _NAME.fullmatch(name) is not None
