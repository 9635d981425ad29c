"""The types of a job's row and view are those of its table."""

from __future__ import annotations

from service.core import tables
from service.jobs.job_row import JobRow, JobView


def test_the_row_has_the_columns_of_the_table() -> None:
    assert JobRow.__annotations__.keys() == set(tables.job.c.keys())


def test_the_view_shows_columns_and_what_job_records_adds() -> None:
    assert JobView.model_fields.keys() - set(tables.job.c.keys()) == {"dataset", "labels", "metrics"}
