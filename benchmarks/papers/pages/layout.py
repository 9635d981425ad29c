"""The report of a recipe: tables with published figures next to ours, choices by validation, claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.papers.pages.figures import Cell, Figures, Record
from benchmarks.papers.trials.trial import Column, Recipe, Table
from trainer.report_pages.page import Report
from trainer.report_pages.section import NOT_RUN, Findings, Panel, Section, verdict
from trainer.search.records import facts


def lay_out(recipe: Recipe, figures: Figures, records: Sequence[Record], findings: Findings | None = None) -> Report:
    """Lay out a report; ``records``: the records of the requested trials, including failed ones."""
    shown = [section_of(table, figures) for table in recipe.tables]
    not_run = tuple(table.title for table, one in zip(recipe.tables, shown, strict=True) if one is None)
    claims = []
    for judgement in map(figures.judge, recipe.claims):
        if judgement.gain is not None:
            measured = f"{judgement.gain:+.4f} (at least {judgement.claim.at_least:+.4f}; {_seeds(judgement.seeds)})"
            claims.append(verdict(judgement.claim.text, judgement.holds, measured))
    failed = tuple((record["name"], str(record["error"])) for record in records if record["state"] != "done")
    findings = findings or Findings()
    sections = (*filter(None, shown), *findings.sections)
    verdicts = (*claims, *findings.claims)
    return Report(recipe.title, recipe.source, recipe.protocol, sections, verdicts, failed, not_run)


def write_report(recipe: Recipe, records: Sequence[Record], out: Path) -> Report:
    """Write the report of records under ``out``."""
    by_key = {record["key"]: record for record in records}
    findings = None if recipe.findings is None else recipe.findings(recipe, by_key, out)
    report = lay_out(recipe, Figures(recipe, by_key), records, findings)
    report.write(out)
    return report


def section_of(table: Table, figures: Figures) -> Section | None:
    """Return the table as it is shown, or None if none of its trials has ended.

    The lines of a method are our figures, their standard deviation, the published figures and the difference.
    """
    rows = figures.rows(table)
    cells = {(row, column): figures.cell(table, column, row) for row in rows for column in table.columns}
    columns = [column for column in table.columns if any(cells[row, column] for row in rows)]
    if not columns:
        return None
    lines: list[tuple[str, ...]] = []
    behind: list[Record] = []
    notes = [f"Published: {table.published_is}."] if table.published else []
    for row in rows:
        of_row = [cells[row, column] for column in columns]
        if any(of_row):
            lines += _lines(table, row, columns, of_row)
            behind += [record for cell in of_row if cell is not None for record in cell.records]
            notes += _choices(row, columns, of_row)
    notes += _fewer_seeds(cells)
    missing = [row for row in rows if not any(cells[row, column] for column in columns)]
    missing += [column.label for column in table.columns if column not in columns]
    if missing:
        notes.append(f"Not run: {'; '.join(missing)}.")
    header = ("method", "", *(column.label for column in columns))
    notes.append(facts(behind))
    panels = _panels(table, columns, figures)
    return Section(table.name, table.title, header, tuple(lines), tuple(notes), panels, len(columns))


def _panels(table: Table, columns: Sequence[Column], figures: Figures) -> tuple[Panel, ...]:
    """Return a panel for each column: its metric over epochs, a curve for each row.

    There are no panels if no run has two epochs, or if only the last epoch counts.
    """
    rows = figures.rows(table)
    curves = {(row, column): figures.curve(table, column, row) for row in rows for column in columns}
    if table.when == "last" or max(map(len, curves.values())) < 2:
        return ()
    return tuple(
        Panel(column.label, "epoch", f"{column.split} {column.metric}",
              {row: [(epoch, *one) for epoch, one in enumerate(curves[row, column], 1)] for row in rows})
        for column in columns
    )  # fmt: skip


def _lines(table: Table, row: str, columns: Sequence[Column], cells: Sequence[Cell | None]) -> list[tuple[str, ...]]:
    lines = [(row, "ours", *(NOT_RUN if cell is None else joined(cell.mean, table.digits) for cell in cells))]
    counts = {len(cell.seeds) for cell in cells if cell is not None and cell.sd}
    if counts:
        spread = (joined(cell.sd, table.digits) if cell is not None and cell.sd else "" for cell in cells)
        lines.append(("", f"sd of {' or '.join(map(str, sorted(counts)))} seeds", *spread))
    published = [table.published.get((row, column.label)) for column in columns]
    if any(published):
        lines.append(("", "published", *(joined(one, table.digits) if one else NOT_RUN for one in published)))
        if table.comparable:
            pairs = zip(cells, published, strict=True)
            lines.append(("", "difference", *(_difference(cell, one, table.digits) for cell, one in pairs)))
    return lines


def joined(values: Sequence[float], digits: int) -> str:
    """Return the figures as the papers print them: no zero before the point, slashes between epochs."""
    return "/".join(_figure(value, digits) for value in values)


def _figure(value: float, digits: int) -> str:
    if abs(value) >= 10:
        return f"{value:.2f}"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and not text.startswith(("1", "-1")) else text


def _difference(cell: Cell | None, published: Sequence[float] | None, digits: int) -> str:
    if cell is None or not published or len(published) != len(cell.mean):
        return ""
    pairs = zip(cell.mean, published, strict=True)
    return "/".join(f"{measured - stated:+.{digits}f}" for measured, stated in pairs)


def _choices(row: str, columns: Sequence[Column], cells: Sequence[Cell | None]) -> list[str]:
    """Return the candidate chosen on the validation split, by column."""
    said = []
    seen: set[str] = set()
    for column, cell in zip(columns, cells, strict=True):
        if cell is None or column.column in seen:
            continue
        seen.add(column.column)
        if cell.tried:
            said.append(f"{row}, {column.column}: {cell.tried}, by the validation split.")
    return said


def _fewer_seeds(cells: Mapping[tuple[str, Column], Cell | None]) -> list[str]:
    """Return the cells that lack seeds that other cells of the table have."""
    all_seeds = {seed for cell in cells.values() if cell is not None for seed in cell.seeds}
    fewer = {
        f"{row}, {column.column}": cell.seeds
        for (row, column), cell in cells.items()
        if cell is not None and set(cell.seeds) != all_seeds
    }
    return [
        f"{where}: seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))} alone."
        for where, seeds in fewer.items()
    ]


def _seeds(seeds: Sequence[int]) -> str:
    return "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
