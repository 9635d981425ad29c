"""Files that a recipe leaves behind: results.parquet, and the report's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.papers.pages.figures import Figures, Record, rows_of
from benchmarks.papers.pages.layout import lay_out
from benchmarks.papers.trials.trial import AnyTrial, Recipe
from trainer.report_pages.page import Report

SCHEMA = pa.schema(
    dict.fromkeys(("table", "column", "row", "tried"), pa.string())
    | {"seed": pa.int64(), "epoch": pa.int64(), "split": pa.string(), "metric": pa.string(), "value": pa.float64()}
    | {"alpha": pa.float64(), "state": pa.string(), "key": pa.string()}
)


def write_report(recipe: Recipe, trials: Sequence[AnyTrial], records: Sequence[Record], out: Path) -> Report:
    """Write the report of the records of ``trials`` under ``out``. Figures are of these trials alone."""
    out.mkdir(parents=True, exist_ok=True)
    by_key = {record["key"]: record for record in records}
    pq.write_table(pa.Table.from_pylist(rows_of(trials, by_key), schema=SCHEMA), out / "results.parquet")
    findings = None if recipe.findings is None else recipe.findings(recipe, by_key, out)
    report = lay_out(recipe, Figures(recipe, by_key), records, findings)
    report.write(out)
    return report
