"""Sealed folders: a manifest lists each file with its sha256, and has a sha256 of its own content. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from embeddings.durable_files import fsync_path, write_json
from trainer.storage.base import content_of

MANIFEST = "manifest.json"


class SealError(ValueError):
    """Error: a file of a sealed folder is missing or was changed; the message names it and the remedy."""


def seal(folder: Path, body: Mapping[str, Any], files: Iterable[str]) -> str:
    """Write a manifest with the entries of ``body`` and a list of ``files``; return the sha256 of its content.

    The manifest and the files are flushed to disk before it returns.
    """
    listed = []
    for name in sorted(files):
        fsync_path(folder / name)
        found = content_of(folder / name)
        listed.append({"name": name, "bytes": found.num_bytes, "sha256": found.sha256})
    content = {**body, "files": listed}
    digest = _digest(content)
    write_json(folder / MANIFEST, {"manifest": content, "sha256": digest})
    return digest


def unseal(folder: Path, sha256: str | None = None) -> dict[str, Any]:
    """Check every file of a folder against its manifest, and return the manifest's content.

    ``sha256``: checksum that the content must have, from a source other than the folder: anyone who can write to the
    folder can replace its manifest. None: not checked.

    Raises:
        SealError: a file is missing or changed, or the manifest has another checksum.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_text("utf-8"))
        content, named = document["manifest"], document["sha256"]
    except OSError as error:
        raise SealError(f"{path} cannot be read: {error.strerror or error}: is it the folder of an export?") from None
    except (ValueError, KeyError, TypeError):
        raise SealError(f"{path} was changed or truncated after it was written: export again") from None
    if _digest(content) != named:
        raise SealError(
            f"{path} was changed after it was written: its sha256 is not the one that it records; export again"
        )
    if sha256 is not None and sha256 != named:
        raise SealError(f"{path} has sha256 {named}, not {sha256}: it is another export")
    for entry in content["files"]:
        _check(folder, entry)
    return content


def _check(folder: Path, entry: Mapping[str, Any]) -> None:
    if Path(entry["name"]).name != entry["name"]:
        raise SealError(f"{folder / MANIFEST} names a file outside its folder: {entry['name']!r}")
    path = folder / entry["name"]
    try:
        found = content_of(path)
    except OSError as error:
        raise SealError(f"{path} cannot be read: {error.strerror or error}: export again") from None
    if found != (entry["bytes"], entry["sha256"]):
        raise SealError(f"{path} was changed after it was written: its sha256 is not the manifest's; export again")


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
