"""A report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment

from benchmarks.papers.pages.layout import Layout

PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ recipe.title }}</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #d8dde3}
td:nth-child(2){color:#5a6570}.note{color:#5a6570;font-size:.9em;overflow-wrap:anywhere}
img{max-width:100%;height:auto}.wide{overflow-x:auto}
.holds{color:#0a6b3d}.does{color:#a8201a}
</style>
<h1>{{ recipe.title }}</h1>
<p>{{ recipe.source }}.</p>
<p>{{ recipe.protocol }}</p>
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


def page(layout: Layout, plots: Mapping[str, Path]) -> str:
    """Return the page; ``plots``: PNG files by the name of their section, which are written into it."""
    images = {name: base64.b64encode(path.read_bytes()).decode("ascii") for name, path in plots.items()}
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return template.render(vars(layout), images=images)
