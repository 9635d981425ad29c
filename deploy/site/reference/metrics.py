"""The reference page on all series of ``/metrics``, which are read from a service without data."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from prometheus_client import Metric

from deploy.site.reference.text import bullets, page, paragraph, plain
from embeddings.store import open_store
from service.core.database import Database
from service.core.settings import Settings
from service.features.store_health import StoreHealth
from service.ops import collectors
from service.ops.metrics import Metrics

_SUFFIX = {"counter": "_total"}


def metrics_page() -> str:
    """Return the page of all series with their labels."""
    intro = (
        "`/metrics` needs no key on loopback, elsewhere a key of the default tenant with the scope `jobs:read`. A "
        "histogram has the series `_bucket`, `_sum` and `_count`. Alerts: [on call](../guides/on_call.md)."
    )
    lines = []
    counts = Metrics()
    labels = {
        collector._name: collector._labelnames  # type: ignore[attr-defined]
        for collector in counts.registry._collector_to_names
    }
    for family in [*asyncio.run(_gauges()), *counts.families()]:
        names = labels.get(family.name, getattr(family, "_labelnames", ()))
        shown = "{" + ", ".join(names) + "}" if names else ""
        lines.append(
            f"`{family.name}{_SUFFIX.get(family.type, '')}{shown}` ({family.type}): {plain(family.documentation)}"
        )
    return page("Metrics", "`service/ops`", paragraph(intro), bullets(sorted(lines)))


async def _gauges() -> list[Metric]:
    with tempfile.TemporaryDirectory() as home:
        settings = Settings(home=Path(home))
        database = Database(settings.database_url)
        await database.start()
        try:
            store = open_store(settings.store_url)
            return await collectors.of_service(settings, database, store, StoreHealth(store))
        finally:
            await database.stop()
