"""Files that a recipe leaves behind: results.parquet, report.md, PNG curves, report.html."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.papers.pages import plots
from benchmarks.papers.pages.figures import Figures, Record, rows_of
from benchmarks.papers.pages.layout import lay_out
from benchmarks.papers.pages.markdown import markdown
from benchmarks.papers.pages.page import page
from benchmarks.papers.trials.trial import AnyTrial, Recipe

SCHEMA = pa.schema(
    dict.fromkeys(("table", "column", "row", "tried"), pa.string())
    | {"seed": pa.int64(), "epoch": pa.int64(), "split": pa.string(), "metric": pa.string(), "value": pa.float64()}
    | {"alpha": pa.float64(), "state": pa.string(), "key": pa.string()}
)


@dataclass(frozen=True)
class Report:
    """A report that was written.

    ``good``: every trial ended well, and no claim that could be judged fails.
    """

    markdown: str
    page: Path
    good: bool


def write_report(recipe: Recipe, trials: Sequence[AnyTrial], records: Sequence[Record], out: Path) -> Report:
    """Write the report of the records of ``trials`` under ``out``. Figures are of these trials alone."""
    out.mkdir(parents=True, exist_ok=True)
    by_key = {record["key"]: record for record in records}
    figures = Figures(recipe, by_key)
    pq.write_table(pa.Table.from_pylist(rows_of(trials, by_key), schema=SCHEMA), out / "results.parquet")
    layout = lay_out(
        recipe, figures, records, None if recipe.findings is None else recipe.findings(recipe, by_key, out)
    )
    drawn: dict[str, Path] = {}
    if plots.can_draw():
        for section in layout.sections:
            path = out / (re.sub(r"[^A-Za-z0-9_-]+", "-", section.name) + ".png")
            if plots.draw(section, path):
                drawn[section.name] = path
    text = markdown(layout)
    (out / "report.md").write_text(text, "utf-8")
    (out / "report.html").write_text(page(layout, drawn), "utf-8")
    good = not layout.failed and all(verdict == "holds" for verdict, _, _ in layout.claims)
    return Report(text, out / "report.html", good)
