"""Checkpoints in a run storage: the ranks put the files that they wrote, and each host reads them through local views.

In the storage a checkpoint is a folder of trainer.storage.folders. On a host its *view* is a local directory of the
same name with the manifest and VIEW_FILE. The other files are linked into the view from the host's cache when they are
first read.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.durable_files import appearing, temporary_beside
from trainer.checkpoint.agreement import CheckpointError
from trainer.checkpoint.names import new_name, newest_first, replaced_by
from trainer.storage.base import FileContent, NotWholeError, StorageError, content_of
from trainer.storage.cache import cache_of_host
from trainer.storage.folders import Folders, StoredFolder
from trainer.storage.storage_registry import open_storage

MANIFEST_FILE = "manifest.json"
VIEW_FILE = "stored.json"

Entries = Iterable[dict[str, Any]]


# --- writing ---------------------------------------------------------------------------------------------------------


def put_files(folders: Folders, token: str, directory: Path, entries: Entries) -> None:
    """Put the files of ``directory`` that manifest entries name, and add them to this host's cache for later reads.

    Raises:
        StorageError: a file could not be put.
    """
    cache = cache_of_host()
    for entry in entries:
        folders.put(token, entry["file"], directory / entry["file"])
        cache.adopt(directory / entry["file"], FileContent(entry["bytes"], entry["sha256"]))


def put_record(
    folders: Folders, folder: Path, token: str, step: int, entries: Entries, keep_last: int, fence: Callable[[], None]
) -> str:
    """Put manifest and record, so that the checkpoint appears in the storage; return its name.

    All other files must have been put. ``entries`` are the manifest's entries, for the files of all ranks. ``folder``
    is the local directory with the manifest. ``fence`` is called right before the record is put. Afterwards older
    checkpoints are removed, so that ``keep_last`` stay.

    Raises:
        StorageError: a file is missing from the storage, or the storage cannot be reached.
        CheckpointError: another writer took the name.
    """
    folders.put(token, MANIFEST_FILE, folder / MANIFEST_FILE)
    files = {entry["file"]: FileContent(entry["bytes"], entry["sha256"]) for entry in entries}
    files[MANIFEST_FILE] = content_of(folder / MANIFEST_FILE)
    names = folders.names()
    name = new_name(step, names)
    # Chosen before the record is put, for the same reason as in trainer.checkpoint.format.
    replaced = replaced_by(name, names, keep_last)
    fence()
    if not folders.commit(StoredFolder(name, token, files)):
        raise CheckpointError(f"{folders}/{name} was written by another attempt meanwhile: end all but one")
    for each in replaced:
        # The next save removes those that are left.
        with contextlib.suppress(StorageError):
            folders.remove(each)
    return name


# --- reading ---------------------------------------------------------------------------------------------------------


def show(folders: Folders | None, directory: Path) -> None:
    """Make ``directory`` hold a view of each complete checkpoint of the storage, and no other view.

    If ``folders`` is None, do nothing: without a storage the checkpoints themselves are in ``directory``. Any process
    of the host may call this at any time. A checkpoint that is not complete causes a warning and gets no view.

    Raises:
        StorageError: the storage cannot be reached; views from earlier calls may be out of date.
    """
    if folders is None:
        return
    found = set()
    for name in newest_first(folders.names()):
        try:
            said = {"uri": folders.storage.uri, "prefix": folders.prefix, **folders.read(name)._asdict()}
            make_view(json.loads(json.dumps(said)), directory / name)
            found.add(name)
        except (NotWholeError, CheckpointError) as error:
            warnings.warn(f"checkpoint passed over, the previous one is used: {error}", RuntimeWarning, stacklevel=2)
    for path in directory.glob("step-*"):
        if path.name not in found:
            shutil.rmtree(path, ignore_errors=True)


def described(directory: Path) -> dict[str, Any] | None:
    """Return the content of a view's VIEW_FILE: uri and prefix of the storage, and name, token and files of the folder.

    None if ``directory`` is no view, but a checkpoint that was written locally.
    """
    try:
        said: dict[str, Any] = json.loads((directory / VIEW_FILE).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return said


def make_view(said: dict[str, Any], directory: Path) -> None:
    """Make ``directory`` the view that ``said``, a result of :func:`described` (perhaps on another host), describes.

    If it is that view already, nothing happens.

    Raises:
        CheckpointError: the stored manifest is damaged.
        StorageError: the storage cannot be reached.
    """
    if described(directory) == said:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with appearing(directory, durable=False) as temporary:
            temporary.mkdir()
            (temporary / VIEW_FILE).write_text(json.dumps(said), "utf-8")
            view = View.of(temporary)
            assert view is not None
            view.fetch(MANIFEST_FILE)
    except OSError:
        # Another process of the host has made it meanwhile.
        if described(directory) != said:
            raise


class View(NamedTuple):
    """A local view, ``directory``, of a stored checkpoint, which is ``folder`` among ``folders`` of the storage."""

    directory: Path
    folders: Folders
    folder: StoredFolder

    @classmethod
    def of(cls, directory: Path) -> View | None:
        """Return the view of a stored checkpoint in ``directory``; None if that is a checkpoint written locally."""
        said = described(directory)
        if said is None:
            return None
        files = {path: FileContent(*content) for path, content in said["files"].items()}
        folders = Folders(open_storage(said["uri"]), said["prefix"])
        return cls(directory, folders, StoredFolder(said["name"], said["token"], files))

    def fetch(self, file: str) -> None:
        """Link the checkpoint's file ``file`` into the view, unless it is linked.

        Raises:
            CheckpointError: the stored file is missing or damaged.
            StorageError: the storage cannot be reached.
        """
        if not (self.directory / file).exists():
            self._link(file, self.directory / file)

    def verify(self) -> None:
        """Check every byte of the checkpoint.

        Files are fetched into the cache, but not linked into the view: a reader may need only some of them.

        Raises:
            CheckpointError: a file is missing or changed; the message names the first.
            StorageError: the storage cannot be reached.
        """
        for file in self.folder.files:
            checked = temporary_beside(self.directory / file)
            self._link(file, checked)
            checked.unlink()

    def _link(self, file: str, to: Path) -> None:
        try:
            self.folders.fetch(self.folder, file, to, cache_of_host())
        except NotWholeError as error:
            raise CheckpointError(str(error)) from error
