"""Draw the pictures of docs/: ``python -m deploy.site``."""

from __future__ import annotations

from pathlib import Path

from deploy.site.pictures import PICTURES
from deploy.site.plots.registry import PLOTS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def plot_path(name: str) -> Path:
    """Return the path of a plot's file."""
    return FOLDER / "reports" / f"{name}.svg"


def main() -> None:
    """Draw every picture, and the plots whose tables or code have changed since they were drawn."""
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(picture(), "utf-8")
    for name, plot in PLOTS.items():
        path = plot_path(name)
        if not (path.exists() and plot.is_current(path.read_text("utf-8"))):
            path.write_text(plot.svg(), "utf-8")


if __name__ == "__main__":
    main()
