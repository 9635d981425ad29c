"""Python client of the service.

Other packages import ``Client``, ``AsyncClient`` and their errors from here.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from service.client.async_client import AsyncClient
    from service.client.client import Client
    from service.client.http import ProblemError, ServiceError, Unreachable, default_key, home

__all__ = ["AsyncClient", "Client", "ProblemError", "ServiceError", "Unreachable", "default_key", "home"]

__getattr__ = lazy_exports(
    __name__,
    {
        "service.client.async_client": ["AsyncClient"],
        "service.client.client": ["Client"],
        "service.client.http": ["ProblemError", "ServiceError", "Unreachable", "default_key", "home"],
    },
)
