"""Files and folders that appear whole or not at all, and are still there after a power failure.

A reader sees the old content or the new: a file is written under a temporary name in the same folder, synced, and
renamed. A killed writer leaves files named ``.tmp-NAME-RANDOM.tmp``. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Sync a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Sync ``folder`` and every file and folder below it to the disk."""
    for directory, _, names in os.walk(folder):
        for name in names:
            fsync_path(Path(directory) / name)
        fsync_path(Path(directory))


def make_directory(path: Path) -> None:
    """Create ``path`` and its missing parents, and sync them to the disk."""
    if path.is_dir():
        return
    make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    fsync_path(path.parent)


def temporary_beside(path: Path) -> Path:
    """Return a path in the folder of ``path``, with a random name that nothing else has."""
    return path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex}.tmp")


@contextlib.contextmanager
def appearing(path: Path, *, durable: bool = True, fence: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yield a temporary path for a new file or folder, which is renamed to ``path`` when the body is done.

    Args:
        path: Final path; a file that exists there is replaced.
        durable: True to sync before and after the renaming; even with False a reader never sees half a file.
        fence: Function called right before the renaming. If it raises, ``path`` stays as it was.

    Raises:
        OSError: The disk is full, or ``path`` is an existing folder; nothing is left behind.

    Example:
        >>> with appearing(Path(directory) / "report.txt") as place:
        ...     _ = place.write_text("whole")
        >>> (Path(directory) / "report.txt").read_text()
        'whole'
    """
    temporary = temporary_beside(path)
    try:
        yield temporary
        if durable:
            fsync_tree(temporary) if temporary.is_dir() else fsync_path(temporary)
        if fence is not None:
            fence()
        os.rename(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
    if durable:
        fsync_path(path.parent)


def write_file(
    path: Path, data: bytes, *, mode: int = 0o666, durable: bool = True, fence: Callable[[], None] | None = None
) -> None:
    """Put ``data`` at ``path`` in one step; ``durable`` and ``fence`` are as in :func:`appearing`.

    ``mode`` are the file's permissions from its first byte on, less the process's umask.
    """
    with appearing(path, durable=durable, fence=fence) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


def write_json(path: Path, document: object, *, fence: Callable[[], None] | None = None) -> None:
    """Put ``document`` at ``path`` as JSON in one step, synced to the disk."""
    write_file(path, json.dumps(document, indent=1).encode(), fence=fence)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
