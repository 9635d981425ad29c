"""Preparation of a dataset for a job, as a directory of memory-mapped columns that appears complete. Torch-free."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.durable_files import fsync_path, fsync_tree
from trainer.data.batches.keys import keys_of
from trainer.data.batches.prepared import PreparedData
from trainer.data.batches.prepared_columns import FORMAT_VERSION, GRAPHS, MANIFEST
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS, GrownTable, IdMap
from trainer.data.columns.labels import label_dtype
from trainer.data.columns.numeric import NUMERIC_FILE, Numeric, with_fill, write_numeric
from trainer.data.columns.vectors import VECTORS_FILE, write_vectors
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import OFFSET, write_array
from trainer.data.prepare.bad_rows import BadRows
from trainer.data.prepare.by_tasks.assembly import Assembly, assembled
from trainer.data.prepare.by_tasks.tasks import Hosts
from trainer.data.prepare.catalogue import catalogue_of, write_catalogue
from trainer.data.prepare.drift import HELD_OUT_FROM, PROFILE_FILE, as_json, drift, in_words, profile_of, write_profile
from trainer.data.prepare.encode import Encoded, encode
from trainer.data.prepare.fingerprint import (
    WarmStart,
    dataset_fingerprint,
    files_of,
    fingerprint_of,
    sampling_of,
    sequence_settings,
    stayed,
)
from trainer.data.prepare.graphs import write_graph
from trainer.data.prepare.numbers import finish_numeric, inherited_numeric
from trainer.data.prepare.part_cache import PartCache, part_cache
from trainer.data.prepare.plan import DataPlan, make_plan
from trainer.data.prepare.progress import Progress
from trainer.data.prepare.row_figures import row_figures
from trainer.data.prepare.sequences import Sequences, Windows
from trainer.data.prepare.shared import SharedPreparedData
from trainer.data.prepare.split import SPLIT_NAMES, time_limits
from trainer.data.prepare.table_rows import check_parent_ids, codes_to_rows, finish_tables, ids_before
from trainer.data.prepare.workers import Workers, num_threads
from trainer.data.prepare.writing import FinishedSplits, write_splits
from trainer.data.sources.followed_folder import COLUMNS_FILE, write_columns
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.models.sequences import PieceSpec

_REPLACED = ".replaced"
BAD_ROWS = "bad_rows.parquet"
"""Name of the file, in the parent folder of the prepared data, with the bad rows left out and the reasons."""


def prepare(
    dataset: DatasetSpec,
    job: JobSpec,
    directory: Path | str,
    *,
    base_vocabulary: Mapping[str, IdMap] | None = None,
    base_numeric: Sequence[Numeric] | None = None,
    base_profile: Mapping[str, Any] | None = None,
    text_tables: Collection[str] = (),
    threads: int | None = None,
    hosts: Hosts | None = None,
    shared: SharedPreparedData | None = None,
    log: Callable[[str], Any] = lambda message: None,
    report: Callable[..., Any] = lambda **figures: None,
    fence: Callable[[], None] = lambda: None,
) -> PreparedData:
    """Read the dataset, split it, and write coded columns under ``directory``, for the training ranks to open.

    A directory made from the same specs, the same files (by size and time) and the same warm start is reused. The
    directory appears complete, on disk and by one rename, so a crash leaves nothing half-written. After a crash, the
    next call continues after the rows already read (:mod:`trainer.data.prepare.part_cache`). With ``max_bad_rows``,
    bad rows are left out and written to ``bad_rows.parquet`` in the parent folder of the directory, even if there are
    too many. For a one-pass job (``dataset.one_pass``) no row is read: the directory follows from the specs and the
    files' schemas.

    Args:
        dataset: location of the rows, and the meaning of their columns.
        job: the job, with the split and the features to read.
        directory: the directory to make.
        base_vocabulary: ids of the parent model of a warm start, by table. The parent's ids keep their order, without
            the ids that ``init_from.retire_after_runs`` retires; new ids follow.
        base_numeric: the parent's statistics of numeric features, which are kept; statistics of other features are
            computed from this run's rows.
        base_profile: profile of the parent's rows, with which this run's rows are compared
            (:mod:`trainer.data.prepare.drift`).
        text_tables: tables whose ids are kept as text, even if the rows have integers, because the served ids are text.
        threads: number of threads; the result does not depend on it. None:
            :func:`trainer.data.prepare.workers.num_threads`.
        hosts: other hosts that may read and write parts of the rows, with the same result
            (:mod:`trainer.data.prepare.by_tasks`); None: this process does everything.
        shared: data prepared by other runs on this host, to reuse if it is the same; None: nothing is shared.
        log: called with messages on the progress.
        report: called with progress figures (:class:`trainer.data.prepare.progress.Progress`).
        fence: called before the rename; an exception that it raises leaves the directory as it was.

    Returns:
        The prepared data, opened.

    Raises:
        DataError: the rows cannot be trained on, or the directory cannot be written; names file, column, row and
            remedy.
    """
    directory, began_ns = Path(directory), time.time_ns()
    plan = make_plan(dataset, job)
    plan = plan.with_text([*text_tables, *(name for name, ids in (base_vocabulary or {}).items() if ids.is_text)])
    for note in [*plan.notes, *_converted(plan, base_vocabulary or {})]:
        log(note)
    base = WarmStart(dict(base_vocabulary or {}), base_numeric, base_profile)
    files = files_of(plan)
    fingerprint = fingerprint_of(plan, base, files)
    if PreparedData.fingerprint_of(directory) == fingerprint:
        log(f"prepared data reused: {directory}")
        return PreparedData.open(directory)
    if not job.dataset.one_pass and (without_rows := plan.source.days_without_rows()) is not None:
        log(without_rows)
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
        for use in plan.uses:
            use.require_clear(plan.source)
        key = "" if shared is None else shared.key_of(fingerprint, _settings(plan, fingerprint))
        with nullcontext() if shared is None else shared.only_one(key, log):
            if shared is not None and shared.take(key, work):
                log("prepared data of another run of this host are used")
                if (work / BAD_ROWS).exists():
                    fence()
                    os.replace(work / BAD_ROWS, directory.parent / BAD_ROWS)
                _replace(directory, work, fence)
                return PreparedData.open(directory)
            with (
                part_cache(directory, fingerprint, private) as parts,
                Workers(num_threads(job) if threads is None else threads) as workers,
            ):
                left_out, progress = _quarantine(plan, directory, work, parts, fence), Progress(log, report)
                with assembled(plan, fingerprint, hosts, work, base, log) as assembly:
                    _write(_Preparation(plan, work, fingerprint, base, workers, progress), parts, assembly, left_out)
                _replace(directory, work, fence)
            if shared is not None and stayed(plan, files, began_ns):
                shared.keep(key, _files_of(directory))
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror or error}",
            where=str(error.filename or directory),
            remedy="free disk space, or check the directory's permissions",
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return PreparedData.open(directory)


def _converted(plan: DataPlan, base: Mapping[str, IdMap]) -> list[str]:
    """Return a note for each table whose ids are integers in the warm start's parent and text in the rows."""
    return [
        f"ids of {table}: integers of the job in init_from are text in the rows, and are read as text"
        for table, ids in base.items()
        if plan.kinds.get(table) == "string" and not ids.is_text
    ]


def _files_of(directory: Path) -> dict[str, Path]:
    """Return the paths of the prepared files by their names below the directory, and the file of bad rows if any."""
    found = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    if json.loads((directory / MANIFEST).read_text("utf-8"))["bad_rows"]:
        found[BAD_ROWS] = directory.parent / BAD_ROWS
    return found


def _replace(directory: Path, work: Path, fence: Callable[[], None]) -> None:
    """Rename ``work`` to ``directory``, in place of an older directory, once all its files are on disk."""
    # After a power failure, no manifest may stand beside columns that are short or full of zeros.
    fsync_tree(work)
    fence()
    # Move the older directory into ``work``; if another process has removed ``work``, the older one stays as it is.
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, work / _REPLACED)
    os.rename(work, directory)
    fsync_path(directory.parent)
    shutil.rmtree(directory / _REPLACED, ignore_errors=True)


@dataclass(frozen=True)
class _Preparation:
    """One call of :func:`prepare` once its plan is made; ``work`` is renamed to the directory when it is complete."""

    plan: DataPlan
    work: Path
    fingerprint: str
    base: WarmStart
    workers: Workers
    progress: Progress


def _write(
    task: _Preparation,
    parts: PartCache,
    assembly: Assembly | None,
    left_out: contextlib.AbstractContextManager[BadRows | None],
) -> None:
    """Write the splits and the other files of the directory; with an ``assembly``, tasks on hosts make the splits."""
    with left_out as bad_rows:
        if assembly is None:
            encoded = encode(task.plan, parts, task.workers, bad_rows, task.progress)
        else:
            splits = assembly.prepare(bad_rows, task.workers, task.progress)
    if bad_rows is not None:
        there = f"; they are in {task.work.parent / BAD_ROWS}" if bad_rows.num_bad else ""
        task.progress.log(bad_rows.in_words() + there)
    if assembly is None:
        splits = _write_splits(task, encoded)
    _finish(task, splits, bad_rows)


def _write_splits(task: _Preparation, encoded: Encoded) -> FinishedSplits:
    """Write the splits in this process; return them, with seen items and sequences that are not yet written."""
    plan, work, base, workers, progress = task.plan, task.work, task.base, task.workers, task.progress
    split = plan.job.evaluation.split
    writers, seen, sequences = write_splits(plan, encoded, work, workers, progress)
    grown, row_counts = finish_tables(plan, encoded, work, base.vocabulary, workers)
    rows_of = {table: one.row_of_code for table, one in grown.items()}
    unknown_share = codes_to_rows(plan, work, rows_of, workers, progress.log)
    return FinishedSplits(
        encoded,
        grown,
        row_counts,
        finish_numeric(plan, work, base.numeric, workers),
        writers["train"].label_figures,
        {name: writer.num_examples for name, writer in writers.items()},
        {name: writer.num_positives for name, writer in writers.items()},
        unknown_share,
        time_limits(split, encoded.order(str(plan.dataset.ordering))) if split.kind == "time" else None,
        seen,
        sequences,
    )


def _finish(task: _Preparation, splits: FinishedSplits, bad_rows: BadRows | None) -> None:
    """Write all files except the splits, the manifest last."""
    plan, work, base, log = task.plan, task.work, task.base, task.progress.log
    encoded, grown, row_counts, numeric = splits.encoded, splits.grown, splits.row_counts, splits.numeric
    warnings = [*encoded.warnings, *check_parent_ids(base.vocabulary, grown, row_counts, plan.source.uri)]
    if numeric:
        write_numeric(numeric, work / NUMERIC_FILE)
    if plan.vectors:
        write_vectors(plan.vectors, work / VECTORS_FILE)
    catalogue = None
    if plan.items is not None:
        catalogue = catalogue_of(plan, encoded, grown, numeric)
        write_catalogue(catalogue, work, log)
    rows_of = {table: one.row_of_code for table, one in grown.items()}
    if splits.seen is not None:
        splits.seen.write(work, rows_of, {table: one.num_rows for table, one in grown.items()}, catalogue)
    profile = profile_of(plan, encoded, row_counts, splits.labels, task.workers)
    held_out_from = [np.asarray(one).item() for one in splits.time_limits or () if one is not None]
    if held_out_from:
        profile[HELD_OUT_FROM] = min(held_out_from)
    write_profile(profile, work / PROFILE_FILE)
    moved = None
    if base.profile is not None:
        moved = drift(base.profile, profile, plan, encoded, grown, row_counts)
        log(in_words(moved))
    num_examples, num_positives = splits.num_examples, splits.num_positives
    if splits.sequences is not None:
        splits.sequences.write(work, rows_of[plan.single("item").domain])
        num_examples = num_positives = _sequence_examples(plan, Sequences(work))
    _write_tables(work / "tables", grown, row_counts, base.vocabulary, log)
    graphs = {
        name: write_graph(
            edges, plan.kinds[edges.table], grown[edges.table].ids.ids, work / GRAPHS, log, warnings.append
        )
        for name, edges in plan.graphs.items()
    }
    for warning in warnings:
        log(f"warning: {warning}")
    if plan.job.publish is not None and not encoded.columns:
        log("several hosts prepared the rows: the gate cannot check the pairing of users and items")
    user = plan.feature("user")
    items = {}
    if catalogue is not None:
        items["items"] = {"num_in_table": catalogue.num_in_table, "num_numbers": len(plan.item_numeric)}
    manifest = _settings(plan, task.fingerprint) | {
        "tables": {table: {"num_rows": one.num_rows} for table, one in grown.items()},
        "graphs": graphs,
        "numeric": [one.name for one in numeric],
        "vectors": [asdict(one) for one in plan.vectors],
        **items,
        "bad_rows": None if bad_rows is None else dict(bad_rows.by_reason),
        "drift": None if moved is None else as_json(moved),
        "warnings": warnings,
        "row_figures": row_figures(plan, encoded, None if user is None else row_counts.get(user.table)),
        "num_rows_read": encoded.num_rows,
        "num_examples": num_examples,
        "num_positives": num_positives,
        "unknown_share": splits.unknown_share,
        "seed": plan.job.seed,
        "batch_size": plan.job.batch_size,
    }
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
    log("examples: " + ", ".join(f"{name} {count:,}" for name, count in num_examples.items()))


def _write_without_rows(plan: DataPlan, work: Path, fingerprint: str, base: WarmStart) -> None:
    """Write the directory of a one-pass job, only from its specs and the files' schemas."""
    if plan.numeric:
        known = inherited_numeric(plan, base.numeric or ())
        write_numeric([known.get(one.name) or with_fill(one) for one in plan.numeric], work / NUMERIC_FILE)
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
    if plan.job.dataset.follow is not None and plan.dataset.messages is None:
        write_columns(plan.source, work / COLUMNS_FILE)
    (work / "tables").mkdir()
    for table in plan.trained_tables:
        ids = ids_before(table, plan.kinds[table], base.vocabulary.get(table), keeps_strings=table == plan.raw_table)
        ids.write(work / "tables" / f"{table}.arrow")
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")


def check_files_read(dataset: DatasetSpec, job: JobSpec, directory: Path, num_files: int) -> None:
    """Check that the files that a one-pass job has read are unchanged; the files after them may have changed.

    ``num_files``: number of files, from the first on, that were read in whole or in part.

    Raises:
        DataError: a file was changed or removed.
    """
    begun = json.loads((directory / MANIFEST).read_text("utf-8")).get("files", [])
    there = make_plan(dataset, job).source.fingerprint_files()
    for number in range(num_files):
        if there[number : number + 1] != begun[number : number + 1]:
            raise DataError(
                "has changed since its rows were trained on, and no copy of them is kept",
                where=str(begun[number][0]),
                remedy="restore it unchanged, with its modification time, or start a new job",
            )


def _settings(plan: DataPlan, fingerprint: str) -> dict[str, Any]:
    """Return the entries of the manifest that follow from the specs and the files, not from values of rows."""
    return {
        "format": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "dataset_fingerprint": dataset_fingerprint(plan),
        "keys": [asdict(key) for key in keys_of(plan.dataset, plan.job)],
        "is_bpr": plan.is_bpr,
        "label_dtype": label_dtype(plan.dataset).name,
        "labels": [task._asdict() for task in plan.tasks],
        "weighted": plan.dataset.weight is not None,
        # The key of shared data has this limit: data that another limit accepted are not reused.
        **({"max_unmatched": plan.dataset.max_unmatched} if plan.joins or plan.graphs else {}),
        "draws_negatives": plan.dataset.negatives is not None,
        "sampling": sampling_of(plan.job),
        "sequence": sequence_settings(plan.job) if plan.is_sequence else None,
        "unread": sorted(f.name for f in plan.features if f not in plan.trained and f.name != "user"),
    }


def _write_tables(
    directory: Path,
    grown: Mapping[str, GrownTable],
    row_counts: Mapping[str, npt.NDArray[np.int64]],
    base: Mapping[str, IdMap],
    log: Callable[[str], Any],
) -> None:
    """Write each table's ids, their counts in the training split, and the row that each id had in the parent."""
    directory.mkdir()
    for table, one in grown.items():
        one.ids.write(directory / f"{table}.arrow")
        write_array(directory / f"{table}.counts.bin", row_counts[table], OFFSET)
        write_array(directory / f"{table}.parent.bin", one.parent_rows, OFFSET)
        if table in base:
            log(_growth_in_words(table, base[table], one))


@contextlib.contextmanager
def _quarantine(
    plan: DataPlan, directory: Path, work: Path, parts: PartCache, fence: Callable[[], None]
) -> Iterator[BadRows | None]:
    """Yield the writer of bad rows, or None if the dataset allows none and a bad row is an error."""
    # At the end the file of bad rows appears in the parent folder of directory, even if there were too many.
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


def _sequence_examples(plan: DataPlan, sequences: Sequences) -> dict[str, int]:
    """Return the number of examples by split: in training of items or pieces of sequences, else of items to predict."""
    model = plan.job.model
    train = len(Windows(sequences.train, model.length)) if isinstance(model, PieceSpec) else len(sequences.train.values)
    return {"train": train, **{name: len(places) for name, places in sequences.held.items()}}


def _growth_in_words(table: str, base: IdMap, grown: GrownTable) -> str:
    continued = int((grown.parent_rows >= NUM_SPECIAL_ROWS).sum())
    idle = int((grown.ids.last_seen < grown.ids.run).sum())
    return (
        f"ids of {table}: {continued:,} of {len(base.ids):,} are kept ({idle:,} without an example in this run), "
        f"{len(base.ids) - continued:,} retired, {len(grown.ids.ids) - continued:,} new"
    )


def _remove_leftovers(directory: Path) -> None:
    """Remove temporary folders that killed preparations of ``directory`` left in its parent folder."""
    for path in directory.parent.glob(f".{directory.name}.*.preparing"):
        pid = path.name.split(".")[-3]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
