"""Python client of the service.

Other packages import ``Client``, ``AsyncClient`` and their errors from here. The distribution ``evenkeel-client`` has
these files as ``evenkeel.client`` (deploy/client), so they import each other by relative names and nothing else of this
repository.
"""

from .async_client import AsyncClient
from .client import Client
from .http import ProblemError, ServiceError, Unreachable, default_key, home

__all__ = ["AsyncClient", "Client", "ProblemError", "ServiceError", "Unreachable", "default_key", "home"]
