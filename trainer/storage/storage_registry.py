"""Run storages by the scheme of their URI. Other packages add theirs by the entry point ``evenkeel.run_storages``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from embeddings.object_storage import STORES, ObjectStorage
from embeddings.outside_packages import Registry, UrlScheme, usable_forms
from trainer.storage.base import RunStorage


def open_storage(uri: str) -> RunStorage:
    """Return the storage at a URI, such as ``s3://BUCKET/PREFIX`` or ``file:///DIRECTORY``, without a request to it.

    Raises:
        ValueError: the scheme is unknown, a bucket is missing, the path is not absolute, or the scheme's package
            cannot be imported.
    """
    url = urlsplit(uri)
    if url.query or url.fragment or "@" in url.netloc:
        raise ValueError(f"run storage '{url.scheme}://...': it has a user, a query or a fragment: {_remedy()}")
    try:
        storage = RUN_STORAGES[url.scheme]
    except KeyError:
        raise ValueError(f"run storage '{uri}': {_remedy()}") from None
    return storage(uri)


def _remedy() -> str:
    return f"write {usable_forms(RUN_STORAGES)}, and keys into the environment"


def _objects(uri: str) -> RunStorage:
    if not urlsplit(uri).netloc:
        raise ValueError(f"run storage '{uri}' names no bucket: {_remedy()}")
    return ObjectStorage(uri)


def _directory(uri: str) -> RunStorage:
    url = urlsplit(uri)
    if url.netloc or not url.path.startswith("/"):
        raise ValueError(f"run storage '{uri}' is not a path of this machine: {_remedy()}")
    from trainer.storage.shared_directory import SharedDirectory

    return SharedDirectory(Path(unquote(url.path)))


RUN_STORAGES: Registry[Callable[[str], RunStorage]] = Registry(
    "evenkeel.run_storages",
    {
        **{scheme: UrlScheme(f"{scheme}://BUCKET/PREFIX", _objects) for scheme in STORES},
        "file": UrlScheme("file:///DIRECTORY", _directory),
    },
)
"""Functions that return the storage at a URI, by the URI's scheme."""
