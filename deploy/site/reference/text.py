"""Docstrings and lists as Markdown whose lines are short enough to read as text."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable

WIDTH = 150
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|Yields):$")
_ENTRY = re.compile(r"^(\*{0,2}[\w.\[\]*, ]+): (.*)$")


def page(title: str, source: str, *parts: str) -> str:
    """Return a page of Markdown: title, a note that names the source, and the given parts."""
    note = f"<!-- Generated from {source} by `make docs`. -->"
    return "\n\n".join([f"# {title}", note, *(part.strip("\n") for part in parts if part.strip())]) + "\n"


def plain(text: str) -> str:
    """Return text with the markup of reStructuredText replaced by that of Markdown."""
    text = re.sub(r":(?:class|mod|func|meth|data|attr):`~?([^`]*)`", r"`\1`", text)
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    # Outside of code, HTML would drop these.
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in re.split(r"(`[^`]*`)", text))


def paragraph(text: str, indent: str = "", first: str = "") -> str:
    """Return text filled to the width, with ``first`` (a bullet) before the first line, ``indent`` before others."""
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent=first or indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def bullets(items: Iterable[str]) -> str:
    """Return a list, with an item's own lines below it."""
    return "\n".join(paragraph(item, "  ", "- ") for item in items)


def docstring(of: object) -> str:
    """Return a docstring as Markdown: its prose, then each section of Google's style as a list or a block of code."""
    lines = (inspect.getdoc(of) or "").splitlines()
    found: list[str] = []
    section, block = "", list[str]()

    def close() -> None:
        if section == "Example":
            found.append("```python\n" + "\n".join(block).strip("\n") + "\n```")
        elif section:
            found.append(f"{section}:\n\n{bullets(_entries(block))}")
        else:
            found.extend(_prose(block))

    for line in lines:
        if match := _SECTION.match(line):
            close()
            section, block = match[1], []
        else:
            block.append(line.removeprefix("    ") if section else line)
    close()
    return "\n\n".join(part for part in found if part.strip())


def _prose(lines: list[str]) -> list[str]:
    parts: list[str] = []
    for text in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        rows = text.splitlines()
        if rows and all(row.startswith("    ") for row in rows):
            parts.append(text)
        elif any(row.startswith(("- ", "* ")) for row in rows):
            listed = re.split(r"\n(?=[-*] )", text)
            head = "" if listed[0].startswith(("- ", "* ")) else paragraph(plain(listed.pop(0)))
            parts += [part for part in (head, bullets(plain(item[2:]) for item in listed)) if part]
        else:
            parts.append(paragraph(plain(text)))
    return parts


def _entries(lines: list[str]) -> list[str]:
    entries: list[str] = []
    for line in filter(str.strip, lines):
        if line.startswith(" ") and entries:
            entries[-1] += " " + plain(line.strip())
        elif match := _ENTRY.match(line):
            entries.append(f"`{match[1]}`: {plain(match[2])}")
        elif entries:
            entries[-1] += " " + plain(line)
        else:
            entries.append(plain(line))
    return entries
