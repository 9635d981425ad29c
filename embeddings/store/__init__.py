"""The feature store: immutable versions of item vectors, one atomic switch, readers that never wait.

``open_store`` is the entry point for code that reads or publishes vectors. The package does not import torch.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.store.backend_registry import open_store as open_store
    from embeddings.store.collection.collection import Collection as Collection
    from embeddings.store.collection.directory import NAME_PATTERN as NAME_PATTERN
    from embeddings.store.collection.directory import VERSION_PATTERN as VERSION_PATTERN
    from embeddings.store.feature_store import Store as Store
    from embeddings.store.files import CorruptStore as CorruptStore
    from embeddings.store.files import GateHeld as GateHeld
    from embeddings.store.files import IdsErased as IdsErased
    from embeddings.store.files import NewerStore as NewerStore
    from embeddings.store.files import NoUsers as NoUsers
    from embeddings.store.files import StaleParent as StaleParent
    from embeddings.store.files import StoreBusy as StoreBusy
    from embeddings.store.files import StoreError as StoreError
    from embeddings.store.files import StoreFull as StoreFull
    from embeddings.store.files import StoreUnavailable as StoreUnavailable
    from embeddings.store.files import UnknownCollection as UnknownCollection
    from embeddings.store.files import UnknownVersion as UnknownVersion
    from embeddings.store.files import UnknownView as UnknownView
    from embeddings.store.files import ViewExists as ViewExists
    from embeddings.store.version import VersionReader as VersionReader
    from embeddings.store.views import default_view as default_view

__getattr__ = lazy_exports(__name__)
