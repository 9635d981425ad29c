"""Types of rows are those of their tables, and a query's rows come as what they are said to be."""

from __future__ import annotations

import datetime
import types
import typing

import pytest
import sqlalchemy as sa

from service.core import rows, tables
from service.jobs.job_row import JobRow

TABLES = {
    rows.KeyRow: tables.api_key,
    rows.DatasetRow: tables.dataset,
    JobRow: tables.job,
    rows.ScheduleRow: tables.schedule,
    rows.FiringRow: tables.firing,
    rows.AuditRow: tables.audit,
    rows.WebhookRow: tables.webhook,
    rows.DeliveryRow: tables.webhook_delivery,
}


def _type_and_nullable(hint: object) -> tuple[type, bool]:
    """Return the class of a column's annotation, and whether it may be None."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    [plain] = [member for member in members if member is not type(None)]
    if typing.get_origin(plain) is typing.Literal:
        [kind] = {type(value) for value in typing.get_args(plain)}
    else:
        kind = typing.get_origin(plain) or plain
    assert isinstance(kind, type)
    return kind, type(None) in members


def _of_column(column: sa.Column[typing.Any]) -> tuple[set[type], bool]:
    if isinstance(column.type, tables.UtcTime):
        kinds: set[type] = {datetime.datetime}
    elif isinstance(column.type, sa.JSON):
        kinds = {dict, list}
    else:
        kinds = {column.type.python_type}
    return kinds, bool(column.nullable)


@pytest.mark.parametrize(("row", "table"), TABLES.items(), ids=lambda one: getattr(one, "__name__", None) or one.name)
def test_a_type_has_the_columns_of_its_table(row: type, table: sa.Table) -> None:
    hints = typing.get_type_hints(row)
    assert set(hints) == {column.name for column in table.c}
    for column in table.c:
        kinds, nullable = _of_column(column)
        kind, optional = _type_and_nullable(hints[column.name])
        assert kind in kinds, column.name
        assert optional == nullable, column.name


def test_every_type_of_a_row_is_held_to_a_table() -> None:
    # A firing as it is listed has what came of its job, beside the columns of its table.
    named = {one for one in vars(rows).values() if typing.is_typeddict(one)} - {rows.FiredRow}
    assert named | {JobRow} == set(TABLES)


def test_a_row_may_be_changed_and_leaves_what_it_came_from() -> None:
    columns = {"tenant": "default", "name": "clicks", "spec": {}, "created_at": tables.now()}
    row = rows.as_row(rows.DatasetRow, columns)
    row["name"] = "views"
    assert columns["name"] == "clicks"
