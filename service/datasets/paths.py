"""Check of the files, objects and topics that a dataset names: each must lie below a root that the operator allows.

Files are compared with the data roots after every symbolic link is resolved, objects with the roots in object storage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from service.core.errors import Problem, invalid
from service.core.settings import Settings
from service.core.text_validation import storable
from service.datasets import parquet_limits
from trainer.data.errors import DataAwayError, DataError
from trainer.data.sources.locations import beside as of_dataset
from trainer.data.sources.readers.registry import holds_rows
from trainer.data.sources.source import Source
from trainer.data.sources.tables.registry import is_log
from trainer.spec import DatasetSpec
from trainer.spec.messages import brokers_and_topic
from trainer.spec.problems import FieldProblem
from trainer.spec.uri_schemes import is_object, is_topic, split


def data_problem(error: DataError, field: str) -> Problem:
    """Return a 422 at ``field`` for an error in a user's data, or a 503 if the storage of the data does not answer."""
    problem = FieldProblem(field, f"{error.where}: {error.what}", error.remedy)
    if isinstance(error, DataAwayError):
        detail = f"{problem.field}: {problem.message}"
        return Problem(503, "data-unavailable", detail, [problem._asdict()], {"Retry-After": "10"})
    return invalid(problem)


def local_path(uri: str, beside: Path | None = None) -> Path:
    """Return the path of a local uri: absolute, ``file://``, or relative to the working directory.

    ``beside``: the directory to which a bare file name is relative.

    Raises:
        ValueError: The uri has another scheme or a host.
    """
    if "://" in uri:
        parts = urlsplit(uri)
        if "@" in parts.netloc:
            raise ValueError("a uri must not contain a user name or password: leave it out")
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ValueError(f"'{uri}' is neither a local path nor file://")
        return Path(unquote(parts.path))
    path = Path(uri)
    if beside is not None and path.parent == Path(".") and not path.is_absolute():
        return beside / path
    return path.absolute()


def allowed(settings: Settings, uri: str, field: str, beside: Path | None = None) -> Path:
    """Return the real path behind ``uri``.

    A path outside the data roots is not examined, so that the response reveals nothing about it.

    ``field``: the request's field that contains the uri. ``beside``: the directory to which a bare file name is
    relative.

    Raises:
        Problem: 422 if the path lies outside the data roots or among the service's own files, is missing, cannot be
            read, or exceeds the limits of this process (service.datasets.parquet_limits).
    """
    try:
        path = Path(os.path.realpath(local_path(uri, beside)))
    except ValueError as error:  # another scheme; a null byte
        raise invalid(FieldProblem(field, str(error))) from None
    if not any(path.is_relative_to(root) for root in settings.data_roots):
        roots = ", ".join(str(root) for root in settings.data_roots)
        remedy = "put the file there, or add its directory to EVENKEEL_DATA_ROOTS where the service runs"
        shown = f"'{uri}'" if os.path.isabs(uri) or "://" in uri else f"'{uri}' (here {local_path(uri, beside)})"
        raise invalid(FieldProblem(field, f"{shown} lies outside the data roots ({roots})", remedy))
    _refuse_private(settings, str(path), field, f"'{uri}'")
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long
        raise invalid(FieldProblem(field, f"'{uri}': {error.strerror}", "check the path")) from None
    if not exists:
        raise invalid(FieldProblem(field, f"'{uri}': no such file or directory ({path})", "check the path"))
    for file in data_files(path):
        inner = Path(os.path.realpath(file))
        if not any(inner.is_relative_to(root) for root in settings.data_roots):
            raise invalid(
                FieldProblem(
                    field, f"'{uri}': {file.name} is a link that leads outside the data roots", "remove the link"
                )
            )
        _refuse_private(settings, str(inner), field, f"'{uri}': {file.name}")
        if storable(str(file)) != str(file):
            raise invalid(FieldProblem(field, f"'{uri}': the name {file.name!a} is not UTF-8", "rename the file"))
        if not os.access(inner, os.R_OK):
            raise invalid(
                FieldProblem(field, f"'{uri}': {file.name} cannot be read by the service", "check its permissions")
            )
        parquet_limits.check(inner, field)
    return path


def _refuse_private(settings: Settings, location: str, field: str, named: str) -> None:
    """Raise 422 for a file among the service's own files, whichever tenant's; a data root among them is allowed."""
    roots = [root.rstrip("/") for root in (*map(str, settings.data_roots), *settings.object_roots)]
    for private in settings.private:
        meant = any(root != private and _within(root, private) and _within(location, root) for root in roots)
        if _within(location, private) and not meant:
            message = f"{named} lies where the service keeps files of its own ({private})"
            remedy = "put the data elsewhere, or add its own directory to EVENKEEL_DATA_ROOTS where the service runs"
            raise invalid(FieldProblem(field, message, remedy))


def _within(location: str, directory: str) -> bool:
    return location == directory or location.startswith(f"{directory}/")


def data_files(path: Path) -> Iterator[Path]:
    """Yield the data files at ``path``, a file or a directory, and the log files of a table, sorted.

    In a directory, data files whose names begin with ``.`` or ``_`` are skipped.
    """
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        parts = file.relative_to(path).parts
        if holds_rows(parts) or (is_log(parts) and file.is_file()):
            yield file


def allowed_uri(settings: Settings, uri: str, field: str, beside: str | None = None) -> str:
    """Return the uri in the form that a run reads: an absolute path, or the uri of objects below an object root.

    Raises:
        Problem: 422 if the uri is not allowed; 503 if its storage does not answer.
    """
    if is_topic(uri):
        return _allowed_topic(settings, uri, field)
    if beside is not None and is_object(beside) and "/" not in uri:
        uri = of_dataset(uri, beside)
    if not is_object(uri):
        folder = None if beside is None or is_object(beside) else local_path(beside).parent
        return str(allowed(settings, uri, field, folder))
    scheme, key = split(uri)
    parts = key.rstrip("/").split("/")
    if any(character in uri for character in "@?#%\\") or any(part in ("", ".", "..") for part in parts):
        message = f"'{shown(uri)}' is not {scheme}://BUCKET/KEY, without user name, options or dots"
        raise invalid(FieldProblem(field, message))
    roots_of_scheme = [below for of, below in map(split, settings.object_roots) if of == scheme]
    prefixes = [[part for part in below.split("/") if part] for below in roots_of_scheme]
    if not any(parts[: len(prefix)] == prefix for prefix in prefixes):
        roots = ", ".join(settings.object_roots) or "none"
        remedy = f"add its {scheme}://BUCKET/PREFIX to EVENKEEL_DATA_ROOTS where the service runs"
        raise invalid(FieldProblem(field, f"'{uri}' lies outside the data roots in object storage ({roots})", remedy))
    _refuse_private(settings, uri.rstrip("/"), field, f"'{uri}'")
    try:
        for file in Source(uri).files:
            _refuse_private(settings, str(file.path), field, f"'{file.path}'")
            parquet_limits.check(file.path, field)
    except DataError as error:
        raise data_problem(error, field) from error
    return uri.rstrip("/")


def _allowed_topic(settings: Settings, uri: str, field: str) -> str:
    """Return the uri of a topic if a topic root covers it, else raise 422; the brokers are not contacted."""
    parts = brokers_and_topic(uri)
    if parts is None:
        raise invalid(FieldProblem(field, f"'{shown(uri)}' is not kafka://HOST:PORT,HOST:PORT/TOPIC"))
    brokers, topic = parts
    for root in settings.topic_roots:
        of_root, _, prefix = split(root)[1].partition("/")
        # A run sends its password to every broker, so each of them must be allowed.
        if set(brokers.split(",")) <= set(of_root.split(",")) and (prefix in ("", topic)):
            return uri
    roots = ", ".join(settings.topic_roots) or "none"
    remedy = "add kafka://HOST:PORT,HOST:PORT, or the same with /TOPIC, to EVENKEEL_DATA_ROOTS where the service runs"
    raise invalid(FieldProblem(field, f"'{uri}' names brokers or a topic outside the data roots ({roots})", remedy))


def shown(uri: str) -> str:
    """Return the uri without the part that may contain a password."""
    scheme, key = split(uri)
    return f"{scheme}://{key.rpartition('@')[2]}"


def resolved(settings: Settings, spec: DatasetSpec) -> DatasetSpec:
    """Return the dataset with every uri checked and replaced by the real absolute path.

    Raises:
        Problem: 422 that names the invalid field.
    """
    document = spec.model_dump(mode="json")
    document["uri"] = allowed_uri(settings, spec.uri, "uri")
    # Relative uris of the other files start at the dataset's uri as the user wrote it, not at the target of a link.
    for name, feature in spec.features.items():
        if feature.join is not None:
            uri = allowed_uri(settings, feature.join.uri, f"features.{name}.join.uri", spec.uri)
            document["features"][name]["join"]["uri"] = uri
    if spec.items is not None:
        document["items"]["uri"] = allowed_uri(settings, spec.items.uri, "items.uri", spec.uri)
    for name, graph in spec.graphs.items():
        document["graphs"][name]["uri"] = allowed_uri(settings, graph.uri, f"graphs.{name}.uri", spec.uri)
    return DatasetSpec.model_validate(document)
