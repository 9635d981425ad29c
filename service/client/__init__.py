"""Python client of the service.

Other packages import ``Client``, ``AsyncClient`` and their errors from here.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from service.client.async_client import AsyncClient as AsyncClient
    from service.client.client import Client as Client
    from service.client.http import ProblemError as ProblemError
    from service.client.http import ServiceError as ServiceError
    from service.client.http import Unreachable as Unreachable
    from service.client.http import default_key as default_key
    from service.client.http import home as home

__getattr__ = lazy_exports(__name__)
