"""Tenants: groups of keys that see nothing of each other. See docs/adr/0028-tenants.md.

Every key belongs to one; what it makes belongs to its tenant. The tenant comes into being with its first key. An admin
key of the default tenant is the operator's: it sees jobs, keys and the audit log of all, and acts for the tenant that
the header ``Evenkeel-Tenant`` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embeddings.store.backends.url import namespaced

if TYPE_CHECKING:
    from embeddings.store import Store

DEFAULT_TENANT = "default"
HEADER = "Evenkeel-Tenant"


def url_of(store_url: str, tenant: str) -> str:
    """Where the tenant's own store is, within the service's. The default tenant's is the service's itself."""
    return store_url if tenant == DEFAULT_TENANT else namespaced(store_url, tenant)


def qualified(tenant: str, name: str) -> str:
    """How a tenant's object is called where those of all are listed: metrics, what is damaged."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}/{name}"


def store_of(store: Store, tenant: str) -> Store:
    """The store at :func:`url_of`."""
    return store if tenant == DEFAULT_TENANT else store.namespace(tenant)
