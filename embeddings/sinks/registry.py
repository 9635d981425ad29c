"""Opening of sinks by URL, whose scheme selects the class; plugins register theirs as ``evenkeel.sinks``."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from embeddings.outside_packages import Registry, UrlScheme, usable_forms
from embeddings.sinks.base import Sink, SinkError


def open_sink(url: str) -> Sink:
    """Return the sink at a URL; servers are contacted on first use.

    URLs are ``postgresql://USER:PASSWORD@HOST:PORT/DATABASE?schema=S&index=hnsw``, ``lancedb:///DIRECTORY`` and
    ``milvus://HOST:PORT/DATABASE?token=T``; docs/guides/sinks.md has the options.

    Raises:
        SinkError: an unknown scheme or option.
        ImportError: the package of the scheme is not installed.
        OutsidePackageError: a plugin's package cannot be imported.
    """
    scheme = urlsplit(url).scheme
    try:
        opener = SINKS[scheme]
    except KeyError:
        # The rest of the URL may hold a password.
        raise SinkError(f"'{scheme}' is no scheme of a sink's URL: use {usable_forms(SINKS)}") from None
    return opener(url)


def _postgresql(url: str) -> Sink:
    # The packages of sinks are imported only where they are used.
    from embeddings.sinks.postgresql import PostgreSQLSink

    return PostgreSQLSink(url)


def _lancedb(url: str) -> Sink:
    from embeddings.sinks.lancedb import LanceDBSink

    return LanceDBSink(url)


def _milvus(url: str) -> Sink:
    from embeddings.sinks.milvus import MilvusSink

    return MilvusSink(url)


SINKS: Registry[Callable[[str], Sink]] = Registry(
    "evenkeel.sinks",
    {
        "postgresql": UrlScheme("postgresql://HOST:PORT/DATABASE", _postgresql),
        "lancedb": UrlScheme("lancedb:///DIRECTORY", _lancedb),
        "milvus": UrlScheme("milvus://HOST:PORT/DATABASE", _milvus),
    },
)
"""Functions that return the sink at a URL, by the URL's scheme; a plugin may register any such function."""
