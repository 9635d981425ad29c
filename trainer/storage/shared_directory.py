"""A directory that all hosts mount, as a run storage. Files from the same file system are hard-linked, not copied."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from embeddings.durable_files import appearing, fsync_path, make_directory, temporary_beside
from trainer.storage.base import MissingFileError, StorageError, StoredFile


class SharedDirectory:
    """A run storage of the files below ``root``, a directory that is made when the first file is put."""

    def __init__(self, root: Path):
        self.root = root
        self.uri = root.as_uri()

    def put_file(self, name: str, source: Path) -> None:
        source.stat()
        with self._reaching(name):
            make_directory((self.root / name).parent)
            with appearing(self.root / name) as temporary:
                link_or_copy(source, temporary)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self.root / name
        with self._reaching(name):
            make_directory(path.parent)
            temporary = temporary_beside(path)
            try:
                temporary.write_bytes(data)
                fsync_path(temporary)
                os.link(temporary, path)
            except FileExistsError:
                return path.read_bytes() == data
            finally:
                temporary.unlink(missing_ok=True)
            fsync_path(path.parent)
        return True

    def read(self, name: str) -> bytes:
        with self._reaching(name):
            return (self.root / name).read_bytes()

    def fetch(self, name: str, to: Path) -> None:
        with self._reaching(name):
            shutil.copyfile(self.root / name, to)

    def path(self, name: str) -> Path | None:
        return self.root / name

    def list(self, prefix: str) -> list[StoredFile]:
        found = []
        with self._reaching(prefix):
            for folder, _, names in os.walk(self.root / prefix):
                for name in names:
                    path = Path(folder, name)
                    # A name that another host has just deleted, or one that is being written.
                    with contextlib.suppress(FileNotFoundError):
                        if not name.startswith(".tmp-"):
                            found.append(StoredFile(path.relative_to(self.root).as_posix(), path.stat().st_size))
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.root / name
            with self._reaching(name):
                path.unlink(missing_ok=True)
                # Empty folders are removed; a host that puts a file into one creates it again.
                for folder in path.parents:
                    if folder == self.root or not _remove_empty(folder):
                        break

    @contextlib.contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise MissingFileError(f"{self.uri}/{name}: there is no such file") from error
        except OSError as error:
            raise StorageError(
                f"{self.uri}/{name}: {error.strerror or error}: check that the directory is mounted and has space"
            ) from error


def link_or_copy(source: Path, to: Path) -> None:
    """Make ``to`` a hard link of ``source``, or its copy where the two are on different file systems."""
    try:
        os.link(source, to)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, to)


def _remove_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True
