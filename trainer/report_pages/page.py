"""A report: its sections, claims and failures, as files of Markdown, HTML and charts."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from trainer.report_pages import plots
from trainer.report_pages.markdown import table_of
from trainer.report_pages.section import Section, Verdict

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

    Attributes:
        title: Its title.
        source: What it follows, as a paper.
        protocol: How data is split and models are trained.
        sections: Its sections, in order.
        claims: Claims with their verdicts.
        failed: Names and errors of trials.
        not_run: Titles of tables of which no trial has ended.
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
        """Return one file that needs nothing beside it; ``charts``: PNG files by the name of their section."""
        images = {name: base64.b64encode(path.read_bytes()).decode("ascii") for name, path in charts.items()}
        template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
        return template.render(vars(self), images=images)

    def write(self, folder: Path) -> Path:
        """Write charts (where matplotlib is installed), report.md and report.html, whose path is returned."""
        folder.mkdir(parents=True, exist_ok=True)
        charts: dict[str, Path] = {}
        for section in self.sections if plots.can_draw() else ():
            path = folder / (re.sub(r"[^A-Za-z0-9_-]+", "-", section.name) + ".png")
            if plots.draw(section, path):
                charts[section.name] = path
        (folder / "report.md").write_text(self.markdown(), "utf-8")
        (folder / "report.html").write_text(self.html(charts), "utf-8")
        return folder / "report.html"
