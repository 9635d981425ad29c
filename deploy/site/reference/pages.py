"""The generated pages of the reference."""

from __future__ import annotations

from collections.abc import Callable

from deploy.site.reference.alerts import alerts_page
from deploy.site.reference.commands import commands_page
from deploy.site.reference.fields import dataset_page, job_page
from deploy.site.reference.metrics import metrics_page
from deploy.site.reference.python_names import python_page
from deploy.site.reference.routes import rest_page
from deploy.site.reference.settings import settings_page

PAGES: dict[str, Callable[[], str]] = {
    "dataset": dataset_page,
    "job": job_page,
    "settings": settings_page,
    "commands": commands_page,
    "rest": rest_page,
    "metrics": metrics_page,
    "alerts": alerts_page,
    "python": python_page,
}
"""Pages, keyed by name. In the repository, a section of docs/reference/README.md with the same name stands for each."""
