"""Check that database, feature store and runs of a service are from the same moment; after a restore they may not be.

The check looks for objects that one of the three has and the others lack (docs/guides/reliability.md, "Backup and
restore"). The check queries the service, so it sees only the jobs and versions of the key's tenant.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from service.client import Client, ProblemError
from service.client.http import part
from service.core.tenants import DEFAULT_TENANT, HEADER

LOOKED_AT = 200
"""Number of the newest jobs, and of the newest run directories, to check."""
AUDIT_LOOKED_AT = 5000
"""Number of the newest entries of the audit log to check; the log itself is kept forever."""
SHOWN = 5
ERASE = "POST /v1/collections/{collection}/erase"


class OutOfStep(NamedTuple):
    """One kind of inconsistency: items that one part of the service has and another part lacks."""

    name: str
    message: str
    remedy: str


def out_of_step(client: Client, runs: Path) -> Iterator[OutOfStep]:
    """Yield the inconsistencies that were found.

    ``runs``: the directory of all run directories, if it is on this machine. This directory is compared only with an
    operator's key, which sees the jobs of all tenants.

    Raises:
        ServiceError: The service cannot be queried.
    """
    newest: dict[str, str] = {}
    erasures: dict[str, list[dict[str, Any]]] = {}
    strangers = []
    for name in [collection["name"] for collection in client.collections()]:
        versions = client.versions(name)
        erasures[name] = list(client.items(f"/collections/{part(name)}/erasures"))
        newest[name] = max((version["version"] for version in versions), default="")
        strangers += [
            f"{name} {version['version']} by {version['job']}"
            for version in versions
            if version["state"] != "expired" and version.get("job") and not _known(client, version["job"])
        ]
    if strangers:
        yield OutOfStep(
            "database",
            f"the store has versions whose jobs the database does not know: {_listed(strangers)}",
            "the database is older than the store, or those jobs were deleted: the versions are intact and are served; "
            "a warm start from one of them needs its run directory",
        )
    operator = _is_operator(client)
    # Collections are those of one tenant, so jobs must be too: an operator who names no tenant sees all jobs.
    tenant_header = {HEADER: DEFAULT_TENANT} if operator else None
    lost = []
    for job in client.items("/jobs", LOOKED_AT, tenant_header, state="succeeded"):
        publication = job["publication"] or {}
        if publication.get("status") == "published":
            collection, version = publication["collection"], publication["version"]
            if version > newest.get(collection, ""):
                lost.append(f"{collection} {version} by {job['id']}")
    if lost:
        yield OutOfStep(
            "store",
            f"the database has publications of versions that the store does not have: {_listed(lost)}",
            "the store is older than the database: submit their specs again, or trigger their dates; new versions "
            "reuse the numbers of the missing ones",
        )
    forgotten = _forgotten_erasures(client.items("/audit", AUDIT_LOOKED_AT, tenant_header), erasures)
    if forgotten:
        yield OutOfStep(
            "erasures",
            f"the audit log has erasures that the store does not know: {_listed(forgotten)}",
            "the store is older than the database and may serve those ids again: erase them again before anything is "
            "published, from your own record of them, because the service stores only hashes of ids",
        )
    if not operator:
        return
    newest_runs = islice(sorted(runs.glob("job_*"), reverse=True), LOOKED_AT)
    orphans = [run.name for run in newest_runs if not _known(client, run.name)]
    if orphans:
        yield OutOfStep(
            "runs",
            f"run directories of jobs that the database does not know: {_listed(orphans)}",
            "the database is older than these directories: check whether one of their runs is still alive, then "
            f"keep or remove them ({runs})",
        )


def _forgotten_erasures(
    entries: Iterable[Mapping[str, Any]], erasures: Mapping[str, Iterable[Mapping[str, Any]]]
) -> list[str]:
    """Return the erasures in the audit log, newest first, that are missing from their collection's list of erasures."""
    notes: dict[tuple[str, str], list[datetime.datetime]] = {}
    for name, collection_notes in erasures.items():
        for note in collection_notes:
            if note["kind"] == "erase" and note["key"] is not None:
                notes.setdefault((name, note["key"]), []).append(datetime.datetime.fromisoformat(note["at"]))
    forgotten = []
    done = [entry for entry in entries if entry["action"] == ERASE and entry["status"] == 200]
    for entry in reversed(done):
        name, at = entry["object"].split("/")[-2], datetime.datetime.fromisoformat(entry["at"])
        candidates = notes.get((name, entry["key_id"]), [])
        # The collection's note is written before the audit entry: each entry matches the latest note before it.
        own_note = max((noted for noted in candidates if noted <= at), default=None)
        if own_note is None:
            forgotten.append(f"{name} at {entry['at']} by {entry['key_name']}")
        else:
            candidates.remove(own_note)
    return forgotten[::-1]


def _is_operator(client: Client) -> bool:
    """Return True if the key is an operator's, which sees all tenants; another admin's key sees its own tenant."""
    try:
        return any(tenant["name"] == DEFAULT_TENANT for tenant in client.tenants())
    except ProblemError as error:
        if error.status == 403:
            return False
        raise


def _known(client: Client, job_id: str) -> bool:
    try:
        client.job(job_id)
    except ProblemError as error:
        if error.status == 404:
            return False
        raise
    return True


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
