"""What one rank of a run does, wherever it was started: open the data, build or restore the model, train."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numba
import torch
import torch.distributed as dist

from trainer.background_save import BackgroundSaver
from trainer.build import build, choose_alpha
from trainer.checkpoint import Checkpoint, CheckpointError, latest_valid
from trainer.data import PreparedData
from trainer.failures import Cancelled, record
from trainer.loop import Position, Trainer, dense_optimizer
from trainer.models import bpr
from trainer.report import Reporter
from trainer.rundir import Run, read_run
from trainer.spec import JobSpec, SpecError, parse_job
from trainer.warm_start import check_fits, id_map_files, inherited_alpha, parent_checkpoint, rows_of_parent

# Temporaries of a step are smaller; copies of tables, larger ones, go back to the system at once.
LARGEST_KEPT_BYTES = 64 << 20
KEPT_BYTES = 512 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def train_rank(directory: str) -> None:
    """Trains this rank's part of the run at ``directory``. The process group is the caller's.

    A rank that was asked to stop has written a checkpoint when this returns. Any other end than the last epoch is an
    exception, recorded in the run directory for the driver.
    """
    quiet()
    run = read_run(directory)
    use_threads(int(run.job.resources.cpus_per_worker))
    rank = dist.get_rank()
    reporter = Reporter(run, rank)
    try:
        with contextlib.suppress(Cancelled), _saver(run.job) as saver:
            trainer = _trainer(run, reporter, saver)
            with steady_memory():
                trainer.train()
    except BaseException as error:
        record(run.failures, rank, error)
        raise
    finally:
        reporter.close()


def _saver(job: JobSpec) -> contextlib.AbstractContextManager[BackgroundSaver | None]:
    return BackgroundSaver() if job.checkpoint.asynchronous else contextlib.nullcontext()


def _trainer(run: Run, reporter: Reporter, saver: BackgroundSaver | None) -> Trainer:
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
        alpha = choose_alpha(run.job, data.steps_per_epoch)
    sharded = build(run.job, data, alpha=alpha)
    optimizer = dense_optimizer(run.job, sharded)
    position, history = Position(), []
    if start is not None:
        parent_rows = None if own is not None else rows_of_parent(data)
        extra = sharded.load_from(start, dense_optimizer=optimizer, verify=own is None, parent_rows=parent_rows)
        position = Position(first_step=sharded.completed_steps)
        if own is not None:
            position, history = Position(**extra["position"]), extra["history"]
    facts = {
        "job": _identity(run.job),
        "run_id": run.run_id,
        "optimizer": run.job.optimizer.kind,
        "alpha": alpha,
        "batch_size": run.job.batch_size,
    }

    def save(trainer: Trainer) -> None:
        extra = {**facts, "position": asdict(trainer.position), "history": trainer.history}
        keep_last = run.job.checkpoint.keep_last
        attached = id_map_files(data)
        # Nothing goes on after the last one, so that a copy would only cost memory.
        last = trainer.stop_asked or trainer.position.step == trainer.num_steps
        if saver is not None and last:
            saver.wait()
        sharded.save(
            run.checkpoints, dense_optimizer=optimizer, extra=extra, attached=attached, keep_last=keep_last,
            saver=None if last else saver,
        )  # fmt: skip

    def should_stop() -> str | None:
        if saver is not None and saver.failed:
            # All ranks agree on stopping, and the checkpoint that they then want to write raises what went wrong.
            return "a checkpoint could not be written"
        with contextlib.suppress(FileNotFoundError):
            return run.cancel_file.read_text("utf-8")
        return None

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
    )


def _agreed(find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """The checkpoint that rank 0 finds: it reads every byte, the others take its word, so that all start from one even
    if a newer one is written meanwhile. Raises CheckpointError on every rank."""
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
    """As many threads as the rank has CPUs, wherever it runs: sums inside torch depend on how they are split, and a
    retried run must end with the same bits."""
    torch.set_num_threads(max(1, number))
    numba.set_num_threads(max(1, min(number, numba.config.NUMBA_NUM_THREADS)))


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """For a loop whose every turn needs the same memory again, once its large and lasting parts are there.

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


def quiet() -> None:
    """TorchRec's planner warns of its own defaults, in every run, to whoever reads the log of a training."""
    logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="HeuristicalStorageReservation", category=FutureWarning)


# What may differ between attempts that go on from each other.
_FREE = {"name", "labels", "retries", "resources", "sharding", "checkpoint", "publish", "epochs"}


def _identity(job: JobSpec) -> dict[str, Any]:
    return job.model_dump(mode="json", exclude=_FREE)


def _check_same_job(checkpoint: Checkpoint, job: JobSpec) -> None:
    mine, theirs = _identity(job), _completed(checkpoint.extra["job"], job)
    differ = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if differ:
        raise ValueError(
            f"{checkpoint.path} is of a job with another {', '.join(differ)}: resume it with the same spec, or use "
            "a new run directory"
        )


def _completed(theirs: dict[str, Any], job: JobSpec) -> dict[str, Any]:
    """The checkpoint's job with the defaults of fields that came after the version that wrote it."""
    try:
        return _identity(parse_job(theirs | {name: getattr(job, name) for name in _FREE}))
    except SpecError:
        return theirs


def _opening(own: Checkpoint | None, start: Checkpoint | None, position: Position, alpha: float | None) -> str:
    what = "training from initial values"
    if own is not None:
        what = f"resuming after step {position.step} from {own.path.name}"
    elif start is not None:
        what = f"warm start from {start.path}"
    return what + (f"; alpha {alpha:.3g}" if alpha is not None else "")


def _unread(job: JobSpec, data: PreparedData) -> str:
    """Features that the model has no use for: it is trained all the same, and its owner should know."""
    unread = data.unread
    if job.model.kind == "bpr":
        unread = [key.name for key in data.keys if key.name not in (bpr.USER, bpr.ITEM, bpr.NEGATIVE)]
    return f"; {job.model.kind} does not read {', '.join(unread)}" if unread else ""
