"""What a collection asks of the store that it is in."""

from __future__ import annotations

from typing import Protocol


class HasViews(Protocol):
    """A collection, as others see it."""

    def view_names(self) -> list[str]:
        """Return names of views in any anchor generation."""
        ...


class ParentStore(Protocol):
    """All collections of the store."""

    def collections(self) -> list[str]:
        """Return their names."""
        ...

    def collection(self, name: str) -> HasViews:
        """Return one of them."""
        ...
