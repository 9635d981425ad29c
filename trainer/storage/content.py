"""What a file holds, in two figures that can be checked after a fetch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple


class FileContent(NamedTuple):
    """Size in bytes and sha256, in hexadecimal digits."""

    num_bytes: int
    sha256: str

    def describes(self, path: Path) -> bool:
        """Read the file; return whether this is its content."""
        return path.stat().st_size == self.num_bytes and content_of(path) == self


def content_of(path: Path) -> FileContent:
    """Read the file and return its content's figures."""
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        return FileContent(num_bytes, hashlib.file_digest(file, "sha256").hexdigest())
