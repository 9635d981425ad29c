"""TSV: as CSV, quotes included, with tabs in the place of commas. Torch-free."""

from __future__ import annotations

from trainer.data.sources.readers.base import with_compressions
from trainer.data.sources.readers.csv import CsvReader


class TsvReader(CsvReader):
    name = "TSV"
    suffixes = with_compressions(".tsv")
    remedy = "correct that row: a header line, tab-separated, the same number of fields in each row, UTF-8"
    delimiter = "\t"
