"""Preparation of a run's rows before its ranks start; rows that an earlier attempt has prepared are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainer.checkpoint.record import TrainingRecord
from trainer.checkpoint.select import newest_of
from trainer.checkpoint.warm_start import InheritedData, inherited_data, parent_checkpoint
from trainer.data.batches.prepared import PreparedData
from trainer.data.one_pass.position import Place
from trainer.data.prepare.by_tasks.assembly import forget_parts
from trainer.data.prepare.by_tasks.tasks import Hosts
from trainer.data.prepare.preparation import check_files_read, prepare
from trainer.data.prepare.remote_data import fetch_prepared, put_prepared
from trainer.data.prepare.shared import shared_on_host
from trainer.data.sources.followed_folder import first_file
from trainer.publishing.anchor import write_targets
from trainer.publishing.published_ids import check_published_ids, tables_served_as_text
from trainer.runs.directory import Run
from trainer.sizing.estimate import ids_per_example
from trainer.sizing.gpus import known_gpu_bytes
from trainer.sizing.memory import machine_memory_bytes
from trainer.sizing.memory_limit import refuse_what_cannot_fit
from trainer.sizing.row_shape import RowShape
from trainer.storage.storage_registry import open_storage

Log = Callable[[str], Any]


def prepare_run(
    run: Run, hosts: Hosts | None, *, info: Log, report: Callable[..., Any], check_cancel: Callable[[], None]
) -> None:
    """Prepare a run's rows in its directory, unless an earlier attempt has trained on them.

    ``hosts``: hosts that prepare parts of the rows as tasks, if any. ``info`` is called with messages for the job's
    owner, ``report`` with the progress. ``check_cancel`` is called while the run waits, and raises if it is to end.

    Raises:
        DataError: rows cannot be trained on.
        MemoryError: the run does not fit into memory.
    """
    # An attempt on another host may have prepared them.
    fetch_prepared(run.folders(run.data), run.data)
    if _goes_on_with_its_rows(run):
        if run.has_fewer_workers:
            check_memory(run)
        return
    follow = run.job.dataset.follow
    if follow is not None and run.dataset.messages is None:
        _await_first_file(run, info, check_cancel)
    parent = parent_checkpoint(run)
    if parent is None and run.job.init_from is not None:
        info("init_from names no trained job yet: this one starts from initial values")
    base = InheritedData() if parent is None else inherited_data(run.job, run.dataset, parent, info)
    prepare(
        run.dataset, run.job, run.data, **base._asdict(),
        text_tables=tables_served_as_text(run), hosts=hosts,
        shared=shared_on_host(run.store_url, run.directory, info), log=info, report=report, fence=run.fence,
    )  # fmt: skip
    check_memory(run)
    if run.job.publish is not None:
        data = PreparedData.open(run.data)
        check_published_ids(run, data)
        if run.job.publish.anchor is not None:
            info(write_targets(run, data, parent))
    put_prepared(run.folders(run.data), run.data)
    if hosts is not None:
        forget_parts(open_storage(hosts.storage))


def _goes_on_with_its_rows(run: Run) -> bool:
    """Return True if the run has a checkpoint: it keeps its prepared rows, even if the dataset's files have changed.

    A one-pass job continues to read the files instead. For it the files already read are checked for changes.
    """
    newest = None if PreparedData.fingerprint_of(run.data) is None else newest_of(run, run.checkpoints)
    if newest is None:
        return False
    if run.job.dataset.one_pass and run.job.dataset.follow is None:
        place = Place.of_json(TrainingRecord.of(newest).position.place)
        check_files_read(run.dataset, run.job, run.data, place.file + (place.row > 0))
        return False
    return True


def _await_first_file(run: Run, info: Log, check_cancel: Callable[[], None]) -> None:
    """Wait until the followed folder has a first readable file: its columns determine the types of ids."""
    follow, uri, is_told = run.job.dataset.follow, run.dataset.uri, False
    assert follow is not None
    while first_file(uri, follow) is None:
        if not is_told:
            info(f"waiting for a first file in {uri}")
            is_told = True
        time.sleep(min(follow.poll_seconds, 1.0))
        check_cancel()


def check_memory(run: Run) -> None:
    """Check that the run fits in memory. The rows must be prepared, and the model is not built yet.

    Raises:
        MemoryError: the run does not fit.
    """
    data = PreparedData.open(run.data)
    rows = {name: table.num_rows for name, table in data.tables.items()}
    machine = None if run.ray_address else machine_memory_bytes()
    graphs = {name: (graph["table"], graph["edges"]) for name, graph in data.graphs.items()}
    gpu_bytes = known_gpu_bytes(run.job, run.ray_address)
    ids, shape = ids_per_example(run.job, run.dataset), RowShape.of(run.job, run.dataset)
    refuse_what_cannot_fit(run.job, rows, ids, machine, graphs, gpu_bytes, shape=shape)
