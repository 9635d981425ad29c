"""The pages of the dashboard; routes and navigation are made from this list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from service.web.content import (
    access,
    collections,
    compare,
    datasets,
    home,
    job,
    jobs,
    schedules,
    submit,
    versions,
)
from service.web.request import DashboardRequest

Gather = Callable[[DashboardRequest], Awaitable[dict[str, Any]]]
"""Returns the values that a template shows."""


class Page(NamedTuple):
    """A page of the dashboard.

    Attributes:
        address: ``/``, or below ``/dashboard/``, where a session is recognized; it may have names in braces.
        title: Its name in the navigation and in the browser's title.
        template: What is in the frame, of ``templates/``.
        gather: What the template shows; ``page``, ``pages``, ``request`` and ``source`` are the frame's names.
        under: The address of the page of the navigation that it belongs to; None: it is one of those itself.
        scope: The scope without which it says which one is lacking, and nothing else.
        is_live: Whether the page's script keeps it as it is on the server. One with a form for work in progress is not.
        scripts: Scripts of its own, of ``static/``.
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
        """The address of what is in the frame, which the page's script asks again and again."""
        return source_of(self.address)


class Part(NamedTuple):
    """A part of a page that takes longer, and is asked for by the page once it is shown; attributes as in Page."""

    address: str
    template: str
    gather: Gather
    scope: str


def source_of(address: str) -> str:
    """Return the address of what is in the frame of the page at ``address``."""
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
        under="/dashboard/collections", scope="features:read", scripts=("neighbors.js",),
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

PARTS: tuple[Part, ...] = (
    Part("/dashboard/parts/versions/{collection}", "versions.html", versions.gather, "features:read"),
    Part("/dashboard/parts/profile/{dataset}", "profile.html", datasets.gather_profile, "jobs:read"),
)
