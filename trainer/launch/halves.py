"""Limits of a new collection's gate from its first job's own rows (``publish.gate.calibrate``).

Two honest refreshes differ by chance: by the seed, and by who happened to click on which day. The second is the larger
part where most items have few clicks, and null refreshes on the same rows know nothing of it (docs/adr/0062). So each
half of the rows is trained on as if it were all there is, the other half from it as the next day's refresh would be,
and what the gate measures between them makes its limits. It happens after the job has published, in the driver's
process, one rank. What is found is kept as a calibration is. An attempt that is killed leaves trainings in the run's
directory, with which the next one goes on.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

from embeddings.refresh.calibration import SETTINGS, Calibration, calibrated_by_halves, calibration_of, settings_name
from embeddings.refresh.gate_checks.base import Metrics
from embeddings.refresh.publish import publish_candidate
from embeddings.store import open_store
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.select import newest_of
from trainer.checkpoint.warm_start import InheritedData, inherited_data, parent_checkpoint
from trainer.data.prepare.preparation import prepare
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import train_rank
from trainer.publishing.publish import candidate_of
from trainer.publishing.published_ids import tables_served_as_text
from trainer.runs.directory import RUN_FILE, Run, read_run, write_run
from trainer.runs.protocol import LOG_FILE
from trainer.spec import JobSpec
from trainer.spec.models.hard_negatives import HardNegativesSpec

FOLDER = "halves"
FIRST_SEED = 1_000_000
NUM_ROWS = 2
"""Each half is once yesterday and once today."""


class StoppedEarly(Exception):
    """The calibration has come to an end before its limits were found; the message says why."""


def calibrate_by_halves(run: Run, seconds: float) -> Calibration | None:
    """Measure nulls between halves of the run's rows, and keep the limits in its collection's settings.

    Returns:
        What was found; None where the collection has a calibration of the model.

    Raises:
        StoppedEarly: the time is over, or the run was asked to stop.
        LeaseLostError: the attempt has lost its lease.
    """
    publish = run.job.publish
    assert publish is not None
    target, kind = open_store(run.store_url).collection(publish.collection), run.job.model.kind
    folder = run.directory / FOLDER
    if calibration_of(target, kind, run.job.model.embedding_dim) is not None:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    budget = _Budget(run, seconds)
    nulls = [_null(run, folder / f"row-{number}", number, budget) for number in range(NUM_ROWS)]
    found = calibrated_by_halves(nulls, model=kind, source=[f"{run.run_id}/halves-{n}" for n in range(NUM_ROWS)])
    run.fence()
    target.save_settings(SETTINGS, settings_name(kind), found.as_document())
    shutil.rmtree(folder, ignore_errors=True)
    return found


class _Budget:
    """How long the trainings may take: once the first of them is done, whether all of them can is known."""

    def __init__(self, run: Run, seconds: float):
        self._run = run
        self._seconds = seconds
        self._began = time.monotonic()

    def notice(self) -> str | None:
        """Return why a training is to stop here."""
        if self._run.cancel_file.exists():
            return "the run was asked to stop"
        over = time.monotonic() - self._began > self._seconds
        return f"not done after {self._seconds:g} seconds" if over else None

    def require(self, number: int) -> None:
        """Refuse to go on from training ``number`` where the ones before say that time will not suffice.

        Raises:
            StoppedEarly: it will not.
        """
        expected = (time.monotonic() - self._began) / number * NUM_ROWS * 2
        if expected > self._seconds:
            raise StoppedEarly(f"it would take some {expected:.3g} seconds, more than calibrate_seconds")


def unsupported(run: Run, training_seconds: float, seconds: float) -> str | None:
    """Return why the job's rows are not halved, None where they are.

    Args:
        run: it has published its first version.
        training_seconds: that this attempt has trained for: all four halves take twice as long.
        seconds: that they may take.
    """
    resources = run.submitted.resources
    if run.job.model.reads_sequences or run.job.dataset.one_pass:
        return "its rows are no examples that could be halved"
    if resources.num_workers > 1 or resources.gpus_per_worker or run.ray_address is not None:
        return "halves are trained on one rank of this host, without a GPU"
    if run.job.regularizers.meda:
        return "regularizers.meda takes no warm starts, which halves would be"
    if 2 * training_seconds > seconds:
        return f"halves would take some {2 * training_seconds:.3g} seconds, more than calibrate_seconds"
    return None


def _null(run: Run, folder: Path, number: int, budget: _Budget) -> Metrics:
    """Return what the gate measures of a refresh on one half, against a first version of the other."""
    store = open_store(str(folder / "store"))
    yesterday = _trained(run, folder / "yesterday", number, 2 * number, run.init_checkpoint, budget)
    budget.require(2 * number + 1)
    before = store.collection(FOLDER).current()
    if before is None:
        before = _published(run, yesterday, store, "off", None)["version"]
    # As refreshes do, also where the first job says no ``init_from``: there was nothing yet that it could begin from.
    today = _trained(run, folder / "today", 1 - number, 2 * number + 1, str(yesterday.checkpoints), budget)
    manifest = _published(run, today, store, "report", before)
    metrics: Metrics = manifest["metrics"]
    if "cosine_mean" not in metrics:
        (few,) = [check for check in manifest["gate"] if check["metric"] == "shared"]
        raise StoppedEarly(f"the halves share {few['value']:g} items, {few['threshold']:g} are needed to align them")
    return metrics


def _published(run: Run, trained: Run, store: Any, mode: str, parent: str | None) -> dict[str, Any]:
    """Take a half's vectors through the refresh stage of a store in its folder; return the manifest."""
    publish = run.job.publish
    assert publish is not None
    gate = publish.gate.model_copy(update={"mode": mode})
    settings = publish.model_copy(update={"collection": FOLDER, "gate": gate, "views": ()})
    end = publish_candidate(
        store, FOLDER, candidate_of(trained, _checkpoint(trained)), settings, job_id=trained.run_id,
        parent_version=parent, model=run.job.model.kind,
    )  # fmt: skip
    if end.version is None:
        raise StoppedEarly("; ".join(end.reasons))
    document: dict[str, Any] = store.collection(FOLDER).manifest(end.version)
    return document


def _trained(run: Run, directory: Path, half: int, number: int, start: str | None, budget: _Budget) -> Run:
    """Return the run of one half, trained to its end; one that an earlier attempt has begun goes on."""
    if not (directory / RUN_FILE).exists():
        write_run(
            directory, run_id=f"{run.run_id}-halves-{number}", job=_job_of_half(run.job, number), dataset=run.dataset,
            store_url=run.store_url, init_checkpoint=start,
        )  # fmt: skip
    trained = read_run(directory)
    trained.cancel_file.unlink(missing_ok=True)
    parent = parent_checkpoint(trained)
    base = InheritedData() if parent is None else inherited_data(trained.job, trained.dataset, parent)
    prepare(
        trained.dataset, trained.job, trained.data, **base._asdict(), half=half,
        text_tables=tables_served_as_text(run), fence=run.fence,
    )  # fmt: skip
    # The run's log is of its own training.
    with open(directory / LOG_FILE, "a", encoding="utf-8") as log, contextlib.redirect_stdout(log), single_rank_group():
        train_rank(str(directory), notice=budget.notice)
    if trained.cancel_file.exists():
        raise StoppedEarly(trained.cancel_file.read_text("utf-8"))
    return trained


def _job_of_half(job: JobSpec, number: int) -> JobSpec:
    """Return the job with a seed of its own, and without what holds it near a version that there is none of."""
    assert job.publish is not None
    publish = job.publish.model_copy(update={"anchor": None, "frozen_context": None})
    model = job.model
    if isinstance(model, HardNegativesSpec):
        model = model.model_copy(update={"hard_negatives": None})
    return job.model_copy(update={"seed": FIRST_SEED + number, "publish": publish, "model": model})


def _checkpoint(run: Run) -> Checkpoint:
    checkpoint = newest_of(run, run.checkpoints)
    if checkpoint is None:
        raise CheckpointError(f"{run.checkpoints} holds no valid checkpoint: remove {run.directory}, then retry")
    return checkpoint
