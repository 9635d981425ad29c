"""API keys as a file, so that a process that serves vectors knows them if it starts while the database is down.

``$EVENKEEL_HOME/known_keys.json`` (0600) holds what the database contained when it last answered: SHA-256 of each key,
its id, name, tenant, scopes and expiry. It never holds a key itself: a key has 192 random bits, so its hash gives no
access.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from embeddings.durable_files import write_file
from service.core.tenants import DEFAULT_TENANT
from service.identity.keys import Principal

FILE_NAME = "known_keys.json"


class KnownKeys(NamedTuple):
    """``principals`` by the key's digest; ``confirmed_at``: when the database confirmed them, seconds since 1970."""

    principals: dict[str, Principal]
    confirmed_at: float


def load(path: Path) -> KnownKeys:
    """Return the file's content; no keys if it is missing or incomplete (then the database is asked)."""
    try:
        document = json.loads(path.read_text("utf-8"))
        principals = {row["hash"]: _principal(row) for row in document["keys"]}
        return KnownKeys(principals, float(document["confirmed_at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return KnownKeys({}, 0.0)


def save(path: Path, principals: Mapping[str, Principal], confirmed_at: float) -> None:
    """Replace the file atomically.

    Raises:
        OSError: The file cannot be written.
    """
    rows = [
        {
            "hash": digest,
            "key_id": principal.key_id,
            "name": principal.name,
            "tenant": principal.tenant,
            "scopes": principal.scopes,
            "expires_at": None if principal.expires_at is None else principal.expires_at.isoformat(),
        }
        for digest, principal in principals.items()
    ]
    write_file(path, json.dumps({"confirmed_at": confirmed_at, "keys": rows}).encode(), mode=0o600, durable=False)


def _principal(row: Mapping[str, str]) -> Principal:
    expires = row["expires_at"]
    at = None if expires is None else datetime.datetime.fromisoformat(expires)
    return Principal(row["key_id"], row["name"], tuple(row["scopes"]), at, row.get("tenant", DEFAULT_TENANT))
