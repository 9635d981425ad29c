"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.recipes.pages.layout import Layout, View


def markdown(layout: Layout) -> str:
    recipe = layout.recipe
    parts = [f"# {recipe.title}", f"{recipe.source}.", recipe.protocol]
    for view in layout.views:
        parts += [f"## {view.table.title}", table_lines(view), "\n\n".join(view.notes)]
    for section in layout.sections:
        parts += [f"## {section.title}", _lines(section.header, section.lines), "\n\n".join(section.notes)]
    if layout.claims:
        parts += ["## Claims", _lines(("", "claim", "measured"), layout.claims)]
    if layout.failed:
        parts += ["## Failed", _lines(("point", "error"), [(name, f"`{error}`") for name, error in layout.failed])]
    if layout.not_run:
        parts += ["## Not run", "\n".join(f"- {title}" for title in layout.not_run)]
    return "\n\n".join(parts) + "\n"


def table_lines(view: View) -> str:
    return _lines(view.header, view.lines)


def _lines(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), "|---" * len(header) + "|", *map(line, lines)])
