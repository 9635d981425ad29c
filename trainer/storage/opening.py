"""The storage that a URI names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainer.storage.base import RunStorage


def open_storage(uri: str) -> RunStorage:
    """Return the storage at ``s3://BUCKET/PREFIX`` or ``file:///DIRECTORY``; nothing is asked of it yet.

    Raises:
        ValueError: another scheme, no bucket, or a path that is not absolute.
    """
    url = urlsplit(uri)
    remedy = "write s3://BUCKET/PREFIX or file:///DIRECTORY, and keys into the environment"
    if url.query or url.fragment or "@" in url.netloc:
        raise ValueError(f"run storage '{url.scheme}://...': it has more than a place: {remedy}")
    if url.scheme == "s3" and url.netloc:
        # Where there is no object storage its library is not imported.
        from trainer.storage.objects import ObjectStorage

        return ObjectStorage(uri)
    if url.scheme == "file" and not url.netloc and url.path.startswith("/"):
        from trainer.storage.shared_directory import SharedDirectory

        return SharedDirectory(Path(unquote(url.path)))
    raise ValueError(f"run storage '{uri}': {remedy}")
