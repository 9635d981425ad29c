"""Feather, which is Arrow's IPC file format. Torch-free."""

from __future__ import annotations

from trainer.data.sources.readers.scanned import ScannedReader


class FeatherReader(ScannedReader):
    name = "Feather"
    suffixes = (".feather", ".arrow")
    remedy = "the file may be truncated, or a stream or Feather 1: write it with pyarrow.feather.write_feather"
    arrow_format = "IpcFileFormat"
