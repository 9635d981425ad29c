"""Fingerprint of prepared data, from the specs, the files of the rows and the warm start's parent. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainer.data.batches.prepared_columns import FORMAT_VERSION
from trainer.data.columns.dynamic_ids import IdMap, hashes_of
from trainer.data.columns.numeric import Numeric
from trainer.data.columns.orders import order_of
from trainer.data.columns.values import as_ids, id_kind
from trainer.data.errors import DataError
from trainer.data.prepare.plan import DataPlan
from trainer.data.sources.locations import read_edges
from trainer.data.sources.source import Source
from trainer.spec import JobSpec
from trainer.spec.models.base import DrawingSpec
from trainer.spec.models.sequences import SequenceSpec

Files = list[list[list[object]]]

_EDGE_BYTES = 1 << 16
_SECOND_NS = 10**9


@dataclass(frozen=True)
class WarmStart:
    """Data of the parent run: ids by table, statistics of numeric features, profile of its rows."""

    vocabulary: Mapping[str, IdMap]
    numeric: Sequence[Numeric] | None
    profile: Mapping[str, Any] | None


def sampling_of(job: JobSpec) -> dict[str, Any]:
    """Return the settings of negatives that are drawn anew in each epoch."""
    model = job.model
    if not isinstance(model, DrawingSpec):
        return {"distribution": "uniform", "power": 0.75}
    return {"distribution": model.sampling, "power": model.negative_power}


def sequence_settings(job: JobSpec) -> dict[str, Any]:
    """Return the settings of sequence batches; ``history`` is the number of items that an evaluation reads."""
    model = job.model
    assert isinstance(model, SequenceSpec)
    # The default is left out, so that data prepared before this setting existed keep their fingerprint.
    compared_with = {} if model.compared_with == "own" else {"compared_with": model.compared_with}
    return {
        "kind": model.kind,
        # Every manifest has both settings, even if the kind of model has only one.
        "window": getattr(model, "window", 3),
        "length": getattr(model, "length", 50),
        "negatives": model.num_negatives,
        "history": model.history_length,
        **compared_with,
    }


def dataset_fingerprint(plan: DataPlan) -> str:
    """Return the fingerprint of the rows, for lineage.

    The fingerprint is the sha256 of the dataset spec without its location, the window, and the size and the first and
    last 64 KiB of each file. In the last 64 KiB, Parquet has its footer: schema, counts, statistics.
    """
    content: list[Any] = [] if plan.dataset.messages is None else [plan.dataset.uri]
    for source in plan.sources:
        for file in source.files:
            size = file.path.stat().st_size
            digest = hashlib.sha256(read_edges(file.path, _EDGE_BYTES)).hexdigest()
            content.append([file.path.name, list(file.partitions), size, digest])
    spec = plan.dataset.model_dump(mode="json", exclude={"uri", "name"})
    return _sha256([FORMAT_VERSION, spec, str(plan.source.window), content])


def files_of(plan: DataPlan) -> Files:
    """Return the identity of the files to read: of each source its paths, sizes and times of change."""
    return [source.fingerprint_files() for source in plan.sources]


def stayed(plan: DataPlan, files: Files, began_ns: int) -> bool:
    """Return True if the files that a preparation has read still match their fingerprint.

    ``files``: result of :func:`files_of` before rows were read. ``began_ns``: when the plan was made, in nanoseconds
    since 1970. A file that was changed less than a second earlier counts as changed since, because object stores report
    whole seconds.
    """
    try:
        there = [Source(source.uri, source.window).fingerprint_files() for source in plan.sources]
    except (DataError, OSError):
        return False
    times = (file[2] for of_source in files for file in of_source if len(file) > 2)
    return there == files and all(isinstance(at, int) and at < began_ns - _SECOND_NS for at in times)


def fingerprint_of(plan: DataPlan, base: WarmStart, files: Files) -> str:
    """Return the fingerprint of data prepared by a plan from files (:func:`files_of`)."""
    digests = {table: _digest(ids) for table, ids in sorted(base.vocabulary.items())}
    job = plan.job
    relevant = [job.model.draws_partner, job.evaluation.split.model_dump(mode="json"), job.seed, job.batch_size]
    relevant.append(sorted(plan.graphs))
    if job.dataset.one_pass:
        relevant += ["one pass", *filter(None, [plan.raw_table])]
    if plan.is_sequence:
        relevant.append(sequence_settings(job))
    model = job.model
    if isinstance(model, DrawingSpec) and (model.negative_distribution is not None or model.negative_power != 0.75):
        relevant.append(sampling_of(job))
    relevant.append(job.init_from.retire_after_runs if job.init_from is not None else None)
    if plan.least_labels:
        relevant.append(plan.least_labels)
    if plan.dataset.negatives is not None:
        relevant.append("negatives of what trains")
    if plan.keeps_users:
        relevant.append("users")
    if plan.keeps_seen and not plan.is_bpr:
        relevant.append("seen items")
    if plan.publishes_users and plan.is_sequence:
        relevant.append("users of sequences")
    if plan.all_numeric:
        relevant.append(None if base.numeric is None else [one.as_json() for one in base.numeric])
    if plan.vectors:
        relevant.append("vectors")
    if base.profile is not None:
        relevant.append(base.profile)
    if _has_days_of_times(plan.source):
        relevant.append("days of times")
    if written := plan.ids_as_written:
        relevant.append(["ids as written", written])
    # JSON text keeps the order of features and labels, which decides the order of the batches' keys.
    spec = json.dumps(plan.dataset.model_dump(mode="json"))
    return _sha256([FORMAT_VERSION, spec, str(plan.source.window), relevant, files, digests])


def _has_days_of_times(source: Source) -> bool:
    """Return True if partition days are computed from instants and a time zone, False if they are dates as written."""
    if source.window is None:
        return False
    column = source.window.column
    source.require([column])
    order, type_ = order_of(source, column), source.column_type(column)
    if pa.types.is_timestamp(type_):
        return type_.tz not in (None, "UTC")
    return order.is_timed and len(order.first) > len("2026-01-31")


def _digest(base: IdMap) -> str:
    digest = hashlib.sha256(str(base.run).encode())
    for ids, runs in ((base.ids, base.last_seen), (base.retired, base.retired_in)):
        # Hashes of the ids in their order: Arrow's own buffers differ for equal arrays (offsets, padding).
        if not pa.types.is_uint64(ids.type):
            ids = as_ids(ids, id_kind(ids.type, "base_vocabulary"), "base_vocabulary")
        digest.update(hashes_of(ids).tobytes())
        digest.update(np.asarray(runs, dtype=np.int32).tobytes())
    return digest.hexdigest()


def _sha256(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
