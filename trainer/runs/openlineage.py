"""OpenLineage events of a run, if ``OPENLINEAGE_URL`` is set: rows read, vectors written, the end (docs/adr/0038).

The environment variables are the same as for OpenLineage's own clients; events follow version 2-0-2 of its
specification. Each attempt is a run in OpenLineage, and the job its parent. If the receiver cannot be reached, or an
event cannot be made, the only effect is a line in the run's log. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from trainer.data.sources.locations import beside, local_path
from trainer.runs.directory import Run
from trainer.runs.events import utc_now
from trainer.runs.lineage import ROOT, git_commit
from trainer.spec import DatasetSpec
from trainer.spec.dataset import Feature
from trainer.spec.row_filter import filter_columns

URL_VARIABLE = "OPENLINEAGE_URL"
ENDPOINT_VARIABLE = "OPENLINEAGE_ENDPOINT"
KEY_VARIABLE = "OPENLINEAGE_API_KEY"
DISABLED_VARIABLE = "OPENLINEAGE_DISABLED"
DEFAULT_ENDPOINT = "api/v1/lineage"
ANSWER_SECONDS = 5.0
LAST_WORDS_SECONDS = 5.0
"""Longest time that an ended run waits until its events are sent."""
MAX_WAITING = 100

EventType = Literal["START", "RUNNING", "COMPLETE", "FAIL", "ABORT"]
NAMESPACE_VARIABLE = "OPENLINEAGE_NAMESPACE"
SPECIFICATION = "https://openlineage.io/spec"
PRODUCER = f"urn:evenkeel:{version('evenkeel')}"
Columns = dict[str, str]
"""Roles of columns in the run, such as "label" or "weight", by column name."""
Tell = Callable[..., None]


@contextlib.contextmanager
def telling(run: Run) -> Iterator[Tell]:
    """Send the event of an attempt's start, and yield a function that sends later events.

    The function takes the arguments of :func:`event` except ``run``, and returns at once: a thread makes and sends the
    events, in order. Without ``OPENLINEAGE_URL`` nothing is sent.
    """
    url = os.environ.get(URL_VARIABLE, "").strip()
    if not url or os.environ.get(DISABLED_VARIABLE, "").strip().lower() in ("true", "1"):
        yield lambda *_, **__: None
        return
    waiting: queue.Queue[Callable[[], dict[str, Any]] | None] = queue.Queue(MAX_WAITING)
    thread = threading.Thread(target=_send_all, args=(url, waiting), name="openlineage", daemon=True)
    thread.start()

    def tell(kind: EventType, **known: Any) -> None:
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(partial(event, run, kind, **known))

    tell("START")
    try:
        yield tell
    finally:
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(None)
            thread.join(LAST_WORDS_SECONDS)


def _send_all(url: str, waiting: queue.Queue[Callable[[], dict[str, Any]] | None]) -> None:
    import httpx

    endpoint = os.environ.get(ENDPOINT_VARIABLE, "").strip() or DEFAULT_ENDPOINT
    key = os.environ.get(KEY_VARIABLE, "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    said = False
    while (made := waiting.get()) is not None:
        try:
            where = f"{url.rstrip('/')}/{endpoint.lstrip('/')}"
            httpx.post(where, json=made(), headers=headers, timeout=ANSWER_SECONDS).raise_for_status()
        except Exception as error:  # no error of lineage may end the run
            if not said:
                print(f"no lineage: {type(error).__name__}: {error}; see {URL_VARIABLE}", file=sys.stderr, flush=True)
            said = True


def event(
    run: Run, kind: EventType, publication: dict[str, Any] | None = None, error: str | None = None
) -> dict[str, Any]:
    """Return an event of an attempt as JSON, with the facts known so far.

    ``publication``: the fields of the run's publication event, if any. ``error``: a failure's message.
    """
    facets = {
        "parent": _facet(
            "1-2-0/ParentRunFacet",
            run={"runId": run_id(run.run_id)},
            job={"namespace": _namespace(), "name": run.job.name},
        ),
        "processing_engine": _facet("1-1-1/ProcessingEngineRunFacet", name="evenkeel", version=version("evenkeel")),
    }
    if error is not None:
        facets["errorMessage"] = _facet("1-0-1/ErrorMessageRunFacet", message=error, programmingLanguage="Python")
    return {
        "eventType": kind,
        "eventTime": utc_now(),
        "producer": PRODUCER,
        "schemaURL": f"{SPECIFICATION}/2-0-2/OpenLineage.json#/$defs/RunEvent",
        "run": {"runId": run_id(run.run_id, run.attempt), "facets": facets},
        "job": {"namespace": _namespace(), "name": run.job.name, "facets": _job_facets()},
        "inputs": inputs(run),
        "outputs": outputs(run, publication),
    }


def run_id(job_id: str, attempt: int | None = None) -> str:
    """Return the UUID of a job, or of its attempt with this number. Equal arguments give equal UUIDs."""
    name = job_id if attempt is None else f"{job_id}/{attempt}"
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"evenkeel:{name}"))


def inputs(run: Run) -> list[dict[str, Any]]:
    """Return OpenLineage's inputs: the dataset's rows first, then joined files.

    Rows have their number and fingerprint once they are prepared.
    """
    from trainer.data.batches.prepared import PreparedData

    datasets: list[dict[str, Any]] = []
    for uri, columns in columns_read(run.dataset).items():
        fields = [{"name": name, "type": role} for name, role in columns.items()]
        facets = {"schema": _facet("1-2-0/SchemaDatasetFacet", fields=fields)}
        datasets.append({**dataset_name(uri), "facets": facets})
    if PreparedData.fingerprint_of(run.data) is not None:
        data = PreparedData.open(run.data)
        fingerprint = data.dataset_fingerprint
        datasets[0]["facets"]["version"] = _facet("1-0-1/DatasetVersionDatasetFacet", datasetVersion=fingerprint)
        statistics = _facet("1-0-0/InputStatisticsInputDatasetFacet", rowCount=data.num_rows_read)
        datasets[0]["inputFacets"] = {"inputStatistics": statistics}
    return datasets


def outputs(run: Run, publication: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return OpenLineage's outputs: the collection that the run publishes to, if any.

    The output has version and number of rows once a version is published.
    """
    publish = run.job.publish
    if publish is None:
        return []
    fields = [
        {"name": "id", "type": "id"},
        {"name": "vector", "type": f"fixed_size_list<float32>[{run.job.model.embedding_dim}]"},
    ]
    facets = {
        "schema": _facet("1-2-0/SchemaDatasetFacet", fields=fields),
        "columnLineage": _facet("1-2-0/ColumnLineageDatasetFacet", **_column_lineage(run.dataset, publish.feature)),
    }
    written: dict[str, Any] = {**dataset_name(run.store_url, publish.collection), "facets": facets}
    if publication is not None and publication["version"] is not None:
        from embeddings.store import open_store

        facets["version"] = _facet("1-0-1/DatasetVersionDatasetFacet", datasetVersion=publication["version"])
        manifest = open_store(run.store_url).collection(publish.collection).manifest(publication["version"])
        statistics = _facet("1-0-2/OutputStatisticsOutputDatasetFacet", rowCount=manifest["rows"])
        written["outputFacets"] = {"outputStatistics": statistics}
    return [written]


def dataset_name(uri: str, below: str = "") -> dict[str, str]:
    """Return namespace and name of a file, folder or store, or of its part ``below``; without user and password."""
    if "://" not in uri or uri.startswith("file://"):
        return {"namespace": "file", "name": str(Path(local_path(uri).absolute(), below))}
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return {
        "namespace": f"{parts.scheme}://{host}",
        "name": "/".join(part for part in (parts.path.strip("/"), below) if part),
    }


def columns_read(dataset: DatasetSpec) -> dict[str, Columns]:
    """Return the roles of each file's columns in the run, by the file's uri; the dataset's rows come first."""
    files: dict[str, Columns] = {dataset.uri: {}}
    for name, feature in dataset.joined_features.items():
        for uri, column, role in _sources(dataset, name, feature):
            files.setdefault(uri, {}).setdefault(column, role)
    if dataset.items is not None:
        of_items = files.setdefault(beside(dataset.items.uri, dataset.uri), {})
        of_items.setdefault(dataset.items.on, "key")
        for name, feature in dataset.items.features.items():
            of_items.setdefault(feature.column or name, feature.type)
    for field, column in dataset.label_columns.items():
        role = "label mask" if field.endswith(".mask") else "weight" if field == "weight" else "label"
        files[dataset.uri].setdefault(column, role)
    for role, named in {"order": dataset.ordering, "partition": dataset.partition_column}.items():
        if named is not None:
            files[dataset.uri].setdefault(named, role)
    for column in () if dataset.filter is None else filter_columns(dataset.filter):
        files[dataset.uri].setdefault(column, "filter")
    for graph in dataset.graphs.values():
        uri = beside(graph.uri, dataset.uri)
        files.setdefault(uri, {}).update({graph.source: "id", graph.target: "id"})
    return files


def _sources(dataset: DatasetSpec, name: str, feature: Feature) -> Iterator[tuple[str, str, str]]:
    """Yield (uri of the file, column, role) for each column that a feature reads."""
    uri = dataset.uri
    if feature.join is not None:
        yield uri, dataset.column_of(feature.join.on), "key"
        yield beside(feature.join.uri, uri), feature.join.on, "key"
        yield beside(feature.join.uri, uri), feature.join.column, feature.type
    elif feature.derive is not None:
        yield uri, dataset.column_of(feature.derive.previous), "id"
        yield uri, dataset.column_of(feature.derive.by), "key"
        yield uri, feature.derive.order, "order"
    else:
        yield uri, feature.column or name, feature.type
    if feature.weights is not None:
        yield uri, feature.weights, "weights"
    if feature.timestamp is not None:
        yield uri, feature.timestamp, "time"
    if feature.join is not None and feature.join.timestamp is not None:
        yield beside(feature.join.uri, uri), feature.join.timestamp, "time"


def _column_lineage(dataset: DatasetSpec, published: str) -> dict[str, Any]:
    """Return the fields of a columnLineage facet: the source columns of ids and of vectors."""
    feature = dataset.features[published]
    roles = {feature.type, "id"}
    ids = [(uri, column) for uri, column, role in _sources(dataset, published, feature) if role in roles]
    trained_on = [(uri, column) for uri, columns in columns_read(dataset).items() for column in columns]
    return {
        "fields": {
            "id": {"inputFields": _input_fields(ids, {"type": "DIRECT", "subtype": "IDENTITY"})},
            "vector": {"inputFields": _input_fields(trained_on, {"type": "DIRECT", "subtype": "AGGREGATION"})},
        }
    }


def _input_fields(columns: Iterable[tuple[str, str]], transformation: dict[str, str]) -> list[dict[str, Any]]:
    return [{**dataset_name(uri), "field": column, "transformations": [transformation]} for uri, column in columns]


def _job_facets() -> dict[str, Any]:
    kind = _facet("2-0-4/JobTypeJobFacet", processingType="BATCH", integration="EVENKEEL", jobType="TRAINING")
    facets = {"jobType": kind}
    commit = git_commit(ROOT)
    if commit is not None:
        facets["sourceCodeLocation"] = _facet(
            "1-1-0/SourceCodeLocationJobFacet", type="git", url=PRODUCER, version=commit
        )
    return facets


def _facet(schema: str, **fields: Any) -> dict[str, Any]:
    number, name = schema.split("/")
    return {"_producer": PRODUCER, "_schemaURL": f"{SPECIFICATION}/facets/{number}/{name}.json#/$defs/{name}", **fields}


def _namespace() -> str:
    return os.environ.get(NAMESPACE_VARIABLE, "").strip() or "evenkeel"
