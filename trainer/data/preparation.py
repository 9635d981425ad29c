"""``prepare``: from a dataset and a job to a directory of memory-mapped columns, all or nothing. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.arrays import OFFSET, Appender
from trainer.data.encode import encode
from trainer.data.errors import DataError
from trainer.data.graphs import write_graphs
from trainer.data.growth import NUM_SPECIAL_ROWS, GrownTable, IdMap
from trainer.data.hashing import id_keys
from trainer.data.plan import NEGATIVE_SUFFIX, DataPlan, make_plan
from trainer.data.prepared import FORMAT_VERSION, GRAPHS, MANIFEST, PreparedData
from trainer.data.sequences import SEQUENCE_KEYS, Sequences
from trainer.data.source import Source
from trainer.data.values import as_ids, id_kind
from trainer.data.writing import codes_to_rows, finish_tables, write_splits
from trainer.spec import DatasetSpec, JobSpec

_EDGE_BYTES = 1 << 16


def prepare(
    dataset: DatasetSpec,
    job: JobSpec,
    directory: Path | str,
    *,
    base_vocabulary: Mapping[str, IdMap] | None = None,
    log: Callable[[str], Any] = lambda message: None,
) -> PreparedData:
    """Reads the dataset, splits it, and writes coded columns under ``directory``, which ranks then open.

    A directory that already holds exactly this (same specs, same files by size and time, same ``base_vocabulary``) is
    reused. ``base_vocabulary`` (by table, from a warm start) keeps the rows of old ids, but for those that
    ``init_from.retire_after_runs`` gives up; new ids follow. The directory appears complete, on disk and by one rename,
    so a crash leaves nothing half-written.

    Raises DataError, naming file, column, row and the remedy.
    """
    directory = Path(directory)
    plan = make_plan(dataset, job)
    base = dict(base_vocabulary or {})
    fingerprint = _fingerprint(plan, base)
    if PreparedData.fingerprint_of(directory) == fingerprint:
        log(f"prepared data reused: {directory}")
        return PreparedData.open(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    work = directory.parent / f".{directory.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.preparing"
    try:
        _write(plan, work, fingerprint, base, log)
        _make_durable(work)
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(work, directory)
        _fsync(directory.parent)
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror or error}",
            where=str(error.filename or directory),
            remedy="free disk space, or check the directory's permissions",
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return PreparedData.open(directory)


def _write(
    plan: DataPlan,
    work: Path,
    fingerprint: str,
    base: Mapping[str, IdMap],
    log: Callable[[str], Any],
) -> None:
    scratch = work / "scratch"
    scratch.mkdir(parents=True)
    encoded = encode(plan, scratch)
    writers, seen, sequences = write_splits(plan, encoded, work)
    grown, row_counts = finish_tables(plan, encoded, work, base)
    rows_of = {table: found.row_of_code for table, found in grown.items()}
    unknown_share = codes_to_rows(plan, work, rows_of, log)
    seen.write(work, rows_of, row_counts)
    num_examples = {name: writer.num_examples for name, writer in writers.items()}
    num_positives = {name: writer.num_positives for name, writer in writers.items()}
    if plan.is_sequence:
        item = plan.feature("item")
        assert item is not None
        sequences.write(work, rows_of[item.table])
        num_examples = num_positives = _sequence_examples(plan, Sequences(work))
    (work / "tables").mkdir()
    tables: dict[str, Any] = {}
    for table, found in grown.items():
        found.ids.write(work / "tables" / f"{table}.arrow")
        for name, values in (("counts", row_counts[table]), ("parent", found.parent_rows)):
            column = Appender(work / "tables" / f"{table}.{name}.bin", OFFSET)
            column.append(values)
            column.close()
        tables[table] = {"num_rows": found.num_rows}
        if table in base:
            log(_growth_in_words(table, base[table], found))
    graphs = write_graphs(
        plan.graphs, plan.kinds, {table: found.ids.ids for table, found in grown.items()}, work / GRAPHS, log
    )
    keys = [{"name": f.name, "table": f.table, "is_list": f.is_list, "pooling": f.pooling} for f in plan.trained]
    if plan.is_bpr:
        item = plan.feature("item")
        assert item is not None
        keys.append({"name": "item" + NEGATIVE_SUFFIX, "table": item.table, "is_list": False, "pooling": item.pooling})
    if plan.is_sequence:
        assert item is not None
        keys = [{"name": name, "table": item.table, "is_list": True, "pooling": "none"} for name in SEQUENCE_KEYS]
    manifest = {
        "format": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "dataset_fingerprint": dataset_fingerprint(plan),
        "keys": keys,
        "is_bpr": plan.is_bpr,
        "sequence": _sequence_settings(plan.job) if plan.is_sequence else None,
        "unread": sorted(f.name for f in plan.features if f not in plan.trained and f.name != "user"),
        "tables": tables,
        "graphs": graphs,
        "num_rows_read": encoded.num_rows,
        "num_examples": num_examples,
        "num_positives": num_positives,
        "unknown_share": unknown_share,
        "seed": plan.job.seed,
        "batch_size": plan.job.batch_size,
    }
    shutil.rmtree(scratch)
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    log("examples: " + ", ".join(f"{name} {count:,}" for name, count in num_examples.items()))


def _sequence_settings(job: JobSpec) -> dict[str, Any]:
    """What batches of sequences are cut by. ``history``: items that an evaluation reads."""
    model = job.model
    history = model.length if model.kind == "sasrec" else model.window
    return {
        "kind": model.kind, "window": model.window, "negatives": model.num_negatives, "length": model.length,
        "history": history,
    }  # fmt: skip


def _sequence_examples(plan: DataPlan, sequences: Sequences) -> dict[str, int]:
    """By split: an item of a sequence (item2vec) or a piece of one (sasrec) to train on, an item to predict."""
    model = plan.job.model
    train = len(sequences.windows(model.length)) if model.kind == "sasrec" else len(sequences.train.values)
    return {"train": train, **{name: len(places) for name, places in sequences.held.items()}}


def _growth_in_words(table: str, base: IdMap, grown: GrownTable) -> str:
    kept = int((grown.parent_rows >= NUM_SPECIAL_ROWS).sum())
    idle = int((grown.ids.last_seen < grown.ids.run).sum())
    return (
        f"ids of {table}: {kept:,} of {len(base.ids):,} go on ({idle:,} without an example in this run), "
        f"{len(base.ids) - kept:,} retired, {len(grown.ids.ids) - kept:,} new"
    )


def dataset_fingerprint(plan: DataPlan) -> str:
    """What the rows are, for lineage: sha256 of the dataset spec without its place, the window, and of each file its
    size and its first and last 64 KiB (a Parquet file's footer: schema, counts, statistics)."""
    content = []
    for source in _sources(plan):
        for file in source.files:
            size = file.path.stat().st_size
            with open(file.path, "rb") as stream:
                head = stream.read(_EDGE_BYTES)
                stream.seek(max(0, size - _EDGE_BYTES))
                digest = hashlib.sha256(head + stream.read()).hexdigest()
            content.append([file.path.name, list(file.partitions), size, digest])
    spec = plan.dataset.model_dump(mode="json", exclude={"uri", "name"})
    return _sha256([FORMAT_VERSION, spec, str(plan.source.window), content])


def _fingerprint(plan: DataPlan, base: Mapping[str, IdMap]) -> str:
    digests = {table: _digest(ids) for table, ids in sorted(base.items())}
    job = plan.job
    relevant = [job.model.kind == "bpr", job.evaluation.split.model_dump(mode="json"), job.seed, job.batch_size]
    relevant.append(sorted(plan.graphs))
    if plan.is_sequence:
        relevant.append(_sequence_settings(job))
    relevant.append(job.init_from.retire_after_runs if job.init_from is not None else None)
    files = [source.fingerprint_files() for source in _sources(plan)]
    spec = plan.dataset.model_dump(mode="json")
    return _sha256([FORMAT_VERSION, spec, str(plan.source.window), relevant, files, digests])


def _digest(base: IdMap) -> str:
    digest = hashlib.sha256(str(base.run).encode())
    for ids, runs in ((base.ids, base.last_seen), (base.retired, base.retired_in)):
        # Hashes of the ids in their order: Arrow's own buffers differ for equal arrays (offsets, padding).
        digest.update(id_keys(as_ids(ids, id_kind(ids.type, "base_vocabulary"), "base_vocabulary")).tobytes())
        digest.update(np.asarray(runs, dtype=np.int32).tobytes())
    return digest.hexdigest()


def _sources(plan: DataPlan) -> list[Source]:
    return [
        plan.source,
        *(join.source for join in plan.joins.values()),
        *(file.source for file in plan.graphs.values()),
    ]


def _sha256(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _make_durable(directory: Path) -> None:
    """Everything below is on disk before the rename is: a machine that goes down must not leave a manifest beside
    columns that are short or full of zeros, which would be trained on."""
    for folder, _, files in os.walk(directory):
        for name in files:
            _fsync(Path(folder) / name)
        _fsync(Path(folder))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(directory: Path) -> None:
    """What a killed process left beside ``directory`` while it prepared."""
    for path in directory.parent.glob(f".{directory.name}.*.preparing"):
        pid = path.name.split(".")[-3]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
