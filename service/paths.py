"""Which files of this machine a dataset may name: those under the data roots, after every symbolic link is resolved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from service.errors import invalid
from service.settings import Settings
from trainer.spec import DatasetSpec

SUFFIXES = (".parquet", ".pq", ".csv", ".csv.gz")


def local_path(uri: str, beside: Path | None = None) -> Path:
    """The path of a local uri: absolute, ``file://``, or relative to the working directory; a bare file name is taken
    from ``beside`` where that is given. Raises ValueError for another scheme or host."""
    if "://" in uri:
        parts = urlsplit(uri)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise ValueError(f"'{uri}' is neither a local path nor file://")
        return Path(unquote(parts.path))
    path = Path(uri)
    if beside is not None and path.parent == Path(".") and not path.is_absolute():
        return beside / path
    return path.absolute()


def allowed(settings: Settings, uri: str, field: str, beside: Path | None = None) -> Path:
    """The real path behind ``uri``. Raises 422 where it lies outside the data roots, is missing or cannot be read.

    What lies outside is not looked at, so that the answer tells nothing about it.
    """
    try:
        path = Path(os.path.realpath(local_path(uri, beside)))
    except ValueError as error:  # another scheme; a null byte
        raise invalid([(field, str(error))]) from None
    if not any(path.is_relative_to(root) for root in settings.data_roots):
        roots = ", ".join(str(root) for root in settings.data_roots)
        remedy = "put the file there, or add its directory to EVENKEEL_DATA_ROOTS where the service runs"
        shown = f"'{uri}'" if os.path.isabs(uri) or "://" in uri else f"'{uri}', from here {local_path(uri, beside)},"
        raise invalid([(field, f"{shown} lies outside the data roots ({roots})")], remedy)
    if not path.exists():
        raise invalid([(field, f"'{uri}': no such file or directory ({path})")], "check the path")
    for file in data_files(path):
        inner = Path(os.path.realpath(file))
        if not any(inner.is_relative_to(root) for root in settings.data_roots):
            raise invalid(
                [(field, f"'{uri}': {file.name} is a link that leads outside the data roots")], "remove the link"
            )
        if not os.access(inner, os.R_OK):
            raise invalid([(field, f"'{uri}': {file.name} cannot be read by the service")], "check its permissions")
    return path


def data_files(path: Path) -> Iterator[Path]:
    """The data files of a file or a directory, sorted; hidden ones and those beginning with ``_`` are not data."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
        if not hidden and file.name.endswith(SUFFIXES):
            yield file


def resolved(settings: Settings, spec: DatasetSpec) -> DatasetSpec:
    """The dataset with every uri made the real absolute path, each checked. Raises 422 naming the field."""
    document = spec.model_dump(mode="json")
    main = allowed(settings, spec.uri, "uri")
    # The manifest's own directory, not a link's target: that is where the user put the other files.
    beside = local_path(spec.uri).parent
    document["uri"] = str(main)
    for name, feature in spec.features.items():
        if feature.join is not None:
            path = allowed(settings, feature.join.uri, f"features.{name}.join.uri", beside)
            document["features"][name]["join"]["uri"] = str(path)
    for name, graph in spec.graphs.items():
        document["graphs"][name]["uri"] = str(allowed(settings, graph.uri, f"graphs.{name}.uri", beside))
    return DatasetSpec.model_validate(document)
