"""Make figures and write them as SVG: on a white card, with text as text, the same bytes each time."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from trainer.report_pages.page import COLOURS

BLUE, GREEN, PINK, SKY, RED, ORANGE, BLACK, GREY = COLOURS
INK = "#222222"
WIDTH = 8.0
"""Width of a figure in inches: 768 pixels, as wide as a page's text."""
STYLE = {
    "font.size": 9,
    "axes.edgecolor": "#777777",
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "figure.facecolor": "#ffffff",
    "text.color": INK,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",  # text is searched and copied, and files stay small
    "svg.hashsalt": "evenkeel",
}


@contextmanager
def style() -> Iterator[None]:
    """Set the style of these plots within a ``with`` block, whatever the user's own settings of matplotlib are."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def panels(
    across: int, height: float, *, down: int = 1, share_y: bool = False, widths: list[float] | None = None
) -> Any:
    """Return a figure with its axes, as an array of ``[across]``, or of ``[down, across]``.

    Args:
        across: Panels side by side.
        height: Height of the figure in inches.
        down: Panels one above another.
        share_y: True if panels of a row share their vertical axis.
        widths: Relative widths of the panels; equal unless given.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharey="row" if share_y else False, width_ratios=widths)
    return figure, axes[0] if down == 1 else axes


def svg(plot: Callable[[], Any], title: str) -> str:
    """Return a plot as SVG.

    Args:
        plot: The figure of matplotlib.
        title: Alternative text for readers who do not see the picture.
    """
    with style():
        figure = plot()
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    # Names are digests of exact coordinates, whose last bits differ between processors.
    for number, name in enumerate(dict.fromkeys(re.findall(r'\bid="([mp][0-9a-f]{10})"', text))):
        text = text.replace(name, f"{name[0]}{number}")
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{3,}", _rounded, tag[0]), text)
    text = re.sub(
        r"<!DOCTYPE.*?>\n|<\?xml.*?\?>\n|<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", text, flags=re.DOTALL
    )
    text = re.sub(r"[ \t]*\n[ \t]*", "\n", text)
    return re.sub(r"(<svg [^>]*>)", rf"\1\n<title>{escape(title)}</title>", text, count=1)


def _rounded(digits: re.Match[str]) -> str:
    return f"{float(digits[0]):.2f}".rstrip("0").rstrip(".")
