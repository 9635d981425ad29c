"""Schemes of uris that a dataset's rows are read from. Torch-free.

A new scheme of object storage goes into ``OBJECTS``, and its file system into :mod:`trainer.data.sources.locations`.
"""

from __future__ import annotations

LOCAL = "file"
OBJECTS = ("s3",)
TOPICS = ("kafka",)
"""Schemes of message topics; only the rows of a dataset can come from them, not other files."""
SCHEMES = (LOCAL, *OBJECTS, *TOPICS)
OBJECT_PREFIXES = tuple(f"{scheme}://" for scheme in OBJECTS)


def split(uri: str) -> tuple[str, str]:
    """Return (scheme, rest after ``://``) of a uri; a plain path has the scheme ``file``."""
    scheme, separator, rest = uri.partition("://")
    return (scheme, rest) if separator else (LOCAL, uri)


def is_object(uri: str) -> bool:
    return uri.startswith(OBJECT_PREFIXES)


def is_topic(uri: str) -> bool:
    return split(uri)[0] in TOPICS
