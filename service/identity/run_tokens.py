"""Signed tokens of runs on other machines, each of which grants access for one attempt of one run and nothing else.

A token contains its purpose and expiry, signed with a secret of this EVENKEEL_HOME. The token becomes invalid when it
expires, and when the job's row names another attempt, another lease or no lease (:func:`holds`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from service.jobs.job_row import JobRow


PREFIX = "er_"
SECRET_FILE = "run_tokens.secret"
TOKEN_SECONDS = 7 * 24 * 3600.0
"""Lifetime of a run's token: the longest outage of the service that a run survives."""
RENEW_SECONDS = 24 * 3600.0


class Claim(NamedTuple):
    """Content of a token: run, attempt, hash of the attempt's lease, and expiry (seconds since 1970)."""

    run_id: str
    attempt: int
    lease: str
    expires: int

    @property
    def is_old(self) -> bool:
        return self.expires - time.time() < TOKEN_SECONDS - RENEW_SECONDS


def issue(home: Path, run_id: str, attempt: int, lease: str) -> str:
    """Return a token for this attempt; ``lease`` is included as a hash."""
    payload = f"{run_id}.{attempt}.{_hashed(lease)}.{int(time.time() + TOKEN_SECONDS)}"
    return f"{PREFIX}{payload}.{_signature(home, payload)}"


def read(home: Path, token: str) -> Claim | None:
    """Return the content of a token; None if this EVENKEEL_HOME did not issue it or it has expired."""
    payload, _, signature = token.removeprefix(PREFIX).rpartition(".")
    if not token.startswith(PREFIX) or not token.isascii() or not payload:
        return None
    if not hmac.compare_digest(signature, _signature(home, payload)):
        return None
    run_id, attempt, lease, expires = payload.split(".")
    claim = Claim(run_id, int(attempt), lease, int(expires))
    return claim if claim.expires > time.time() else None


def holds(claim: Claim, row: JobRow) -> bool:
    """Return True if the attempt is still the job's current attempt: not followed by another, and not yet released."""
    if row["released"] or row["attempt"] != claim.attempt:
        return False
    return row["lease"] is not None and _hashed(row["lease"]) == claim.lease


def _hashed(lease: str) -> str:
    return hashlib.sha256(lease.encode()).hexdigest()[:32]


def _signature(home: Path, payload: str) -> str:
    return hmac.new(_secret(home), payload.encode(), hashlib.sha256).hexdigest()


def _secret(home: Path) -> bytes:
    """Return the signing secret of EVENKEEL_HOME, which the first process that needs it creates."""
    path = home / SECRET_FILE
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            temporary = path.with_name(f".{SECRET_FILE}.{secrets.token_hex(8)}")
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_hex(32).encode())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
