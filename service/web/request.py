"""A request to a page of the dashboard: its sender and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import QueryParams

from embeddings.store import Collection, Store, UnknownCollection
from service.core import tenants
from service.core.pagination import PageRequest
from service.identity.keys import Principal


@dataclass(frozen=True)
class DashboardRequest:
    """One request for a page; ``path`` has the values of the parameters in braces in the page's address."""

    app: FastAPI
    principal: Principal
    path: Mapping[str, str]
    query: QueryParams

    @property
    def state(self) -> Any:
        return self.app.state

    @property
    def store(self) -> Store:
        """The feature store of the key's tenant."""
        return tenants.store_of(self.app.state.store, self.principal.tenant)

    def allows(self, scope: str) -> bool:
        return self.principal.allows(scope)

    def asked(self, name: str) -> str | None:
        """Return a query parameter without surrounding spaces; None if it is empty or left out."""
        return (self.query.get(name) or "").strip() or None

    def paging(self, limit: int) -> PageRequest:
        """Return the request for a page of a list, with ``limit`` items and the query's cursor."""
        return PageRequest(limit, self.asked("cursor"))

    def collection(self) -> Collection:
        """Return the collection that the address names.

        Raises:
            UnknownCollection: No collection has that name.
        """
        collection = self.store.collection(self.path["collection"])
        if not collection.exists():
            raise UnknownCollection(f"there is no collection '{collection.name}'")
        return collection
