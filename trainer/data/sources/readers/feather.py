"""Feather, which is Arrow's IPC file format. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.sources.readers.scanned import ScannedReader

if TYPE_CHECKING:
    import pyarrow.dataset as pads


class FeatherReader(ScannedReader):
    name = "Feather"
    suffixes = (".feather", ".arrow")
    remedy = "the file may be truncated, or a stream or Feather 1: write it with pyarrow.feather.write_feather"

    @staticmethod
    def file_format() -> pads.FileFormat:
        import pyarrow.dataset as pads

        return pads.IpcFileFormat()
