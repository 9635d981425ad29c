"""Time zones that specs name. Torch-free."""

from __future__ import annotations

from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field


def zone_of(name: str) -> ZoneInfo:
    """Return the time zone of this name.

    Raises:
        ValueError: It is not an IANA time zone, or this machine does not know it.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"'{name}' is not an IANA time zone such as Europe/Berlin or UTC") from None


def check_zone(name: str) -> str:
    """Return the name if it is an IANA time zone.

    Raises:
        ValueError: It is not.
    """
    zone_of(name)
    return name


Zone = Annotated[str, Field(max_length=64, json_schema_extra={"minLength": 1}), AfterValidator(check_zone)]
