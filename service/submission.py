"""From a JobSpec to a queued job, and from a queued job to what its run needs: files, parent version, warm start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.store import Store, StoreError
from service import datasets, heavy, idempotency, jobs
from service.database import Database
from service.errors import Problem, invalid
from service.keys import Principal
from service.settings import Settings
from trainer import rundir
from trainer.data.errors import DataError
from trainer.estimate import estimate as predict
from trainer.estimate import ids_per_example, too_large
from trainer.memory import machine_memory_bytes, memory_problem, rank_memory
from trainer.spec import DatasetSpec, JobSpec

CHECKPOINTS = "checkpoints"


async def submit(
    database: Database, settings: Settings, spec: JobSpec, principal: Principal, idempotency_key: str | None = None
) -> dict[str, Any]:
    """The job as shown; with a key that was seen before, the job that it made. Raises 422, or 409 while in flight."""
    if idempotency_key is None:
        return await _create(database, settings, spec, None)
    reservation = await idempotency.reserve(database, principal.key_id, idempotency_key, spec.model_dump_json())
    if reservation.job_id is not None:
        async with database.read() as connection:
            return await jobs.view(connection, await jobs.get(connection, reservation.job_id))
    try:
        return await _create(database, settings, spec, reservation)
    except BaseException:
        await asyncio.shield(idempotency.release(database, reservation))
        raise


async def _create(
    database: Database, settings: Settings, spec: JobSpec, reservation: idempotency.Reservation | None
) -> dict[str, Any]:
    _refuse_hopeless(spec, await validate(database, settings, spec))
    async with database.write() as connection:
        row = await jobs.create(connection, spec, await jobs.check(connection, spec))
        if reservation is not None:
            await idempotency.complete(connection, reservation, row["id"])
        return await jobs.view(connection, row)


async def validate(database: Database, settings: Settings, spec: JobSpec) -> DatasetSpec:
    """The job's dataset with absolute paths, once the job fits it and its files are there. Raises 422."""
    jobs.refuse_firing_date(spec)
    async with database.read() as connection:
        dataset = await jobs.check(connection, spec)
    return await asyncio.to_thread(datasets.check_files, settings, dataset)


def _refuse_hopeless(spec: JobSpec, dataset: DatasetSpec) -> None:
    """Raises 422 for ranks that could not hold even empty tables. What tables take is known once their ids are counted:
    by a dry run, or by the run itself before it builds them."""
    problem = memory_problem(spec, rank_memory(spec, {}, ids_per_example(spec, dataset)), None)
    if problem is not None:
        raise invalid([("resources", problem[0])], problem[1])


async def estimate(database: Database, settings: Settings, spec: JobSpec) -> dict[str, Any]:
    """Validates like a submission and predicts memory and time, without running anything. Raises 422, also for what
    does not fit the memory that the job states or that this machine has."""
    dataset = await validate(database, settings, spec)
    try:
        predicted = await heavy.in_thread(predict, spec, dataset)
    except DataError as error:
        raise datasets.data_problem(error, "dataset") from None
    if not predicted["rows"]:
        raise invalid([("dataset", f"{dataset.uri}: has no rows")], "point uri at data with rows")
    problem = too_large(spec, predicted, None if settings.ray_address else machine_memory_bytes())
    if problem is not None:
        raise invalid([("resources", problem[0])], problem[1])
    return predicted


class Lineage(NamedTuple):
    """What a run starts from: the version served now, and the checkpoints of an earlier run."""

    parent_version: str | None
    init_checkpoint: Path | None


def lineage(settings: Settings, store: Store, spec: JobSpec) -> Lineage:
    """Resolved when the run starts, not when it was submitted: ``current`` means current then. Raises 422; blocking."""
    parent = None
    if spec.publish is not None and spec.publish.collection in store.collections():
        parent = store.collection(spec.publish.collection).current()
    if spec.init_from is None:
        return Lineage(parent, None)
    job_id = spec.init_from.job
    if spec.init_from.collection is not None:
        version = spec.init_from.version or "current"
        try:
            job_id = store.collection(spec.init_from.collection).manifest(version).get("job")
        except StoreError as error:
            remedy = "publish to the collection first, or leave init_from out for the first training"
            raise invalid([("init_from.collection", str(error))], remedy) from None
    directory = settings.run_dir(job_id) / CHECKPOINTS if job_id else None
    if directory is None or not directory.is_dir():
        remedy = "start from a job whose run is still kept, or leave init_from out"
        raise invalid([("init_from", f"the checkpoints of job {job_id} are not here any more")], remedy)
    return Lineage(parent, directory)


def _begun(directory: Path, store: Store, spec: JobSpec) -> Lineage | None:
    """What an earlier attempt started from, if it died after it had written its version: the next one has to bring that
    version to its end, not to refresh it once more by being published onto itself."""
    if spec.publish is None or not (directory / rundir.RUN_FILE).exists():
        return None
    try:
        before = json.loads((directory / rundir.RUN_FILE).read_text("utf-8"))
        written = store.collection(spec.publish.collection).versions()
    except (OSError, ValueError):  # a file cut by a crash of the machine, a damaged manifest: as if it were the first
        return None
    run_id, parent, checkpoint = (before.get(name) for name in ("run_id", "parent_version", "init_checkpoint"))
    if not any((manifest["job"], manifest["parent"]) == (run_id, parent) for manifest in written):
        return None
    return Lineage(parent, Path(checkpoint) if checkpoint else None)


def prepare_run(settings: Settings, store: Store, row: dict[str, Any]) -> None:
    """Writes the run directory of an attempt: ``run.json`` with absolute, checked paths. Raises 422; blocking."""
    spec = JobSpec.model_validate(row["spec"])
    dataset = datasets.check_files(settings, DatasetSpec.model_validate(row["dataset_spec"]))
    directory = settings.run_dir(row["id"])
    found = _begun(directory, store, spec) or lineage(settings, store, spec)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    rundir.write_run(
        directory,
        run_id=row["id"],
        job=spec,
        dataset=dataset,
        store_url=settings.store_url,
        attempt=row["attempt"],
        parent_version=found.parent_version,
        init_checkpoint=str(found.init_checkpoint) if found.init_checkpoint else None,
        ray_address=settings.ray_address,
        lease={"token": row["lease"]},
    )


def problem_error(problem: Problem) -> dict[str, str]:
    """A refusal at start as the ``error`` of a job."""
    remedies = dict.fromkeys(error["remedy"] for error in problem.errors if error["remedy"])
    return {"code": problem.code, "message": problem.detail, "remedy": "; ".join(remedies)}
