"""The feature store: immutable versions of item vectors, one atomic switch, readers that never wait.

``open_store`` is the entry point for code that reads or publishes vectors. Without torch.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.store.backend_registry import open_store as open_store
    from embeddings.store.feature_store import NAME_PATTERN as NAME_PATTERN
    from embeddings.store.feature_store import VERSION_PATTERN as VERSION_PATTERN
    from embeddings.store.feature_store import Collection as Collection
    from embeddings.store.feature_store import CorruptStore as CorruptStore
    from embeddings.store.feature_store import GateHeld as GateHeld
    from embeddings.store.feature_store import IdsErased as IdsErased
    from embeddings.store.feature_store import NewerStore as NewerStore
    from embeddings.store.feature_store import StaleParent as StaleParent
    from embeddings.store.feature_store import Store as Store
    from embeddings.store.feature_store import StoreBusy as StoreBusy
    from embeddings.store.feature_store import StoreError as StoreError
    from embeddings.store.feature_store import StoreFull as StoreFull
    from embeddings.store.feature_store import StoreUnavailable as StoreUnavailable
    from embeddings.store.feature_store import UnknownCollection as UnknownCollection
    from embeddings.store.feature_store import UnknownVersion as UnknownVersion
    from embeddings.store.feature_store import UnknownView as UnknownView
    from embeddings.store.feature_store import VersionReader as VersionReader
    from embeddings.store.feature_store import ViewExists as ViewExists
    from embeddings.store.feature_store import default_view as default_view

__getattr__ = lazy_exports(__name__)
