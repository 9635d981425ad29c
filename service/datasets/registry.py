"""Registered datasets: checked against their files, listed, profiled, removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from service.core import tables, thread_pools
from service.core.database import Database
from service.core.errors import Problem, invalid, not_found
from service.core.rows import DatasetRow, first_row
from service.core.settings import Settings
from service.datasets import paths
from service.datasets.file_cache import FileCache
from service.datasets.paths import data_problem
from trainer.data.errors import DataAwayError, DataError
from trainer.data.sources import figures, infer
from trainer.data.sources.source import Source
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.problems import FieldProblem
from trainer.spec.row_filter import filter_columns
from trainer.spec.stored_specs import StoredJob, to_run
from trainer.spec.uri_schemes import is_object

OBJECTS_SECONDS = 30.0
"""Longest wait of a request for objects: their storage may take connections and not answer."""
Result = TypeVar("Result")
_named: FileCache[list[str]] = FileCache()


async def in_check_thread(spec: DatasetSpec, call: Callable[[], Result]) -> Result:
    """Return ``call()``, a check of the dataset's files, from a thread.

    Raises:
        Problem: that of the check; 503 if the storage of the dataset's objects does not answer in OBJECTS_SECONDS.
    """
    objects = next(filter(is_object, named_uris(spec)), None)
    if objects is None:
        return await thread_pools.in_brief_thread(call)
    try:
        return await thread_pools.in_waiting_thread(OBJECTS_SECONDS, call)
    except TimeoutError:
        error = DataAwayError(
            f"the object storage did not answer within {OBJECTS_SECONDS:g} s", where=objects, remedy="try again later"
        )
        raise data_problem(error, "dataset") from None


def named_uris(spec: DatasetSpec) -> list[str]:
    """Return the uris of a dataset as they are written: that of the rows first."""
    uris = [spec.uri, *(graph.uri for graph in spec.graphs.values())]
    uris += [feature.join.uri for feature in spec.features.values() if feature.join is not None]
    return uris if spec.items is None else [*uris, spec.items.uri]


def check_files(settings: Settings, spec: DatasetSpec) -> DatasetSpec:
    """Return the dataset with absolute paths, after checking that its files contain every column it names.

    Reads footers and headers only; blocking.

    Raises:
        Problem: 422 that names each invalid field.
    """
    absolute = paths.resolved(settings, spec)
    columns = set(_columns(absolute.uri, "uri") if absolute.messages is None else absolute.messages.columns)
    problems = []
    for field, column in named_columns(absolute):
        if column not in columns:
            problems.append(_no_column(field, column, spec.uri, columns))
    other_files = [
        (
            f"features.{name}.join",
            feature.join.uri,
            {"on": feature.join.on, "column": feature.join.column}
            | ({} if feature.join.timestamp is None else {"timestamp": feature.join.timestamp}),
        )
        for name, feature in absolute.features.items()
        if feature.join is not None
    ]
    items = absolute.items
    if items is not None:
        of_items = {f"features.{name}": feature.column or name for name, feature in items.features.items()}
        other_files.append(("items", items.uri, {"on": items.on, **of_items}))
    other_files += [
        (f"graphs.{name}", graph.uri, {"source": graph.source, "target": graph.target})
        for name, graph in absolute.graphs.items()
    ]
    for field, uri, named in other_files:
        file_columns = _columns(uri, f"{field}.uri")
        for part, column in named.items():
            if column not in file_columns:
                problems.append(_no_column(f"{field}.{part}", column, uri, file_columns))
    if problems:
        raise invalid(*problems)
    return absolute


def _no_column(field: str, column: str, uri: str, columns: Iterable[str]) -> FieldProblem:
    message = f"no column '{column}' in {uri} (there are {', '.join(sorted(columns))})"
    return FieldProblem(field, message, "name a column of the file, or correct the file")


def named_columns(spec: DatasetSpec) -> Iterator[tuple[str, str]]:
    """Yield (field, column) for each column of the main file that the dataset names, if only by a feature's name."""

    def column_of(name: str) -> str:
        feature = spec.features.get(name)
        return (
            feature.column or name if feature is not None and feature.join is None and feature.derive is None else name
        )

    for name, feature in spec.features.items():
        if feature.join is not None:
            yield f"features.{name}.join.on", column_of(feature.join.on)
        elif feature.derive is not None:
            yield f"features.{name}.derive.previous", column_of(feature.derive.previous)
            yield f"features.{name}.derive.by", column_of(feature.derive.by)
            yield f"features.{name}.derive.order", feature.derive.order
        else:
            yield f"features.{name}", feature.column or name
        if feature.weights is not None:
            yield f"features.{name}.weights", feature.weights
        if feature.timestamp is not None:
            yield f"features.{name}.timestamp", feature.timestamp
    yield from spec.label_columns.items()
    if spec.filter is not None:
        yield from (("filter", column) for column in filter_columns(spec.filter))
    days = None if spec.partition is None else spec.partition_column
    for field, column in {"order": spec.order, "timestamp": spec.timestamp, "partition": days}.items():
        if column is not None:
            yield field, column


def _columns(path: str, field: str) -> list[str]:
    """Return the columns of a file or directory; raise 422 if it is missing or not readable in its format."""
    try:
        objects = [file.path for file in Source(path).files] if is_object(path) else None
        return _named.get(path, objects or paths.data_files(Path(path)), lambda: infer.column_names(path))
    except DataError as error:
        raise data_problem(error, field) from error


async def register(
    database: Database, connection: AsyncConnection, spec: DatasetSpec, tenant: str
) -> tuple[dict[str, Any], bool]:
    """Register a dataset; return (the dataset as shown to users, True if it is new).

    Registering the same spec again is allowed and changes nothing.

    Raises:
        Problem: 409 if another spec is registered under this name.
    """
    document = spec.model_dump(mode="json")
    await database.exclusive(connection, f"dataset {tenant} {spec.name}")
    existing = await _row(connection, tenant, spec.name)
    if existing is not None:
        if existing["spec"] == document:
            return view(existing), False
        update = f"'evenkeel datasets update FILE.yaml' (PUT /v1/datasets/{spec.name})"
        detail = f"A different dataset '{spec.name}' is registered. Replace it with {update}, or choose another name."
        raise Problem(409, "dataset-exists", detail)
    row: DatasetRow = {"tenant": tenant, "name": spec.name, "spec": document, "created_at": tables.now()}
    await connection.execute(tables.dataset.insert().values(row))
    return view(row), True


async def replace(database: Database, connection: AsyncConnection, spec: DatasetSpec, tenant: str) -> dict[str, Any]:
    """Replace the spec of a registered dataset; jobs keep the spec that they were submitted with.

    Raises:
        Problem: 404 if no dataset has this name; 409 if the job of a schedule does not fit the new spec.
    """
    await database.exclusive(connection, f"dataset {tenant} {spec.name}")
    row = await get(connection, tenant, spec.name)
    for schedule in await _schedules_of(connection, tenant, spec.name):
        try:
            JobSpec.model_validate(to_run(schedule.job)).against(spec)
        except ValueError as error:
            detail = (
                f"The job of schedule '{schedule.name}' does not fit it: {error}. Change or delete the schedule first."
            )
            raise Problem(409, "dataset-in-use", detail) from None
    changed: DatasetRow = {**row, "spec": spec.model_dump(mode="json")}
    await connection.execute(tables.dataset.update().where(_at(tenant, spec.name)).values(spec=changed["spec"]))
    return view(changed)


async def _schedules_of(connection: AsyncConnection, tenant: str, name: str) -> list[sa.Row[Any, Any]]:
    """Return (name, job) of the schedules whose jobs use a dataset, in the order of their names."""
    schedule = tables.schedule.c
    query = sa.select(schedule.name, schedule.job).where(schedule.tenant == tenant).order_by(schedule.name)
    return [row for row in await connection.execute(query) if StoredJob(row.job).dataset_name == name]


async def get(connection: AsyncConnection, tenant: str, name: str) -> DatasetRow:
    row = await _row(connection, tenant, name)
    if row is None:
        raise not_found("dataset", name)
    return row


async def delete(connection: AsyncConnection, tenant: str, name: str) -> None:
    """Remove the dataset from the registry. Its files stay, and its jobs, since each has a copy of the spec."""
    await get(connection, tenant, name)
    using = [row.name for row in await _schedules_of(connection, tenant, name)]
    if using:
        detail = f"Dataset '{name}' is used by the schedules {', '.join(using)}. Delete or change them first."
        raise Problem(409, "dataset-in-use", detail)
    await connection.execute(tables.dataset.delete().where(_at(tenant, name)))


def _at(tenant: str, name: str) -> sa.ColumnElement[bool]:
    return sa.and_(tables.dataset.c.tenant == tenant, tables.dataset.c.name == name)


async def _row(connection: AsyncConnection, tenant: str, name: str) -> DatasetRow | None:
    return await first_row(connection, DatasetRow, sa.select(tables.dataset).where(_at(tenant, name)))


def view(row: DatasetRow) -> dict[str, Any]:
    """Return a registered dataset as shown to users: the fields of its spec, and ``created_at``."""
    return {**row["spec"], "created_at": row["created_at"]}


def profile(settings: Settings, spec: DatasetSpec) -> dict[str, Any]:
    """Return rows, label rate, and nulls and distinct ids per feature (trainer.data.sources.figures.profile).

    Reads every row; blocking.
    """
    try:
        return figures.profile(check_files(settings, spec))
    except DataError as error:
        raise data_problem(error, "uri") from None


def propose(settings: Settings, uri: str, name: str | None) -> dict[str, Any]:
    """Propose a dataset manifest for a file under the data roots; its uri is ``uri`` unchanged. Blocking.

    Raises:
        Problem: 422 if the file is not allowed or cannot be read.
    """
    path = paths.allowed_uri(settings, uri, "uri")
    try:
        return {**infer.infer(path, name), "uri": uri}
    except DataError as error:
        raise data_problem(error, "uri") from None
