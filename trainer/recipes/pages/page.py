"""A report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from trainer.recipes.pages.layout import Layout

STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .8rem;text-align:left;border-bottom:1px solid #d8dde3}
td:nth-child(2){color:#5a6570}.note{color:#5a6570;font-size:.9em;overflow-wrap:anywhere}
img{max-width:100%;height:auto}.wide{overflow-x:auto}
.holds{color:#0a6b3d}.does{color:#a8201a}
"""


def page(layout: Layout, plots: Mapping[str, Path]) -> str:
    """Return the page; ``plots``: PNG files by the name of their table or section, which are written into it."""
    recipe = layout.recipe
    parts = [
        f"<h1>{escape(recipe.title)}</h1>",
        f"<p>{escape(recipe.source)}.</p>",
        f"<p>{escape(recipe.protocol)}</p>",
    ]
    if layout.claims:
        parts.append("<h2>Claims</h2>")
        parts += [
            f'<p><b class="{verdict.split()[0]}">{escape(verdict)}</b>: {escape(text)} — {escape(measured)}</p>'
            for verdict, text, measured in layout.claims
        ]
    for view in layout.views:
        table = view.table
        parts += _part(table.title, view.header, view.lines, view.notes, plots.get(table.name))
    for section in layout.sections:
        parts += _part(section.title, section.header, section.lines, section.notes, plots.get(section.name))
    if layout.failed:
        parts.append("<h2>Failed</h2>")
        parts += [f"<p>{escape(name)}: <code>{escape(error)}</code></p>" for name, error in layout.failed]
    if layout.not_run:
        items = "".join(f"<li>{escape(title)}</li>" for title in layout.not_run)
        parts.append(f"<h2>Not run</h2><ul>{items}</ul>")
    title = f"<title>{escape(recipe.title)}</title>"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8">{title}<style>{STYLE}</style>'
    return head + "\n" + "\n".join(parts) + "\n</html>\n"


def _part(
    title: str, header: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[str], plot: Path | None
) -> list[str]:
    parts = [f"<h2>{escape(title)}</h2>", _table(header, lines)]
    if plot is not None:
        image = base64.b64encode(plot.read_bytes()).decode("ascii")
        parts.append(f'<img alt="{escape(title)}" src="data:image/png;base64,{image}">')
    return parts + [f'<p class="note">{escape(note)}</p>' for note in notes]


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'
