"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.pages.layout import Layout


def markdown(layout: Layout) -> str:
    recipe = layout.recipe
    parts = [f"# {recipe.title}", f"{recipe.source}.", recipe.protocol]
    for section in layout.sections:
        parts += [f"## {section.title}", table_of(section.header, section.lines), "\n\n".join(section.notes)]
    if layout.claims:
        parts += ["## Claims", table_of(("", "claim", "measured"), layout.claims)]
    if layout.failed:
        parts += ["## Failed", table_of(("trial", "error"), [(name, f"`{error}`") for name, error in layout.failed])]
    if layout.not_run:
        parts += ["## Not run", "\n".join(f"- {title}" for title in layout.not_run)]
    return "\n\n".join(parts) + "\n"


def table_of(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), "|---" * len(header) + "|", *map(line, lines)])
