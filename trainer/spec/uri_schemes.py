"""Schemes of the uris of rows. Torch-free.

One of object storage enters in ``OBJECTS``, and its file system in :mod:`trainer.data.sources.locations`.
"""

from __future__ import annotations

LOCAL = "file"
OBJECTS = ("s3",)
TOPICS = ("kafka",)
"""Schemes of messages, for the rows of a dataset alone."""
SCHEMES = (LOCAL, *OBJECTS, *TOPICS)
OBJECT_PREFIXES = tuple(f"{scheme}://" for scheme in OBJECTS)


def split(uri: str) -> tuple[str, str]:
    """Return (scheme, what follows it) of a uri; a plain path is local."""
    scheme, separator, rest = uri.partition("://")
    return (scheme, rest) if separator else (LOCAL, uri)


def is_object(uri: str) -> bool:
    return uri.startswith(OBJECT_PREFIXES)


def is_topic(uri: str) -> bool:
    return split(uri)[0] in TOPICS
