"""Opening of stores by URL, whose scheme selects the backend; plugins register theirs as ``evenkeel.stores``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlparse

from embeddings.outside_packages import Registry, UrlScheme, usable_forms
from embeddings.store.feature_store import Store


def open_store(url: str | Path) -> Store:
    """Return the store at a path or a URL; it need not exist yet, and servers are contacted only on first use.

    URLs are ``file:///PATH``, ``redis://HOST:PORT/DB?prefix=P`` (also ``rediss://``, ``unix://``), and
    ``s3://BUCKET/PREFIX?endpoint_override=E``; docs/guides/store.md has the options.

    Raises:
        ValueError: an unknown scheme or option, or the scheme's package cannot be imported.

    Example:
        >>> import numpy as np
        >>> from embeddings.store import open_store
        >>> from embeddings.vectors.item_vectors import ItemVectors
        >>> items = open_store(directory).collection("items")
        >>> version = items.write(ItemVectors([17, 42], np.eye(2, dtype=np.float32)))  # a candidate
        >>> items.publish(version, expected_parent=None)  # readers switch to it
        >>> items.current()
        'v000001'
        >>> version, statuses, vectors = items.lookup([42, 7])
        >>> statuses.tolist(), vectors[0].tolist()  # 1: found, 0: missing
        ([1, 0], [0.0, 1.0])
    """
    text = os.fspath(url)
    scheme = urlparse(text).scheme if "://" in text else "file"
    try:
        backend = BACKENDS[scheme]
    except KeyError:
        raise ValueError(f"store url '{text}': use a path, {usable_forms(BACKENDS)}") from None
    store = backend(text)
    store.opened_from, store.open_url = text, open_store
    return store


def _folder(text: str) -> Store:
    if "://" not in text:
        return Store(Path(text).absolute())
    parts = urlparse(text)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"store url '{text}': a file:// URL names a path of this machine: use a path, or file:///PATH")
    return Store(Path(unquote(parts.path)).absolute())


def _redis(text: str) -> Store:
    # The packages of backends are imported only where they are used.
    from embeddings.store.backends.redis import open_redis

    return open_redis(text)


def _s3(text: str) -> Store:
    from embeddings.store.backends.s3 import open_objects

    return open_objects(text)


_REDIS = UrlScheme("redis://HOST:PORT/DB", _redis)
BACKENDS: Registry[Callable[[str], Store]] = Registry(
    "evenkeel.stores",
    {
        "file": UrlScheme("file:///PATH", _folder),
        "redis": _REDIS,
        "rediss": _REDIS,
        "unix": _REDIS,
        "s3": UrlScheme("s3://BUCKET/PREFIX", _s3),
    },
)
"""Functions that return the store at a URL, by the URL's scheme; a plugin may register any such function."""
