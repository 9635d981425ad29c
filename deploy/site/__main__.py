"""Write what is generated: ``python -m deploy.site``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deploy.site.pictures import PICTURES
from deploy.site.plots.registry import PLOTS
from deploy.site.reference.alerts import alerts_page
from deploy.site.reference.commands import commands_page
from deploy.site.reference.fields import dataset_page, job_page
from deploy.site.reference.metrics import metrics_page
from deploy.site.reference.python_names import python_page
from deploy.site.reference.routes import rest_page
from deploy.site.reference.settings import settings_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILES: dict[str, Callable[[], str]] = {
    "reference/dataset.md": dataset_page,
    "reference/job.md": job_page,
    "reference/settings.md": settings_page,
    "reference/commands.md": commands_page,
    "reference/rest.md": rest_page,
    "reference/metrics.md": metrics_page,
    "reference/alerts.md": alerts_page,
    "reference/python.md": python_page,
} | {f"pictures/{name}.svg": picture for name, picture in PICTURES.items()}
"""What generates each file below docs/, but for plots."""


def plot_path(name: str) -> Path:
    """Return where the plot of a name is."""
    return DOCS / "pictures" / "reports" / f"{name}.svg"


def main() -> None:
    """Write every file; draw the plots whose tables or code have changed since they were drawn."""
    for name, generate in FILES.items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(generate(), "utf-8")
    for name, plot in PLOTS.items():
        path = plot_path(name)
        if not (path.exists() and plot.is_current(path.read_text("utf-8"))):
            path.parent.mkdir(exist_ok=True)
            path.write_text(plot.svg(), "utf-8")


if __name__ == "__main__":
    main()
