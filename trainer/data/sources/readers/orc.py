"""ORC, as Hive and Spark write it. Torch-free."""

from __future__ import annotations

from trainer.data.sources.readers.scanned import ScannedReader


class OrcReader(ScannedReader):
    name = "ORC"
    suffixes = (".orc",)
    remedy = "the file may be truncated or not ORC: write it again"
    arrow_format = "OrcFileFormat"
