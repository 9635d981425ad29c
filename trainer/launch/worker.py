"""One rank of a run, wherever it was started: open the data, build or restore the model, train."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint.async_writer import BackgroundSaver
from trainer.checkpoint.format import Checkpoint, CheckpointError, latest_valid
from trainer.checkpoint.warm_start import check_fits, id_map_files, inherited_alpha, parent_checkpoint, rows_of_parent
from trainer.data.batches.prepared import PreparedData
from trainer.distributed.build import build
from trainer.distributed.dynamic_tables import DynamicRows
from trainer.launch.alpha_search import taken_alpha
from trainer.models import bpr
from trainer.publishing import frozen_context
from trainer.runs.directory import Run, read_run
from trainer.runs.events import phase
from trainer.runs.failures import Cancelled, ResourceError, record
from trainer.runs.log_filters import quiet
from trainer.sizing.gpus import device_of_rank, machine_gpus, torch_problem
from trainer.sizing.memory import KEPT_BYTES
from trainer.spec import JobSpec, SpecError, parse_job
from trainer.training.loop import Position, Trainer, dense_optimizer
from trainer.training.progress import Reporter

# Temporaries of a step are smaller; copies of tables, larger ones, go back to the system at once.
LARGEST_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def train_rank(directory: str, gpus: Sequence[str] = ()) -> None:
    """Train this rank's part of the run at ``directory``.

    The process group is the caller's, and so is LOCAL_RANK in the environment. ``gpus``: the names of those that Ray
    gave to this rank.

    A rank that was asked to stop has written a checkpoint when this returns. Any other end than the last epoch is an
    exception, recorded in the run directory for the driver.
    """
    quiet()
    run = read_run(directory)
    use_threads(int(run.job.resources.cpus_per_worker))
    rank = dist.get_rank()
    reporter = Reporter(run, rank)
    # Modules are no garbage: steady_memory would search half a million objects, as long as a short training takes.
    gc.freeze()
    try:
        with contextlib.suppress(Cancelled), _saver(run.job) as saver:
            with phase(reporter.emit, "build"):
                trainer = _trainer(run, reporter, saver, use_device(run.job, gpus))
            with steady_memory():
                trainer.train()
    except BaseException as error:
        record(run.failures, rank, error)
        raise
    finally:
        gc.unfreeze()
        reporter.close()


def _saver(job: JobSpec) -> contextlib.AbstractContextManager[BackgroundSaver | None]:
    return BackgroundSaver() if job.checkpoint.asynchronous else contextlib.nullcontext()


def _trainer(run: Run, reporter: Reporter, saver: BackgroundSaver | None, device: torch.device) -> Trainer:
    def should_stop() -> str | None:
        if saver is not None and saver.failed:
            # All ranks agree on stopping, and the checkpoint that they then want to write raises what went wrong.
            return "a checkpoint could not be written"
        with contextlib.suppress(FileNotFoundError):
            return run.cancel_file.read_text("utf-8")
        return None

    data = PreparedData.open(run.data)
    own = _agreed(lambda: latest_valid(run.checkpoints))
    start = own or _agreed(lambda: parent_checkpoint(run))
    if own is not None:
        _check_same_job(own, run.job)
        alpha = own.extra["alpha"]
    elif start is not None:
        check_fits(run.job, data, start)
        alpha = inherited_alpha(run.job, start.extra)
    else:
        alpha = taken_alpha(run, data, device, reporter.emit, should_stop)
    sharded = build(run.job, data, alpha=alpha, device=device)
    optimizer = dense_optimizer(run.job, sharded)
    growing = DynamicRows(run.job, data, sharded)
    position, history = Position(), []
    has_compass = frozen_context.is_frozen(run.job, data)
    if start is not None and not (own is None and has_compass and frozen_context.begins_fresh(run.job)):
        parent_rows = None if own is not None else rows_of_parent(run.job, data)
        extra = sharded.load_from(start, dense_optimizer=optimizer, verify=own is None, parent_rows=parent_rows)
        growing.load(start)
        position = Position(first_step=sharded.completed_steps)
        if own is not None:
            position, history = Position(**extra["position"]), extra["history"]
    if has_compass:
        if own is None:
            assert start is not None
            frozen_context.begin(sharded, start, run.job, data)
        frozen_context.freeze_dense(sharded)
    facts = {
        "job": _identity(run.job),
        "run_id": run.run_id,
        "optimizer": run.job.optimizer.kind,
        "alpha": alpha,
        "batch_size": run.job.batch_size,
    }

    def write(trainer: Trainer, folder: Path, background: bool, keep_last: int) -> None:
        extra = {**facts, "position": asdict(trainer.position), "history": trainer.history}
        if saver is not None:
            # Until what it copies from is not needed any more, where this writes it anew.
            saver.wait()
        attached = id_map_files(data) | (growing.write(run.growing) if trainer.rank == 0 else {})
        sharded.save(
            folder, dense_optimizer=optimizer, extra=extra, attached=attached, keep_last=keep_last,
            saver=saver if background else None, fence=run.fence,
        )  # fmt: skip

    def save(trainer: Trainer) -> None:
        # Nothing goes on after the last one, so that a copy would only cost memory.
        last = trainer.stop_asked or trainer.position.stopped or trainer.position.step == trainer.num_steps
        write(trainer, run.checkpoints, not last, run.job.checkpoint.keep_last)

    def load_best(trainer: Trainer) -> Position:
        best = _agreed(lambda: latest_valid(run.best))
        if best is None:
            raise CheckpointError(f"{run.best} holds no valid checkpoint of the best epoch: retry the job")
        extra = sharded.load_from(best, dense_optimizer=optimizer, verify=False)
        growing.load(best)
        return Position(**extra["position"])

    shares = sharded.shares()
    reporter.emit("state", state="running")
    reporter.emit(
        "info",
        message=_opening(own, start, position, alpha) + _unread(run.job, data),
        alpha=alpha,
        resumed_from_step=position.step if own is not None else None,
        sharding=sharded.plan(),
        rows_per_rank={
            name: [sum(held.row_count for held in of_rank) for of_rank in share] for name, share in shares.items()
        },
        steps_per_epoch=data.steps_per_epoch,
        unknown_share=data.unknown_share,
    )
    return Trainer(
        run.job,
        data,
        sharded,
        optimizer,
        position=position,
        history=history,
        emit=reporter.emit,
        should_stop=should_stop,
        save=save,
        save_best=lambda trainer: write(trainer, run.best, False, 1),
        load_best=load_best,
        device=device,
        growing=growing,
    )


def _agreed(find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """Return the checkpoint that rank 0 finds, on every rank.

    Rank 0 reads every byte and the others take its result, so that all start from one even if a newer one is written
    meanwhile.

    Raises:
        CheckpointError: on every rank.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            checkpoint = find()
            found = [None if checkpoint is None else str(checkpoint.path), None]
        except CheckpointError as error:
            found = [None, error]
    dist.broadcast_object_list(found, 0)
    path, problem = found
    if problem is not None:
        raise problem
    return None if path is None else Checkpoint(path)


def use_threads(number: int) -> None:
    """Use as many threads as the rank has CPUs, wherever it runs.

    Sums inside torch depend on how they are split, and a retried run must end with the same bits.
    """
    torch.set_num_threads(max(1, number))


def use_device(job: JobSpec, gpus: Sequence[str] = ()) -> torch.device:
    """Return the device of this rank, which is the current one from now on.

    Raises:
        ResourceError: there is none.
    """
    wanted = job.resources.gpus_per_worker
    try:
        name = device_of_rank(wanted, int(os.environ.get("LOCAL_RANK", "0")), machine_gpus() if wanted else (), gpus)
    except ValueError as error:
        raise ResourceError(str(error)) from None
    device = torch.device(name)
    if device.type == "cuda":
        problem = torch_problem(torch.__version__)
        if problem is not None:
            raise ResourceError(". Remedy: ".join(problem))
        torch.cuda.set_device(device)
        _repeatable()
    return device


def _repeatable() -> None:
    """Let a GPU sum in one order each time, for a retried run must end with the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Which would also write all memory that is taken, in case that somebody reads it before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Its backward has no deterministic form.
    torch.backends.cuda.enable_mem_efficient_sdp(False)


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """Tune memory for a loop whose every turn needs the same amount, once its large and lasting parts are there.

    What a step frees is kept for the next one, up to KEPT_BYTES: given back to the system, as glibc does with large
    blocks, each of its pages would be faulted in and cleared again. And what was there before the loop is not searched
    for garbage again and again.
    """
    libc = ctypes.CDLL(None)
    # Other C libraries have no such settings, and no such costs.
    if tuned := hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if tuned:
            libc.malloc_trim(0)


# What may differ between attempts that go on from each other.
_PUBLISH, _TRAINED_WITH = "publish.", {"anchor", "compass"}
_FREE = {"name", "labels", "retries", "resources", "sharding", "checkpoint", "publish", "epochs"}


def _identity(job: JobSpec) -> dict[str, Any]:
    # What of publish training depends on.
    parts = {} if job.publish is None else job.publish.model_dump(mode="json", include=_TRAINED_WITH)
    return job.model_dump(mode="json", exclude=_FREE) | {f"{_PUBLISH}{name}": part for name, part in parts.items()}


def _check_same_job(checkpoint: Checkpoint, job: JobSpec) -> None:
    mine, theirs = _identity(job), _completed(checkpoint.extra["job"], job)
    differ = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if differ:
        raise ValueError(
            f"{checkpoint.path} is of a job with another {', '.join(differ)}: resume it with the same spec, or use "
            "a new run directory"
        )


def _completed(theirs: dict[str, Any], job: JobSpec) -> dict[str, Any]:
    """Return the checkpoint's job with the defaults of fields that came after the version that wrote it."""
    of_publish = {name: part for name, part in theirs.items() if name.startswith(_PUBLISH)}
    document = {name: part for name, part in theirs.items() if name not in of_publish}
    try:
        found = _identity(parse_job(document | {name: getattr(job, name) for name in _FREE}))
    except SpecError:
        return theirs
    return {name: part for name, part in found.items() if not name.startswith(_PUBLISH)} | of_publish


def _opening(own: Checkpoint | None, start: Checkpoint | None, position: Position, alpha: float | None) -> str:
    what = "training from initial values"
    if own is not None:
        what = f"resuming after step {position.step} from {own.path.name}"
    elif start is not None:
        what = f"warm start from {start.path}"
    return what + (f"; alpha {alpha:.3g}" if alpha is not None else "")


def _unread(job: JobSpec, data: PreparedData) -> str:
    """Name the features that the model has no use for: it is trained all the same, and its owner should know."""
    unread = data.unread
    if job.model.reads_pairs:
        unread = [key.name for key in data.keys if key.name not in (bpr.USER, bpr.ITEM, bpr.NEGATIVE)]
    return f"; {job.model.kind} does not read {', '.join(unread)}" if unread else ""
