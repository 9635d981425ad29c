"""A report: its sections, claims and failures, as Markdown, HTML and charts (where matplotlib is installed)."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from trainer.report_pages.section import Curve, Panel, Section, Verdict, table_of

COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#E69F00", "#000000", "#999999")
"""Colours of Okabe and Ito, which colour-blind readers tell apart; line styles tell more than eight curves apart."""
STYLES = ("-", "--")
MOST_TICKS = 8


PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ title }}</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #d8dde3}
td:nth-child(2){color:#5a6570}.note{color:#5a6570;font-size:.9em;overflow-wrap:anywhere}
img{max-width:100%;height:auto}.wide{overflow-x:auto}
.holds{color:#0a6b3d}.does{color:#a8201a}
</style>
<h1>{{ title }}</h1>
<p>{{ source }}.</p>
<p>{{ protocol }}</p>
{% if claims %}<h2>Claims</h2>{% endif %}
{% for verdict, text, measured in claims %}
<p><b class="{{ verdict.split()[0] }}">{{ verdict }}</b>: {{ text }} — {{ measured }}</p>
{% endfor %}
{% for section in sections %}
<h2>{{ section.title }}</h2>
<div class="wide"><table><tr>{% for cell in section.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for line in section.lines %}<tr>{% for cell in line %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table></div>
{% if images[section.name] %}
<img alt="{{ section.title }}" src="data:image/png;base64,{{ images[section.name] }}">
{% endif %}
{% for note in section.notes %}<p class="note">{{ note }}</p>
{% endfor %}
{% endfor %}
{% if failed %}<h2>Failed</h2>{% endif %}
{% for name, error in failed %}<p>{{ name }}: <code>{{ error }}</code></p>{% endfor %}
{% if not_run %}<h2>Not run</h2><ul>{% for title in not_run %}<li>{{ title }}</li>{% endfor %}</ul>{% endif %}
</html>
"""


@dataclass(frozen=True)
class Report:
    """A report.

    ``source``: the publication that it follows, such as a paper. ``protocol``: the data's split and the models'
    training. ``failed``: names and errors of trials. ``not_run``: titles of tables for which no trial has ended.
    """

    title: str
    source: str
    protocol: str
    sections: tuple[Section, ...]
    claims: tuple[Verdict, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    not_run: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """True if no trial failed and every claim holds."""
        return not self.failed and all(verdict == "holds" for verdict, _, _ in self.claims)

    def markdown(self) -> str:
        parts = [f"# {self.title}", f"{self.source}.", self.protocol]
        for section in self.sections:
            parts += [f"## {section.title}", table_of(section.header, section.lines), "\n\n".join(section.notes)]
        if self.claims:
            parts += ["## Claims", table_of(("", "claim", "measured"), self.claims)]
        if self.failed:
            errors = [(name, f"`{error}`") for name, error in self.failed]
            parts += ["## Failed", table_of(("trial", "error"), errors)]
        if self.not_run:
            parts += ["## Not run", "\n".join(f"- {title}" for title in self.not_run)]
        return "\n\n".join(parts) + "\n"

    def html(self, charts: Mapping[str, Path]) -> str:
        """Return a self-contained HTML page. ``charts``: PNG files by the name of their section."""
        images = {name: base64.b64encode(path.read_bytes()).decode("ascii") for name, path in charts.items()}
        template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
        return template.render(vars(self), images=images)

    def write(self, folder: Path) -> Path:
        """Write charts (where matplotlib is installed), report.md and report.html, whose path is returned."""
        folder.mkdir(parents=True, exist_ok=True)
        charts: dict[str, Path] = {}
        for section in self.sections if can_draw() else ():
            path = folder / (re.sub(r"[^A-Za-z0-9_-]+", "-", section.name) + ".png")
            if draw(section, path):
                charts[section.name] = path
        (folder / "report.md").write_text(self.markdown(), "utf-8")
        (folder / "report.html").write_text(self.html(charts), "utf-8")
        return folder / "report.html"


def can_draw() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(section: Section, path: Path) -> bool:
    """Draw the panels of a section into a PNG file; return False, without a file, if the section has none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not section.panels:
        return False
    across = min(section.across, len(section.panels))
    down = -(-len(section.panels) // across)
    figure = Figure(figsize=(max(6.4, 4.2 * across), 4.0 * down), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(down, across, squeeze=False).ravel()
    for axes in all_axes[len(section.panels) :]:
        axes.set_visible(False)
    told: list[str] = []
    for panel, axes in zip(section.panels, all_axes, strict=False):
        _panel(axes, panel)
        # Panels of the same curves share one legend.
        if list(panel.curves) != told and len(panel.curves) > 1:
            axes.legend(loc="best", fontsize="small", frameon=False)
        told = list(panel.curves)
    figure.suptitle(section.title.partition(":")[0], fontsize="medium")
    figure.savefig(path, format="png")
    return True


def _panel(axes: Any, panel: Panel) -> None:
    for number, (label, curve) in enumerate(panel.curves.items()):
        if curve and not panel.joined:
            axes.plot(*zip(*curve, strict=True), ".", color=COLOURS[number % len(COLOURS)], markersize=3, alpha=0.5)
        elif curve:
            _band(axes, curve, number, label)
    axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
    axes.set(**{f"{axis}scale": "log" for axis in panel.log})
    axes.grid(alpha=0.3, linewidth=0.5)
    ticks = sorted({x for curve in panel.curves.values() for x, *_ in curve})
    if "x" in panel.log and len(ticks) <= MOST_TICKS:
        # Ticks at the values themselves, because powers of ten would be too few.
        axes.set_xticks(ticks, [f"{x:.3g}" for x in ticks])
        axes.minorticks_off()
    elif panel.x == "epoch":
        axes.xaxis.get_major_locator().set_params(integer=True)


def _band(axes: Any, curve: Curve, number: int, label: str) -> None:
    """Draw curve ``number`` of a chart: means, and a band of one standard deviation where known."""
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
    marker = "o" if len(curve) < 12 else None
    x, means, *spread = zip(*curve, strict=True)
    axes.plot(x, means, color=colour, linestyle=style, marker=marker, markersize=4, label=label)
    if spread and any(spread[0]):
        ends = [[mean + sign * sd for mean, sd in zip(means, spread[0], strict=True)] for sign in (-1, 1)]
        axes.fill_between(x, *ends, color=colour, alpha=0.15, linewidth=0)
