"""The feature store: immutable versions of item vectors, one atomic switch, readers that never wait.

``open_store`` is the entry point for code that reads or publishes vectors. Without torch.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.store.backend_registry import open_store
    from embeddings.store.feature_store import (
        NAME_PATTERN,
        VERSION_PATTERN,
        Collection,
        CorruptStore,
        GateHeld,
        IdsErased,
        NewerStore,
        StaleParent,
        Store,
        StoreBusy,
        StoreError,
        StoreFull,
        StoreUnavailable,
        UnknownCollection,
        UnknownVersion,
        UnknownView,
        VersionReader,
        ViewExists,
        default_view,
    )

__all__ = [
    "NAME_PATTERN",
    "VERSION_PATTERN",
    "Collection",
    "CorruptStore",
    "GateHeld",
    "IdsErased",
    "NewerStore",
    "StaleParent",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "UnknownCollection",
    "UnknownVersion",
    "UnknownView",
    "VersionReader",
    "ViewExists",
    "default_view",
    "open_store",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "embeddings.store.backend_registry": ["open_store"],
        "embeddings.store.feature_store": [name for name in __all__ if name != "open_store"],
    },
)
