"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table_of(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), "|---" * len(header) + "|", *map(line, lines)])
