"""The pages of the dashboard; routes and navigation are made from this list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from service.core.errors import Problem
from service.web.content import (
    access,
    collections,
    compare,
    datasets,
    home,
    job,
    jobs,
    schedules,
    searches,
    submit,
    versions,
)
from service.web.request import DashboardRequest

Gather = Callable[[DashboardRequest], Awaitable[dict[str, Any]]]
"""Type of functions that return the values for a page's template."""


class Page(NamedTuple):
    """A page of the dashboard.

    Attributes:
        address: Path of the page: ``/``, or below ``/dashboard/``, where the session cookie is sent; it may have
            parameters in braces.
        title: Name of the page in the navigation and in the browser's title.
        template: File in ``templates/`` for the content of the frame.
        gather: Function that returns the template's values. The names ``page``, ``pages``, ``request`` and ``source``
            are reserved for the frame.
        under: Address of the page in the navigation to which this page belongs; None if it is itself in the navigation.
        scope: Scope that the key needs; without it the page shows only the name of the scope. None if any key may see
            it.
        is_live: True if the page's script refreshes it regularly; False for a page with a form that a user is filling
            in.
        scripts: Files in ``static/`` with scripts for this page only.
    """

    address: str
    title: str
    template: str
    gather: Gather
    under: str | None = None
    scope: str | None = None
    is_live: bool = True
    scripts: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The address of the frame's content, which the page's script requests at intervals."""
        return source_of(self.address)


class Part(NamedTuple):
    """A part of a page that takes longer, and that the page requests once it is shown; attributes are as in Page."""

    address: str
    template: str
    gather: Gather
    scope: str


def source_of(address: str) -> str:
    """Return the address of the frame's content for the page at ``address``."""
    return f"/dashboard/content{address.removeprefix('/dashboard').rstrip('/')}"


PAGES: tuple[Page, ...] = (
    Page("/", "Home", "home.html", home.gather),
    Page("/dashboard/jobs", "Jobs", "jobs.html", jobs.gather, scope="jobs:read"),
    Page(
        "/dashboard/jobs/{job_id}", "Job", "job.html", job.gather,
        under="/dashboard/jobs", scope="jobs:read", scripts=("log.js",),
    ),
    Page(
        "/dashboard/compare", "Compare jobs", "compare.html", compare.gather,
        under="/dashboard/jobs", scope="jobs:read",
    ),
    Page(
        "/dashboard/submit", "Submit a job", "submit.html", submit.gather,
        under="/dashboard/jobs", scope="jobs:write", is_live=False, scripts=("spec_form.js", "editor.js"),
    ),
    Page("/dashboard/collections", "Vectors", "collections.html", collections.gather, scope="features:read"),
    Page(
        "/dashboard/collections/{collection}", "Collection", "collection.html", collections.gather_one,
        under="/dashboard/collections", scope="features:read",
    ),
    Page("/dashboard/schedules", "Schedules", "schedules.html", schedules.gather, scope="jobs:read"),
    Page(
        "/dashboard/schedules/{schedule}", "Schedule", "schedule.html", schedules.gather_one,
        under="/dashboard/schedules", scope="jobs:read",
    ),
    Page("/dashboard/datasets", "Data sets", "datasets.html", datasets.gather, scope="jobs:read"),
    Page(
        "/dashboard/datasets/{dataset}", "Data set", "dataset.html", datasets.gather_one,
        under="/dashboard/datasets", scope="jobs:read",
    ),
    Page("/dashboard/access", "Access", "access.html", access.gather, scope="admin"),
)  # fmt: skip


async def _nothing(request: DashboardRequest) -> dict[str, Any]:
    raise Problem(404, "not-found", f"There is no page /dashboard/{request.path['address']}.")


UNKNOWN = Page("/dashboard/{address:path}", "Not found", "problem.html", _nothing, is_live=False)
"""Page of every other address below ``/dashboard/``."""

PARTS: tuple[Part, ...] = (
    Part("/dashboard/parts/versions/{collection}", "versions.html", versions.gather, "features:read"),
    Part("/dashboard/parts/neighbors/{collection}", "found.html", searches.gather_neighbors, "features:read"),
    Part("/dashboard/parts/recommended/{collection}", "found.html", searches.gather_recommended, "features:read"),
    Part("/dashboard/parts/profile/{dataset}", "profile.html", datasets.gather_profile, "jobs:read"),
)
