"""From a JobSpec to a queued job, and from a queued job to its run's inputs: files, parent version, warm start."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection

from embeddings.refresh.held_versions import sound_version
from embeddings.refresh.record import RefreshRecord
from embeddings.sinks.configured import read_sinks
from embeddings.store import Store, StoreError, StoreUnavailable, open_store
from service.core import tables, tenants, thread_pools
from service.core.database import Database
from service.core.errors import Problem, invalid
from service.core.settings import Settings
from service.datasets import registry
from service.datasets.file_cache import FileCache
from service.datasets.paths import data_problem
from service.identity import idempotency, run_tokens
from service.identity.keys import Principal
from service.jobs import job_records, run_events
from service.jobs.admission import ResourceRequest
from service.jobs.executors.registry import placement_of
from service.jobs.job_row import JobRow
from service.jobs.resource_prediction import at_once, files_of
from service.jobs.stored_runs import storage_of
from trainer.data.errors import DataError
from trainer.runs import directory as rundir
from trainer.runs.parents import check_parent, named_checkpoints
from trainer.sizing.estimate import estimate as predict
from trainer.sizing.estimate import ids_per_example, too_large
from trainer.sizing.memory import rank_memory
from trainer.sizing.memory_limit import memory_problem
from trainer.sizing.row_shape import RowShape
from trainer.spec import DatasetSpec, JobSpec
from trainer.spec.problems import FieldProblem, InvalidFieldsError
from trainer.spec.stored_specs import to_run

_passed: FileCache[DatasetSpec] = FileCache()


async def submit(
    database: Database,
    settings: Settings,
    spec: JobSpec,
    principal: Principal,
    idempotency_key: str | None = None,
    entry: Callable[[str], Mapping[str, object]] | None = None,
) -> dict[str, Any]:
    """Create a job and return it as shown to users; for an idempotency key used before, return the earlier job.

    Job and key are stored in one transaction at the end. If the job would be refused, the key is looked up first: a
    repeated request for an accepted job must succeed even if its dataset is gone by now.

    ``entry`` maps the job's id to the audit log entry that is written together with the job.

    Raises:
        Problem: 422 for a job that does not fit its dataset or this service, 409 if the first request with the key is
            still in progress.
    """
    request_text = f"submit {principal.tenant} {spec.model_dump_json()}"
    try:
        job_records.refuse_firing_date(spec)
        async with database.read() as connection:
            spec, dataset = await job_records.check(connection, spec, principal.tenant)
        check = functools.partial(_checked, settings, spec, dataset, principal.tenant)
        needs = await registry.in_check_thread(dataset, check)
    except Problem:
        if idempotency_key is not None:
            async with database.read() as connection:
                done = await idempotency.done_before(connection, principal.key_id, idempotency_key, request_text)
                if done is not None:
                    return await _shown(connection, done)
        raise
    job_id = tables.new_id("job")
    async with database.write() as connection:
        if idempotency_key is not None:
            reserved = await idempotency.take(connection, principal.key_id, idempotency_key, request_text, job_id)
            if isinstance(reserved, idempotency.Done):
                return await _shown(connection, reserved)
        await job_records.refuse_too_many(database, connection, settings, principal.tenant)
        if spec.init_from is not None:  # retention may have removed its starting point meanwhile
            await job_records.check_start(connection, spec, principal.tenant)
        row = await job_records.create(
            connection,
            spec,
            dataset,
            principal.tenant,
            job_id=job_id,
            needs=None if needs is None else needs.document(),
            beside=() if entry is None else [(tables.audit, entry(job_id))],
        )
        return job_records.view_of_new(row)


async def _shown(connection: AsyncConnection, done: idempotency.Done) -> dict[str, Any]:
    assert done.job_id is not None
    return await job_records.view(connection, await job_records.get(connection, done.job_id))


def _checked(settings: Settings, spec: JobSpec, dataset: DatasetSpec, tenant: str) -> ResourceRequest | None:
    """Check the dataset's files and return the job's needs if they can be predicted quickly; raises 422; blocking."""
    _refuse_strange_trackers(settings, spec)
    _refuse_unknown_sinks(settings, spec, tenant)
    of_tenant = settings.for_tenant(tenant)
    same = (of_tenant.data_roots, dataset.model_dump_json())
    checked = _passed.get(same, files_of(dataset), lambda: registry.check_files(of_tenant, dataset))
    _check_parent(of_tenant, spec, checked)
    _refuse_hopeless(spec, checked)
    return at_once(settings, spec, checked)


def _refuse_strange_trackers(settings: Settings, spec: JobSpec) -> None:
    """Raise 422 for a tracking server that the settings do not allow: runs would send it this host's credentials."""
    for index, tracker in enumerate(spec.tracking):
        uri = getattr(tracker, "uri", None)
        if uri is not None and uri not in settings.tracking_uris:
            remedy = (
                "leave uri out to use the service's MLFLOW_TRACKING_URI, or have uri added to EVENKEEL_TRACKING_URIS"
            )
            raise invalid(FieldProblem(f"tracking.{index}.uri", f"runs of this service may not send to {uri}", remedy))


def _refuse_unknown_sinks(settings: Settings, spec: JobSpec, tenant: str) -> None:
    """Raise 422 for a sink that the operator has not configured for the tenant."""
    named = () if spec.publish is None else spec.publish.sinks or ()
    if not named:
        return
    known = [name for name, sink in read_sinks(settings.sinks).items() if sink.tenant == tenant]
    unknown = [name for name in named if name not in known]
    if unknown:
        remedy = f"name some of {', '.join(known)}" if known else "have the operator add it to the file EVENKEEL_SINKS"
        raise invalid(FieldProblem("publish.sinks", f"there is no sink {', '.join(unknown)}", remedy))


def _check_parent(settings: Settings, spec: JobSpec, dataset: DatasetSpec) -> None:
    """Raise 422 for a job that cannot continue from the checkpoints that ``init_from`` names now; blocking.

    Missing checkpoints are not an error here; they are looked up again when the run starts.
    """
    if spec.init_from is None:
        return
    try:
        start = lineage(settings, open_store(settings.store_url), spec).init_checkpoint
    except (Problem, StoreError):
        return
    if start is None:
        return
    try:
        check_parent(spec, dataset, settings.run_dir(Path(start).parent.name))
    except InvalidFieldsError as error:
        raise invalid(*error.problems) from None


def _refuse_hopeless(spec: JobSpec, dataset: DatasetSpec) -> None:
    """Raise 422 if a rank's memory could not hold even empty tables."""
    memory = rank_memory(spec, {}, ids_per_example(spec, dataset), shape=RowShape.of(spec, dataset))
    problem = memory_problem(spec, memory, None)
    if problem is not None:
        raise invalid(FieldProblem("resources", *problem))


async def estimate(database: Database, settings: Settings, spec: JobSpec, tenant: str) -> dict[str, Any]:
    """Validate a job like a submission and predict its memory and time, without running anything.

    Raises:
        Problem: 422 as for a submission, also for a job that needs more memory than its spec states or this machine
            has.
    """
    job_records.refuse_firing_date(spec)
    _refuse_strange_trackers(settings, spec)
    _refuse_unknown_sinks(settings, spec, tenant)
    async with database.read() as connection:
        spec, dataset = await job_records.check(connection, spec, tenant)
    of_tenant = settings.for_tenant(tenant)
    dataset = await registry.in_check_thread(dataset, functools.partial(registry.check_files, of_tenant, dataset))
    await asyncio.to_thread(_check_parent, of_tenant, spec, dataset)
    placement = placement_of(settings)
    try:
        gpu_bytes = await thread_pools.in_thread(placement.gpu_bytes, spec)
        predicted = await thread_pools.in_thread(predict, spec, dataset, gpu_bytes)
    except DataError as error:
        raise data_problem(error, "dataset") from None
    if not predicted["rows"] and dataset.messages is None:
        raise invalid(FieldProblem("dataset", f"{dataset.uri}: has no rows", "point uri at data with rows"))
    problem = too_large(spec, predicted, placement.memory_bytes())
    problem = problem or await thread_pools.in_thread(placement.gpu_problem, spec)
    if problem is not None:
        raise invalid(FieldProblem("resources", *problem))
    return predicted


class Lineage(NamedTuple):
    """Origin of a run: the version served now, the checkpoints to start from, and their version if it was held.

    ``served_checkpoint``: the checkpoints of the run that published the version served now, if they are kept.
    """

    parent_version: str | None
    init_checkpoint: Path | str | None
    start_version: str | None = None
    served_checkpoint: Path | str | None = None


def lineage(settings: Settings, store: Store, spec: JobSpec) -> Lineage:
    """Determine the origin of a run; blocking.

    Call this when the run starts, not when its job is submitted: ``current`` means current at that time.

    Raises:
        Problem: 422 if the version or the checkpoints to start from are missing.
        StoreUnavailable: the store's server cannot be reached.
    """
    parent = None
    if spec.publish is not None and spec.publish.collection in store.collections():
        parent = store.collection(spec.publish.collection).current()
    served = _served_checkpoints(settings, store, spec, parent)
    if spec.init_from is None:
        return Lineage(parent, None, None, served)
    held = _held_start(settings, store, spec)
    if held is not None:
        return Lineage(parent, *held, served)
    job_id = spec.init_from.job
    if spec.init_from.collection is not None:
        version = spec.init_from.version or "current"
        try:
            job_id = store.collection(spec.init_from.collection).manifest(version).get("job")
        except StoreUnavailable:
            # A temporary outage: the launch is tried again.
            raise
        except StoreError as error:
            remedy = "publish to the collection first, or leave init_from out for the first training"
            raise invalid(FieldProblem("init_from.collection", str(error), remedy)) from None
    checkpoints = _checkpoints(settings, job_id)
    if checkpoints is None:
        remedy = "start from a job whose run is still kept, or leave init_from out"
        raise invalid(FieldProblem("init_from", f"the checkpoints of job {job_id} no longer exist", remedy))
    return Lineage(parent, checkpoints, None, served)


def _served_checkpoints(settings: Settings, store: Store, spec: JobSpec, version: str | None) -> Path | str | None:
    """Return the checkpoints of the job that published ``version``, whose model the new model is compared with.

    None if they are not kept, or if the job published during training and then continued to train.
    """
    if spec.publish is None or version is None or spec.publish.gate.mode == "off":
        return None
    try:
        manifest = store.collection(spec.publish.collection).manifest(version)
    except StoreUnavailable:
        raise
    except StoreError:
        return None
    return None if RefreshRecord.of(manifest).training_step is not None else _checkpoints(settings, manifest.get("job"))


def _held_start(settings: Settings, store: Store, spec: JobSpec) -> tuple[Path | str, str] | None:
    """Return (checkpoints, version) of the held version from which the job is to continue; None if there is none."""
    start = spec.init_from
    assert start is not None
    published = None if spec.publish is None else spec.publish.collection
    if not start.goes_on(published) or start.collection not in store.collections():
        return None
    assert start.collection is not None
    manifest = sound_version(store.collection(start.collection))
    checkpoints = None if manifest is None else _checkpoints(settings, manifest["job"])
    return None if manifest is None or checkpoints is None else (checkpoints, manifest["version"])


def _checkpoints(settings: Settings, job_id: str | None) -> Path | str | None:
    """Return the location of a job's checkpoints; None if they no longer exist here."""
    if not job_id:
        return None
    # Checkpoints that are not on this host are not looked up: the run reports it if they are gone.
    if (storage := storage_of(settings.run_dir(job_id))) is not None:
        return f"{storage}/{rundir.CHECKPOINTS}"
    if settings.shared_runs is not None:
        return settings.shared_runs / job_id / rundir.CHECKPOINTS
    directory = settings.run_dir(job_id) / rundir.CHECKPOINTS
    return directory if directory.is_dir() else named_checkpoints(job_id, settings.runs)


def _origin(settings: Settings, directory: Path, store: Store, spec: JobSpec) -> Lineage:
    """Return the origin of an attempt: in two cases the previous attempt's origin, otherwise the present origin.

    The first case is a previous attempt that died after writing its version: this attempt must complete that version
    and not use it as its parent. The second is an origin, previous or present, that continues from a held version: the
    rows trained so far build on the previous origin.
    """
    before: dict[str, Any] = {}
    written: list[dict[str, Any]] = []
    if spec.publish is not None and (directory / rundir.RUN_FILE).exists():
        # If a crash truncated the file, or a manifest is damaged, this counts as the first attempt.
        with contextlib.suppress(OSError, ValueError):
            written = store.collection(spec.publish.collection).versions()
            before = json.loads((directory / rundir.RUN_FILE).read_text("utf-8"))
    earlier = Lineage(*(before.get(name) for name in Lineage._fields))
    if any(
        (manifest["job"], manifest["parent"]) == (before.get("run_id"), earlier.parent_version)
        for manifest in written
        if before
    ):
        return earlier
    now = lineage(settings, store, spec)
    goes_on = earlier.start_version is not None or now.start_version is not None
    return earlier if before and goes_on and earlier.parent_version == now.parent_version else now


def prepare_run(settings: Settings, store: Store, row: JobRow) -> None:
    """Write the run directory of an attempt; blocking.

    ``run.json`` has absolute, checked paths, and the store of the job's tenant, the only store to which the run writes.

    Raises:
        Problem: 422 if its files, or the version or checkpoints that it starts from, are missing.
    """
    settings, store = settings.for_tenant(row["tenant"]), tenants.store_of(store, row["tenant"])
    spec = JobSpec.model_validate(to_run(row["spec"]))
    _refuse_strange_trackers(settings, spec)
    dataset = registry.check_files(settings, DatasetSpec.model_validate(row["dataset_spec"]))
    directory = settings.run_dir(row["id"])
    origin = _origin(settings, directory, store, spec)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    rundir.write_run(
        directory,
        run_id=row["id"],
        job=spec,
        dataset=dataset,
        store_url=settings.store_url,
        attempt=row["attempt"],
        parent_version=origin.parent_version,
        init_checkpoint=str(origin.init_checkpoint) if origin.init_checkpoint else None,
        start_version=origin.start_version,
        served_checkpoint=str(origin.served_checkpoint) if origin.served_checkpoint else None,
        ray_address=placement_of(settings).ray_address,
        lease={"token": row["lease"]},
        report=_report(settings, row),
        traceparent=row["traceparent"],
        storage=f"{settings.stored_runs}/{row['id']}" if settings.stored_runs else None,
        workers=_workers(row),
    )


def _workers(row: JobRow) -> rundir.Workers | None:
    """Return the number of workers for the attempt and the reason for it; None for all that the job asks for."""
    last = (row["attempts"] or [{"because": None}])[-1]
    return None if last["because"] is None else rundir.Workers(last["workers"], last["because"])


def _report(settings: Settings, row: JobRow) -> rundir.Report | None:
    """Return address and token for a run that reports events over HTTP; None if it shares EVENKEEL_HOME."""
    if settings.internal_url is None:
        return None
    assert row["lease"] is not None
    token = run_tokens.issue(settings.home, row["id"], row["attempt"], row["lease"])
    url = f"{settings.internal_url}/internal/runs/{row['id']}"
    return rundir.Report(url, token, run_events.size(settings.run_dir(row["id"])))
