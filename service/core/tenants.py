"""Tenants: groups of keys that are isolated from each other. See docs/adr/0028-tenants.md.

Every key, and everything created with the key, belongs to one tenant. A tenant is created with its first key. An
admin key of the default tenant is the operator's: it sees the jobs, keys and audit log of all tenants, and acts for the
tenant named by the header ``Evenkeel-Tenant``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embeddings.store.url import namespaced

if TYPE_CHECKING:
    from embeddings.store import Store

DEFAULT_TENANT = "default"
HEADER = "Evenkeel-Tenant"


def url_of(store_url: str, tenant: str) -> str:
    """Return the URL of the tenant's store, within the service's; for the default tenant it is the service's own."""
    return store_url if tenant == DEFAULT_TENANT else namespaced(store_url, tenant)


def qualified(tenant: str, name: str) -> str:
    """Return the name of a tenant's object for lists that cover all tenants, such as metrics and reports of damage."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}/{name}"


def store_of(store: Store, tenant: str) -> Store:
    """Return the store at :func:`url_of`."""
    return store if tenant == DEFAULT_TENANT else store.namespace(tenant)
