"""Preparation, from a dataset and a job to a directory of memory-mapped columns, all or nothing. Torch-free."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embeddings.durable_files import fsync_path, fsync_tree
from trainer.data.batches.keys import keys_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.batches.prepared_columns import FORMAT_VERSION, GRAPHS, MANIFEST
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, GrownTable, IdMap, hashes_of
from trainer.data.columns.labels import label_dtype
from trainer.data.columns.numeric import NUMERIC_FILE, Numeric, with_fill, write_numeric
from trainer.data.columns.values import as_ids, id_kind
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import OFFSET, write_array
from trainer.data.prepare.bad_rows import BadRows
from trainer.data.prepare.catalogue import Catalogue, catalogue_of, write_catalogue
from trainer.data.prepare.drift import PROFILE_FILE, as_json, drift, in_words, profile_of, write_profile
from trainer.data.prepare.encode import encode
from trainer.data.prepare.graphs import write_graphs
from trainer.data.prepare.kept_parts import KeptParts, kept_parts
from trainer.data.prepare.plan import DataPlan, make_plan
from trainer.data.prepare.progress import Progress
from trainer.data.prepare.sequences import Sequences
from trainer.data.prepare.split import SPLIT_NAMES
from trainer.data.prepare.workers import Workers, num_threads
from trainer.data.prepare.writing import (
    codes_to_rows,
    finish_numeric,
    finish_tables,
    ids_before,
    inherited_numeric,
    write_splits,
)
from trainer.data.sources.locations import read_edges
from trainer.data.sources.source import Source
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.models.base import DrawingSpec
from trainer.spec.models.sequences import PieceSpec, SequenceSpec

_EDGE_BYTES = 1 << 16
_REPLACED = ".replaced"
BAD_ROWS = "bad_rows.parquet"
"""Beside the prepared data: rows that were left out, with the reason."""


@dataclass(frozen=True)
class WarmStart:
    """What a run goes on from: ids by table, statistics of numeric features, and what the rows were like."""

    vocabulary: Mapping[str, IdMap]
    numeric: Sequence[Numeric] | None
    profile: Mapping[str, Any] | None


def prepare(
    dataset: DatasetSpec,
    job: JobSpec,
    directory: Path | str,
    *,
    base_vocabulary: Mapping[str, IdMap] | None = None,
    base_numeric: Sequence[Numeric] | None = None,
    base_profile: Mapping[str, Any] | None = None,
    threads: int | None = None,
    log: Callable[[str], Any] = lambda message: None,
    report: Callable[..., Any] = lambda **figures: None,
    fence: Callable[[], None] = lambda: None,
) -> PreparedData:
    """Read the dataset, split it, and write coded columns under ``directory``, which ranks then open.

    A directory that already holds exactly this (same specs, same files by size and time, same ``base_vocabulary``) is
    reused. The directory appears complete, on disk and by one rename, so a crash leaves nothing half-written, and what
    was read until then is taken up again (:mod:`trainer.data.prepare.kept_parts`). Rows that
    ``max_bad_rows`` leaves out are written to ``bad_rows.parquet`` beside it, also where they are too many. Of a job of
    one pass (``dataset.one_pass``) no row is read: what is written is what the specs and the files' schemas say.

    Args:
        dataset: where the rows are, and what their columns mean.
        job: says how rows are split and which features are read.
        directory: the directory to make.
        base_vocabulary: by table, from a warm start: old ids keep their rows, but for those that
            ``init_from.retire_after_runs`` gives up; new ids follow.
        base_numeric: the warm start's statistics of numeric features, which stay.
        base_profile: what the warm start's rows were like; this run's are compared with it
            (:mod:`trainer.data.prepare.drift`).
        threads: how many work on it, of which no byte depends; None: :func:`trainer.data.prepare.workers.num_threads`.
        log: takes messages on the progress.
        report: takes figures of it (:class:`trainer.data.prepare.progress.Progress`).
        fence: called before the rename; what it raises leaves the directory as it was.

    Returns:
        The directory, opened.

    Raises:
        DataError: naming file, column, row and the remedy.
    """
    directory = Path(directory)
    plan = make_plan(dataset, job)
    base = WarmStart(dict(base_vocabulary or {}), base_numeric, base_profile)
    fingerprint = _fingerprint(plan, base)
    if PreparedData.fingerprint_of(directory) == fingerprint:
        log(f"prepared data reused: {directory}")
        return PreparedData.open(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    name = f".{directory.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    work, private = directory.parent / f"{name}.preparing", directory.parent / f"{name}.parts.preparing"
    try:
        work.mkdir()
        if job.dataset.one_pass:
            _write_without_rows(plan, work, fingerprint, base)
            _replace(directory, work, fence)
            return PreparedData.open(directory)
        with (
            kept_parts(directory, fingerprint, private) as parts,
            Workers(num_threads(job) if threads is None else threads) as workers,
        ):
            left_out = _quarantine(plan, directory, work, parts, fence)
            _write(plan, work, fingerprint, base, workers, Progress(log, report), parts, left_out)
            _replace(directory, work, fence)
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror or error}",
            where=str(error.filename or directory),
            remedy="free disk space, or check the directory's permissions",
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return PreparedData.open(directory)


def _replace(directory: Path, work: Path, fence: Callable[[], None]) -> None:
    """Make ``work`` the directory, on disk and by one rename."""
    # A machine that goes down must not leave a manifest beside columns that are short or full of zeros.
    fsync_tree(work)
    fence()
    # Into ``work``, and not removed: where somebody took that away since, nothing here is touched.
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, work / _REPLACED)
    os.rename(work, directory)
    fsync_path(directory.parent)
    shutil.rmtree(directory / _REPLACED, ignore_errors=True)


def _write(
    plan: DataPlan,
    work: Path,
    fingerprint: str,
    base: WarmStart,
    workers: Workers,
    progress: Progress,
    parts: KeptParts,
    left_out: contextlib.AbstractContextManager[BadRows | None],
) -> None:
    log = progress.log
    with left_out as bad_rows:
        encoded = encode(plan, parts, workers, bad_rows, progress)
    if bad_rows is not None:
        log(bad_rows.in_words() + (f"; they are in {work.parent / BAD_ROWS}" if bad_rows.num_bad else ""))
    writers, seen, sequences = write_splits(plan, encoded, work, workers, progress)
    grown, row_counts = finish_tables(plan, encoded, work, base.vocabulary, workers)
    rows_of = {table: one.row_of_code for table, one in grown.items()}
    unknown_share = codes_to_rows(plan, work, rows_of, workers, log)
    numeric = finish_numeric(plan, work, base.numeric, workers)
    if numeric:
        write_numeric(numeric, work / NUMERIC_FILE)
    catalogue = None
    if plan.items is not None:
        catalogue = catalogue_of(plan, encoded, grown, numeric)
        write_catalogue(catalogue, work, log)
    seen.write(work, rows_of, row_counts, catalogue)
    profile = profile_of(plan, encoded, row_counts, writers["train"].label_figures, workers)
    write_profile(profile, work / PROFILE_FILE)
    moved = None
    if base.profile is not None:
        moved = drift(base.profile, profile, plan, encoded, grown, row_counts)
        log(in_words(moved))
    num_examples = {name: writer.num_examples for name, writer in writers.items()}
    num_positives = {name: writer.num_positives for name, writer in writers.items()}
    if plan.is_sequence:
        item = plan.feature("item")
        assert item is not None
        sequences.write(work, rows_of[item.table])
        num_examples = num_positives = _sequence_examples(plan, Sequences(work))
    _write_tables(work / "tables", grown, row_counts, base.vocabulary, log)
    graphs = write_graphs(
        plan.graphs, plan.kinds, {name: one.ids.ids for name, one in grown.items()}, work / GRAPHS, log
    )
    manifest = _settings(plan, fingerprint) | {
        "tables": {table: {"num_rows": one.num_rows} for table, one in grown.items()},
        "graphs": graphs,
        "numeric": [one.name for one in numeric],
        **_items(plan, catalogue),
        "bad_rows": None if bad_rows is None else dict(bad_rows.by_reason),
        "drift": None if moved is None else as_json(moved),
        "num_rows_read": encoded.num_rows,
        "num_examples": num_examples,
        "num_positives": num_positives,
        "unknown_share": unknown_share,
        "seed": plan.job.seed,
        "batch_size": plan.job.batch_size,
    }
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    log("examples: " + ", ".join(f"{name} {count:,}" for name, count in num_examples.items()))


def _write_without_rows(plan: DataPlan, work: Path, fingerprint: str, base: WarmStart) -> None:
    """Write what is known of the data of a job of one pass before a row is read."""
    if plan.numeric:
        known = None if base.numeric is None else inherited_numeric(plan, base.numeric)
        write_numeric(known or [with_fill(one) for one in plan.numeric], work / NUMERIC_FILE)
    none = dict.fromkeys(SPLIT_NAMES, 0)
    manifest = _settings(plan, fingerprint) | {
        "tables": {table: {"num_rows": NUM_SPECIAL_ROWS} for table in plan.trained_tables},
        "numeric": [one.name for one in plan.numeric],
        "num_rows_read": plan.source.reader.num_rows() or 0,
        "num_examples": none,
        "num_positives": none,
        "unknown_share": {},
        "seed": plan.job.seed,
        "batch_size": plan.job.batch_size,
        "files": plan.source.fingerprint_files(),
    }
    (work / "tables").mkdir()
    for table in plan.trained_tables:
        ids = ids_before(table, plan.kinds[table], base.vocabulary.get(table))
        ids.write(work / "tables" / f"{table}.arrow")
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")


def check_files_read(dataset: DatasetSpec, job: JobSpec, directory: Path, num_files: int) -> None:
    """Check that the first files of a job of one pass are those that it has begun with; others may have changed.

    Args:
        dataset: of the job.
        job: the job.
        directory: what :func:`prepare` has written for it.
        num_files: how many of them were read, in whole or in part.

    Raises:
        DataError: one is another, or gone.
    """
    begun = json.loads((directory / MANIFEST).read_text("utf-8")).get("files", [])
    there = make_plan(dataset, job).source.fingerprint_files()
    for number in range(num_files):
        if there[number : number + 1] != begun[number : number + 1]:
            raise DataError(
                "has changed since rows of it were trained on, which are kept nowhere",
                where=str(begun[number][0]),
                remedy="bring it back as it was, with its time of change, or start a new job",
            )


def _settings(plan: DataPlan, fingerprint: str) -> dict[str, Any]:
    """Return the part of the manifest that follows from the specs and the files, whatever the rows are."""
    return {
        "format": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "dataset_fingerprint": dataset_fingerprint(plan),
        "keys": [asdict(key) for key in keys_of(plan.dataset, plan.job)],
        "is_bpr": plan.is_bpr,
        "label_dtype": label_dtype(plan.dataset).name,
        "labels": [task._asdict() for task in plan.tasks],
        "weighted": plan.dataset.weight is not None,
        "sampling": _sampling(plan.job),
        "sequence": _sequence_settings(plan.job) if plan.is_sequence else None,
        "unread": sorted(f.name for f in plan.features if f not in plan.trained and f.name != "user"),
    }


def _items(plan: DataPlan, catalogue: Catalogue | None) -> dict[str, Any]:
    """Return what the manifest says of the item table, where there is one."""
    if catalogue is None:
        return {}
    return {"items": {"num_in_table": catalogue.num_in_table, "num_numbers": len(plan.item_numeric)}}


def _write_tables(
    directory: Path,
    grown: Mapping[str, GrownTable],
    row_counts: Mapping[str, npt.NDArray[np.int64]],
    base: Mapping[str, IdMap],
    log: Callable[[str], Any],
) -> None:
    """Write the ids of each table, their training occurrences, and the rows of the warm start that they go on from."""
    directory.mkdir()
    for table, one in grown.items():
        one.ids.write(directory / f"{table}.arrow")
        write_array(directory / f"{table}.counts.bin", row_counts[table], OFFSET)
        write_array(directory / f"{table}.parent.bin", one.parent_rows, OFFSET)
        if table in base:
            log(_growth_in_words(table, base[table], one))


@contextlib.contextmanager
def _quarantine(
    plan: DataPlan, directory: Path, work: Path, parts: KeptParts, fence: Callable[[], None]
) -> Iterator[BadRows | None]:
    """Yield what takes bad rows, where some may be.

    Its file appears beside ``directory``, also where the bad rows are too many.
    """
    if plan.dataset.max_bad_rows is None:
        yield None
        return
    bad_rows = BadRows(plan, work / BAD_ROWS, parts.folder)
    final = directory.parent / BAD_ROWS
    try:
        yield bad_rows
    finally:
        bad_rows.close()
        if bad_rows.num_bad:
            fence()
            os.replace(bad_rows.path, final)


def _sampling(job: JobSpec) -> dict[str, Any]:
    """Return how negatives are drawn anew in each epoch."""
    model = job.model
    if not isinstance(model, DrawingSpec):
        return {"distribution": "uniform", "power": 0.75}
    return {"distribution": model.sampling, "power": model.negative_power}


def _sequence_settings(job: JobSpec) -> dict[str, Any]:
    """Return what batches of sequences are cut by; ``history``: the number of items that an evaluation reads."""
    model = job.model
    assert isinstance(model, SequenceSpec)
    return {
        "kind": model.kind,
        # Both are in every manifest, whichever of them the kind has.
        "window": getattr(model, "window", 3),
        "length": getattr(model, "length", 50),
        "negatives": model.num_negatives,
        "history": model.history_length,
    }


def _sequence_examples(plan: DataPlan, sequences: Sequences) -> dict[str, int]:
    """Return the number of examples, by split.

    To train on: items of sequences (item2vec) or pieces of sequences (gru4rec, sasrec). Held out: items to predict.
    """
    model = plan.job.model
    train = len(sequences.windows(model.length)) if isinstance(model, PieceSpec) else len(sequences.train.values)
    return {"train": train, **{name: len(places) for name, places in sequences.held.items()}}


def _growth_in_words(table: str, base: IdMap, grown: GrownTable) -> str:
    continued = int((grown.parent_rows >= NUM_SPECIAL_ROWS).sum())
    idle = int((grown.ids.last_seen < grown.ids.run).sum())
    return (
        f"ids of {table}: {continued:,} of {len(base.ids):,} go on ({idle:,} without an example in this run), "
        f"{len(base.ids) - continued:,} retired, {len(grown.ids.ids) - continued:,} new"
    )


def dataset_fingerprint(plan: DataPlan) -> str:
    """Return what identifies the rows, for lineage.

    It is the sha256 of the dataset spec without its place, the window, and of each file its size and its first and last
    64 KiB (a Parquet file's footer: schema, counts, statistics).
    """
    content = []
    for source in _sources(plan):
        for file in source.files:
            size = file.path.stat().st_size
            digest = hashlib.sha256(read_edges(file.path, _EDGE_BYTES)).hexdigest()
            content.append([file.path.name, list(file.partitions), size, digest])
    spec = plan.dataset.model_dump(mode="json", exclude={"uri", "name"})
    return _sha256([FORMAT_VERSION, spec, str(plan.source.window), content])


def _fingerprint(plan: DataPlan, base: WarmStart) -> str:
    digests = {table: _digest(ids) for table, ids in sorted(base.vocabulary.items())}
    job = plan.job
    relevant = [job.model.draws_partner, job.evaluation.split.model_dump(mode="json"), job.seed, job.batch_size]
    relevant.append(sorted(plan.graphs))
    if job.dataset.one_pass:
        relevant.append("one pass")
    if plan.is_sequence:
        relevant.append(_sequence_settings(job))
    model = job.model
    if isinstance(model, DrawingSpec) and (model.negative_distribution is not None or model.negative_power != 0.75):
        relevant.append(_sampling(job))
    relevant.append(job.init_from.retire_after_runs if job.init_from is not None else None)
    if plan.least_labels:
        relevant.append(plan.least_labels)
    if plan.keeps_users:
        relevant.append("users")
    if plan.keeps_seen and not plan.is_bpr:
        relevant.append("seen items")
    if plan.all_numeric:
        relevant.append(None if base.numeric is None else [one.as_json() for one in base.numeric])
    if base.profile is not None:
        relevant.append(base.profile)
    files = [source.fingerprint_files() for source in _sources(plan)]
    spec = plan.dataset.model_dump(mode="json")
    return _sha256([FORMAT_VERSION, spec, str(plan.source.window), relevant, files, digests])


def _digest(base: IdMap) -> str:
    digest = hashlib.sha256(str(base.run).encode())
    for ids, runs in ((base.ids, base.last_seen), (base.retired, base.retired_in)):
        # Hashes of the ids in their order: Arrow's own buffers differ for equal arrays (offsets, padding).
        if not pa.types.is_uint64(ids.type):
            ids = as_ids(ids, id_kind(ids.type, "base_vocabulary"), "base_vocabulary")
        digest.update(hashes_of(ids).tobytes())
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


def _remove_leftovers(directory: Path) -> None:
    """Remove what a killed process left beside ``directory`` while it prepared."""
    for path in directory.parent.glob(f".{directory.name}.*.preparing"):
        pid = path.name.split(".")[-3]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
