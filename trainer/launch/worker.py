"""Training in the process of one rank: its threads, device and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from trainer.checkpoint.async_writer import BackgroundSaver
from trainer.distributed.light_imports import quiet
from trainer.launch.attempt import Attempt
from trainer.runs.directory import read_run
from trainer.runs.events import phase
from trainer.runs.failures import Cancelled, ResourceError, record
from trainer.sizing.gpus import device_of_rank, machine_gpus, torch_problem
from trainer.sizing.memory import KEPT_BYTES
from trainer.spec import JobSpec
from trainer.training.progress import Reporter

# Temporaries of a step are smaller than this; larger blocks, such as copies of tables, go back to the system at once.
LARGEST_KEPT_BYTES = 64 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def train_rank(directory: str, gpus: Sequence[str] = ()) -> None:
    """Train this rank's part of the run at ``directory``.

    The caller must have initialized the process group, and set LOCAL_RANK in the environment. ``gpus``: names of the
    GPUs that Ray assigned to this rank.

    The function returns after the last epoch, or, if the rank was asked to stop, after a checkpoint; the run's cancel
    file then has the reason. Any other end is an exception, which is also recorded in the run directory for the driver.
    """
    quiet()
    run = read_run(directory).with_workers(dist.get_world_size())
    use_threads(int(run.job.resources.cpus_per_worker))
    rank = dist.get_rank()
    reporter = Reporter(run, rank)
    # Do not search imported modules for garbage: their half a million objects take as long as a short training.
    gc.freeze()
    try:
        with _saver(run.job) as saver:
            with phase(reporter.emit, "build"):
                attempt = Attempt(run, reporter, saver, use_device(run.job, gpus))
                trainer = attempt.trainer()
            with steady_memory():
                trainer.train()
            attempt.compare(trainer)
    except Cancelled as stop:
        # If a rank of another host was asked to stop, this host's directory has no cancel file yet.
        if not run.cancel_file.exists():
            run.ask_to_stop(stop.reason)
    except BaseException as error:
        record(run.failures, rank, error)
        raise
    finally:
        gc.unfreeze()
        reporter.close()


def _saver(job: JobSpec) -> contextlib.AbstractContextManager[BackgroundSaver | None]:
    return BackgroundSaver() if job.checkpoint.asynchronous else contextlib.nullcontext()


def use_threads(number: int) -> None:
    """Set torch's number of threads to the rank's number of CPUs, not the host's.

    Sums inside torch depend on the number of threads, and a retried run must end with the same bits.
    """
    torch.set_num_threads(max(1, number))


def use_device(job: JobSpec, gpus: Sequence[str] = ()) -> torch.device:
    """Return the device of this rank, and make it torch's current device.

    Raises:
        ResourceError: the rank needs a GPU, and no GPU is usable.
    """
    gpus_per_worker = job.resources.gpus_per_worker
    try:
        name = device_of_rank(
            gpus_per_worker, int(os.environ.get("LOCAL_RANK", "0")), machine_gpus() if gpus_per_worker else (), gpus
        )
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
    """Make sums on GPUs deterministic: a retried run must end with the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Deterministic mode would also fill all new memory, in case it is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # This attention kernel has no deterministic backward.
    torch.backends.cuda.enable_mem_efficient_sdp(False)


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """Tune memory for a loop whose steps all need the same amount. Make large, lasting objects before the block.

    Memory that a step frees is kept for the next step, up to KEPT_BYTES. Otherwise glibc would return large blocks to
    the system, and their pages would be faulted in and cleared again in each step. The garbage collector ignores
    objects made before the block.
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
