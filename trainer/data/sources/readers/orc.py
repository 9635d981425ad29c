"""ORC, as Hive and Spark write it. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.sources.readers.scanned import ScannedReader

if TYPE_CHECKING:
    import pyarrow.dataset as pads


class OrcReader(ScannedReader):
    name = "ORC"
    suffixes = (".orc",)
    remedy = "the file may be truncated or not ORC: write it again"

    @staticmethod
    def file_format() -> pads.FileFormat:
        import pyarrow.dataset as pads

        return pads.OrcFileFormat()
