"""Check whether database, feature store and runs of a service are from the same moment, which a restore can break.

It looks for things that one of them knows and the others do not. It queries the service, so it sees what users see
(docs/guides/reliability.md, "Database"): the jobs and versions of one tenant, that of the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from service.client import Client, ProblemError
from service.core.tenants import DEFAULT_TENANT, HEADER

LOOKED_AT = 200
"""So many of the newest jobs, and of the newest run directories."""
SHOWN = 5


class OutOfStep(NamedTuple):
    """One kind of item that the other side does not know."""

    name: str
    message: str
    remedy: str


def out_of_step(client: Client, runs: Path) -> Iterator[OutOfStep]:
    """Yield the inconsistencies that were found.

    Args:
        client: A client of the service.
        runs: The service's run directories, if they are on this machine; an operator's key alone tells whose they are.

    Raises:
        ServiceError: The service cannot be queried.
    """
    newest: dict[str, str] = {}
    strangers = []
    for collection in client.collections():
        name = collection["name"]
        versions = client.versions(name)
        newest[name] = max((one["version"] for one in versions), default="")
        strangers += [
            f"{name} {one['version']} by {one['job']}"
            for one in versions
            if one["state"] != "expired" and one.get("job") and not _known(client, one["job"])
        ]
    if strangers:
        yield OutOfStep(
            "database",
            f"the store has versions whose jobs the database does not know: {_listed(strangers)}",
            "the database is older than the store, or those jobs were deleted: the versions are whole and are served; "
            "a warm start from one of them needs its run directory",
        )
    operator = _is_operator(client)
    # Collections are one tenant's, while an operator that names none sees the jobs of all.
    own = {HEADER: DEFAULT_TENANT} if operator else None
    lost = []
    for job in client.items("/jobs", LOOKED_AT, own, state="succeeded"):
        told = job["publication"] or {}
        if told.get("status") == "published" and told["version"] > newest.get(told["collection"], ""):
            lost.append(f"{told['collection']} {told['version']} by {job['id']}")
    if lost:
        yield OutOfStep(
            "store",
            f"the database tells of versions that the store does not have: {_listed(lost)}",
            "the store is older than the database: submit their specs again, or trigger their days; the numbers of "
            "those versions are given out anew",
        )
    if not operator:
        return
    there = islice(sorted(runs.glob("job_*"), reverse=True), LOOKED_AT)
    orphans = [one.name for one in there if not _known(client, one.name)]
    if orphans:
        yield OutOfStep(
            "runs",
            f"run directories of jobs that the database does not know: {_listed(orphans)}",
            f"the database is older than they are: look whether one still runs, then keep or remove them ({runs})",
        )


def _is_operator(client: Client) -> bool:
    """Return whether the key is an operator's, who sees all tenants; the admin of another tenant sees that one."""
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
