"""The URL of a remote store: its address, and its options in the query."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

LEASE_SECONDS = 20.0
REDIS_PREFIX = "evenkeel:"
"""Prefix of all keys in Redis, unless the URL's option ``prefix`` sets another."""
# HOST:PORT/DB?OPTIONS of a Redis, without a login.
_PLACE = re.compile(r"(\[[^]]*\]|[^@:/?#]+)(:\d+)?(/\d*)?(\?[^#]*)?")


class StoreUrl(NamedTuple):
    """A store's URL in parts.

    ``url`` is the form for error messages, without password and query; ``address`` is the URL without the query. The
    other fields are options.
    """

    url: str
    address: str
    options: dict[str, str]
    cache: Path
    follow_seconds: float
    lease_seconds: float


def with_quoted_password(text: str) -> str:
    """Return a Redis URL with its password percent-encoded if it is not yet; return other URLs unchanged.

    A raw ``/``, ``?`` or ``#`` in a password, as base64 may have, would end the host part of the URL. The rest of the
    password would then be shown in errors.
    """
    scheme, _, rest = text.partition("://")
    if scheme not in ("redis", "rediss") or _PLACE.fullmatch(rest):
        return text
    for end in (at_sign.start() for at_sign in re.finditer("@", rest)):
        if _PLACE.fullmatch(rest, end + 1):
            user, colon, password = rest[:end].partition(":")
            return f"{scheme}://{quote(user, safe='%')}{colon}{quote(password, safe='%')}@{rest[end + 1 :]}"
    return text


def parse_store_url(text: str, follow_seconds: float, known: tuple[str, ...]) -> StoreUrl:
    """Split the URL of a remote store into its parts.

    Options of every store: ``cache`` (directory of the mirror; default ``EVENKEEL_HOME/cache/...``),
    ``follow_seconds`` (largest age of the mirror's state; default: the argument of that name), ``lease_seconds`` (time
    for which a dead writer blocks others). ``known`` are the names of other options that this kind of store has.

    Raises:
        ValueError: an unknown option, or an invalid value.
    """
    parts = urlsplit(with_quoted_password(text))
    host = parts.netloc.rpartition("@")[2]
    shown = urlunsplit(parts._replace(netloc=host, query=""))
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    options = {name: value for name, value in given.items() if name in known}
    common = ("cache", "follow_seconds", "lease_seconds")
    unknown = sorted(given.keys() - options.keys() - set(common))
    if unknown:
        raise ValueError(
            f"store url '{shown}': no option {', '.join(unknown)} (there are: {', '.join((*known, *common))})"
        )
    numbers = {}
    for name, default in (("follow_seconds", follow_seconds), ("lease_seconds", LEASE_SECONDS)):
        try:
            numbers[name] = float(given.get(name, default))
        except ValueError:
            numbers[name] = -1.0
        if not 0 <= numbers[name] < float("inf") or (name == "lease_seconds" and numbers[name] == 0):
            raise ValueError(f"store url '{shown}': {name} is {given[name]!r}, expected seconds")
    if "cache" in given:
        cache = Path(given["cache"]).absolute()
    else:
        # URLs that differ only in an option have separate mirrors.
        digest = hashlib.sha256(f"{shown}?{urlencode(sorted(options.items()))}".encode()).hexdigest()[:16]
        cache = Path(os.environ.get("EVENKEEL_HOME", ".evenkeel"), "cache", digest).absolute()
    return StoreUrl(shown, urlunsplit(parts._replace(query="")), options, cache, **numbers)


def namespaced(text: str, name: str) -> str:
    """Return the URL of namespace ``name`` in the store at ``text``; it has its own collections, views and mirror.

    The namespace is the folder ``STORE/namespaces/NAME``; in Redis it is the key prefix ``PREFIX@NAME:`` (no name of a
    collection contains an @).
    """
    if "://" not in text:
        return str(Path(text) / "namespaces" / name)
    parts = urlsplit(with_quoted_password(text))
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "cache" in options:
        options["cache"] = str(Path(options["cache"]) / "namespaces" / name)
    if parts.scheme in ("redis", "rediss", "unix"):
        options["prefix"] = f"{options.get('prefix', REDIS_PREFIX)}@{name}:"
    else:
        parts = parts._replace(path=f"{parts.path.rstrip('/')}/namespaces/{name}")
    return urlunsplit(parts._replace(query=urlencode(options)))
