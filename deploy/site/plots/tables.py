"""Read tables of docs/reports, and the numbers in their cells."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

REPORTS = Path(__file__).resolve().parents[3] / "docs" / "reports"
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\d+|\.\d+)(?:e[-+]?\d+)?")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A figure and its sample standard deviation, where the table has one."""

    value: float
    deviation: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        name: The report and the header's beginning, for messages.
        columns: Headings after the columns that name a row; the second column of the same heading ends in `` (2)``.
        rows: Cells without marks of emphasis and code, by the row's name, in the table's order.
    """

    name: str
    columns: list[str]
    rows: dict[str, list[str]]

    def cell(self, row: str, column: str) -> str:
        """Return the text of a cell.

        Args:
            row: Name of the row; several columns are joined by ``" / "``, an empty cell stands for the one above.
            column: The heading, or a beginning of it that no other heading shares.

        Raises:
            ValueError: There is no such row, or not exactly one such column.
        """
        if row not in self.rows:
            raise ValueError(
                f"{self.name}: no row {row!r}, but {', '.join(map(repr, self.rows))}: name the row as the table does "
                "in deploy/site/plots"
            )
        places = [number for number, heading in enumerate(self.columns) if heading == column]
        places = places or [number for number, heading in enumerate(self.columns) if heading.startswith(column)]
        if len(places) != 1:
            raise ValueError(
                f"{self.name}: {len(places)} columns begin with {column!r}, of {', '.join(map(repr, self.columns))}: "
                "name one as the table does in deploy/site/plots"
            )
        return self.rows[row][places[0]]

    def numbers(self, row: str, column: str) -> list[float]:
        """Return all numbers of a cell.

        Raises:
            ValueError: The cell has no number, or :meth:`cell` raises.
        """
        text = self.cell(row, column)
        found = [float(number.replace(",", "")) for number in _NUMBER.findall(text)]
        if not found:
            raise ValueError(f"{self.name}: no number in {text!r} ({row}, {column}): leave the row out of the plot")
        return found

    def measured(self, row: str, column: str) -> Measured:
        """Return the first number of a cell, with the one after ``±`` or in brackets as its deviation.

        Raises:
            ValueError: The cell has no number, or :meth:`cell` raises.
        """
        value, *others = self.numbers(row, column)
        text = self.cell(row, column)
        return Measured(value, others[0] if others and re.search(r"±|\d \(\.?\d[\d.]*\)", text) else None)


@dataclasses.dataclass(frozen=True)
class Source:
    """The position of a table in docs/reports.

    Attributes:
        report: The name of the page, without ``.md``.
        header: The beginning of the table's first line, as the page has it.
        keys: Number of columns that name a row.
        below: A heading, as the page has it: the table is the first one with this header below it. Empty: anywhere.
    """

    report: str
    header: str
    keys: int = 1
    below: str = ""

    def read(self) -> Table:
        """Return the table.

        Raises:
            ValueError: The page has no such table or several, or two rows of the table have the same name.
        """
        name = f"docs/reports/{self.report}.md, table {self.header!r}"
        lines = [line.strip() for line in (REPORTS / f"{self.report}.md").read_text("utf-8").splitlines()]
        if self.below:
            if self.below not in lines:
                raise ValueError(f"{name}: no heading {self.below!r}: name one in deploy/site/plots/registry.py")
            lines = lines[lines.index(self.below) :]
        starts = [
            number
            for number, line in enumerate(lines[:-1])
            if line.startswith(self.header) and re.fullmatch(r"\|[-:| ]+\|", lines[number + 1])
        ]
        if not starts or (len(starts) > 1 and not self.below):
            raise ValueError(f"{name}: {len(starts)} tables begin so: name one in deploy/site/plots/registry.py")
        columns = _told_apart(_cells(lines[starts[0]])[self.keys :])
        rows: dict[str, list[str]] = {}
        above = [""] * self.keys
        for line in lines[starts[0] + 2 :]:
            if not line.startswith("|"):
                break
            cells = _cells(line)
            above = [cell or last for cell, last in zip(cells[: self.keys], above, strict=True)]
            key = " / ".join(part for part in above if part)
            if key in rows:
                raise ValueError(f"{name}: two rows are named {key!r}: name them apart, or give more `keys`")
            rows[key] = cells[self.keys :]
        return Table(name, columns, rows)


def _told_apart(headings: list[str]) -> list[str]:
    return [
        heading if heading not in headings[:number] else f"{heading} ({headings[:number].count(heading) + 1})"
        for number, heading in enumerate(headings)
    ]


def _cells(line: str) -> list[str]:
    return [re.sub(r"\*\*|`", "", cell).strip() for cell in line.strip("|").split("|")]
