"""Fetching a public data set from its publisher, and writing it as Parquet. Torch-free."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pyarrow.parquet as pq

from embeddings.durable_files import appearing, make_directory
from trainer.data.errors import DataError
from trainer.data.published.conversions import Downloads
from trainer.data.published.registry import PUBLISHED, PublishedData, RemoteFile

TIMEOUT_SECONDS = 60.0
_PIECE_BYTES = 1 << 20


def get(name: str, to: Path, downloaded: Path | None = None, told: Callable[[str], None] = print) -> list[Path]:
    """Fetch a data set and write its Parquet files.

    ``downloaded``: a folder with the publisher's files, if this machine cannot reach the publisher; None: the files are
    fetched into ``to``, which is created. ``told`` is called with each line of text for the user.

    Returns:
        The paths of the Parquet files. Nothing is fetched if all of them exist.

    Raises:
        DataError: the publisher does not answer, or a file has another checksum or another form than expected.
    """
    if name not in PUBLISHED:
        known = ", ".join(sorted(PUBLISHED))
        raise DataError("is no data set that can be fetched", where=name, remedy=f"there are {known}")
    data = PUBLISHED[name]
    paths = [to / f"{table}.parquet" for table in data.tables]
    if all(path.exists() for path in paths):
        told(f"{', '.join(map(str, paths))}: there already")
        return paths
    told(f"{data.title}. Terms: {data.terms}")
    with tempfile.TemporaryDirectory(prefix="evenkeel-") as folder:
        files = {}
        for file in data.files:
            files[file.name] = Path(folder) / file.name if downloaded is None else downloaded / file.name
            if downloaded is None:
                _fetch(file, files[file.name])
            told(_checked(file, files[file.name]))
        _write(data, files, paths)
    for path in paths:
        told(f"{path}: {pq.read_metadata(path).num_rows:,} rows")
    return paths


def _fetch(file: RemoteFile, path: Path) -> None:
    try:
        with (
            httpx.stream("GET", file.url, follow_redirects=True, timeout=TIMEOUT_SECONDS) as answer,
            open(path, "wb") as out,
        ):
            answer.raise_for_status()
            for piece in answer.iter_bytes(_PIECE_BYTES):
                out.write(piece)
    except httpx.HTTPError as error:
        raise DataError(
            f"cannot be fetched: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=file.url,
            remedy="try again; or fetch it elsewhere, and name its folder with --from",
        ) from None


def _checked(file: RemoteFile, path: Path) -> str:
    """Describe a file's checksum, and whether a published checksum is there to compare with."""
    if not path.is_file():
        raise DataError("is not there", where=str(path), remedy=f"fetch {file.url} into this folder")
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with open(path, "rb") as content:
        while piece := content.read(_PIECE_BYTES):
            md5.update(piece)
            sha256.update(piece)
    if file.md5 is not None and md5.hexdigest() != file.md5:
        raise DataError(
            f"has MD5 {md5.hexdigest()}, and its publisher says {file.md5}",
            where=file.url,
            remedy="try again: the download is damaged, or the publisher has another version now",
        )
    known = "MD5 as its publisher says" if file.md5 is not None else "there is no published checksum to compare with"
    return f"{file.name}: {path.stat().st_size:,} bytes, sha256 {sha256.hexdigest()}; {known}"


def _write(data: PublishedData, files: Downloads, paths: list[Path]) -> None:
    try:
        tables = data.convert(files)
    except Exception as error:  # A file of another form may cause any error.
        raise DataError(
            f"does not have the expected form: {type(error).__name__}: {str(error).splitlines()[0]}",
            where=", ".join(file.url for file in data.files),
            remedy="see whether the publisher has another version now",
        ) from error
    make_directory(paths[0].parent.absolute())
    for path in paths:
        with appearing(path) as temporary:
            pq.write_table(tables[path.stem], temporary, compression="zstd")
