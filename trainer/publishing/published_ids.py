"""Check before training that the prepared data's ids can be published: the refresh stage would refuse them later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from embeddings.store import StoreError, open_store
from trainer.data.columns.publishable import require_publishable

if TYPE_CHECKING:
    from trainer.data.batches.prepared import PreparedData
    from trainer.runs.directory import Run


def check_published_ids(run: Run, data: PreparedData) -> None:
    """Check that a run can publish its ids into its collection.

    Raises:
        DataError: an id is too long, or holds a NUL character.
        ValueError: the served version's ids are integers and the run's are text, or the other way round.
    """
    publish = run.job.publish
    assert publish is not None
    if data.catalogue is not None:
        assert run.dataset.items is not None
        ids, where = data.catalogue.ids, f"{run.dataset.items.uri}, column '{run.dataset.items.on}'"
    else:
        table = _table_of(data, publish.feature)
        ids, where = data.vocabulary(table), _column_of(run, publish.feature)
    served, own = _served_type(run, publish.collection), "string" if pa.types.is_large_string(ids.type) else "int64"
    if served is not None and served != own:
        words = {"int64": "integers", "string": "text"}
        raise ValueError(
            f"publish.collection: the ids of '{publish.collection}' are {words[served]}, those of {where} "
            f"{words[own]}: publish to another collection, or write the ids as {words[served]}"
        )
    require_publishable(ids, lambda place: where)
    if publish.users is not None:
        users = data.sequences.user_ids() if data.sequence else data.vocabulary(_table_of(data, "user"))
        require_publishable(users, lambda place: _column_of(run, "user"))


def tables_served_as_text(run: Run) -> tuple[str, ...]:
    """Return (the table of the published feature,) if the served version's ids are text; else an empty tuple."""
    publish = run.job.publish
    feature = None if publish is None else run.dataset.joined_features.get(publish.feature)
    if publish is None or feature is None or _served_type(run, publish.collection) != "string":
        return ()
    return (feature.shares or publish.feature,)


def _table_of(data: PreparedData, feature: str) -> str:
    return next(key.table for key in data.keys if key.name == feature)


def _column_of(run: Run, name: str) -> str:
    feature = run.dataset.features[name]
    if feature.join is not None:
        return f"{feature.join.uri}, column '{feature.join.column}'"
    column = feature.column or name if feature.derive is None else feature.derive.previous
    return f"{run.dataset.uri}, column '{column}'"


def _served_type(run: Run, collection: str) -> str | None:
    if run.parent_version is None:
        return None
    try:
        return str(open_store(run.store_url).collection(collection).manifest(run.parent_version)["id_type"])
    except StoreError:
        # The refresh stage reports a missing or damaged version in more detail.
        return None
