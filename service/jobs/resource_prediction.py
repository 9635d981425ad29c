"""Prediction of the resources that a job will need of its host, from its dataset.

The prediction is made when the job is submitted or, if that takes too long, before its turn comes. The functions block
and are meant for :mod:`service.core.thread_pools`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from service.core.errors import Problem, invalid
from service.core.settings import Settings
from service.datasets import registry
from service.datasets.file_cache import FileCache
from service.datasets.paths import data_files, local_path
from service.jobs import admission
from service.jobs.admission import ResourceRequest, needs_of
from service.jobs.executors.registry import placement_of
from service.jobs.job_row import JobRow
from trainer.data.errors import DataError
from trainer.sizing.estimate import Estimate, estimate, ids_per_example, too_large
from trainer.sizing.memory import rank_memory
from trainer.sizing.row_shape import RowShape
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.problems import FieldProblem
from trainer.spec.stored_specs import to_run

log = logging.getLogger("evenkeel.runner")

AT_ONCE_BYTES = 32 * 2**20
"""Largest dataset whose rows are counted during the request; counting takes about half a second for a million rows."""
_counted: FileCache[Estimate] = FileCache()


def at_once(settings: Settings, spec: JobSpec, dataset: DatasetSpec) -> ResourceRequest | None:
    """Predict the needs of a job during the request that submits it.

    Returns:
        The needs, or None for a dataset that is too large to be counted during a request, or that cannot be read; the
        run reports why it cannot.

    Raises:
        Problem: 422, with the arithmetic, for a job that could never run here.
    """
    if _num_bytes(dataset.uri) > AT_ONCE_BYTES:
        return None
    placement = placement_of(settings)
    same = (spec.model_dump_json(exclude={"name", "labels"}), dataset.model_dump_json())
    try:
        gpu_bytes = placement.gpu_bytes(spec)
        estimated = _counted.get(same, files_of(dataset), lambda: estimate(spec, dataset, gpu_bytes))
    except DataError:
        return None
    needs = needs_of(spec, estimated.memory, estimated.exact, estimated.fewer)
    problem = too_large(spec, estimated, None)
    if problem is None and placement.uses_this_host:
        problem = admission.impossible(needs.choices()[-1], admission.host(settings))
    if problem is not None:
        raise invalid(FieldProblem("resources", *problem))
    return needs


def files_of(spec: DatasetSpec) -> list[Path]:
    """Return every file that a dataset names, without checks; an empty list if it names anything but local files."""
    uri, *beside = registry.named_uris(spec)
    try:
        main = local_path(uri)
        named = [main, *(local_path(uri, main.parent) for uri in beside)]
        return [file for path in named for file in data_files(path)]
    except (ValueError, OSError):
        return []


def of_row(settings: Settings, row: JobRow) -> ResourceRequest:
    """Predict the needs of a queued job.

    If its dataset cannot be read (missing files, unreadable rows), the prediction assumes empty tables; the run reports
    the error.
    """
    spec = JobSpec.model_validate(to_run(row["spec"]))
    dataset = DatasetSpec.model_validate(row["dataset_spec"])
    try:
        checked = registry.check_files(settings.for_tenant(row["tenant"]), dataset)
        estimated = estimate(spec, checked, placement_of(settings).gpu_bytes(spec))
    except Exception as error:  # any error: the whole queue waits for the result
        if not isinstance(error, (DataError, Problem)):
            log.warning("job %s: its rows cannot be counted", row["id"], exc_info=error)
        memory = rank_memory(spec, {}, ids_per_example(spec, dataset), shape=RowShape.of(spec, dataset))
        fewer = dict.fromkeys(spec.resources.worker_counts[1:], memory)
        return needs_of(spec, memory, counted=False, fewer=fewer)
    return needs_of(spec, estimated.memory, estimated.exact, estimated.fewer)


def _num_bytes(uri: str) -> int:
    path = Path(uri.removeprefix("file://"))
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir():
        return AT_ONCE_BYTES + 1  # not on this host
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)
