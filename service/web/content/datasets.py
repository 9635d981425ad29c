"""Registered datasets, figures of their rows, and the drift of the rows from run to run."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from service.core import pagination, tables, thread_pools
from service.core.rows import DatasetRow
from service.datasets import registry
from service.jobs import job_records
from service.web.request import DashboardRequest
from trainer.spec import DatasetSpec
from trainer.spec.stored_specs import StoredJob

NUM_DATASETS = 50
NUM_LATEST = 200
"""Number of newest jobs that are searched for jobs of a dataset."""
NUM_JOBS = 15


async def gather(request: DashboardRequest) -> dict[str, Any]:
    """Return a page of the tenant's data sets."""
    table = tables.dataset
    query = sa.select(table).where(table.c.tenant == request.principal.tenant)
    async with request.state.database.read() as connection:
        page = await pagination.page(
            connection, DatasetRow, query, table.c.name, request.paging(NUM_DATASETS), registry.view, descending=False
        )
    return {"datasets": page.items, "more": page.next_cursor}


async def gather_one(request: DashboardRequest) -> dict[str, Any]:
    """Return the data set that the address names, and its latest jobs with the drift of their rows.

    Raises:
        Problem: 404 if the tenant has none of that name.
    """
    name = request.path["dataset"]
    query = job_records.listing(request.principal.tenant, None, None, None)
    async with request.state.database.read() as connection:
        row = await registry.get(connection, request.principal.tenant, name)
        latest = await connection.execute(query.order_by(tables.job.c.id.desc()).limit(NUM_LATEST))
        jobs = [dict(job) for job in latest.mappings() if StoredJob(job["spec"]).dataset_name == name]
    shown = [{**job, "drift": (job["lineage"] or {}).get("drift")} for job in jobs[:NUM_JOBS]]
    return {"dataset": registry.view(row), "jobs": shown}


async def gather_profile(request: DashboardRequest) -> dict[str, Any]:
    """Return figures of the rows of the data set that the address names; reads every row.

    Raises:
        Problem: 404 if the tenant has none of that name, 422 if its files cannot be read.
    """
    async with request.state.database.read() as connection:
        row = await registry.get(connection, request.principal.tenant, request.path["dataset"])
    spec = DatasetSpec.model_validate(row["spec"])
    settings = request.state.settings.for_tenant(request.principal.tenant)
    profile = await thread_pools.in_thread(registry.profile, settings, spec)
    features = profile.pop("features")
    columns = list(dict.fromkeys(name for figures in features.values() for name in figures))
    return {"profile": profile, "features": features, "columns": columns}
