"""GPUs of ranks, of this machine and of a Ray cluster, and checks that a job has enough GPUs. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainer.runs.failures import ResourceError

if TYPE_CHECKING:
    from trainer.spec import JobSpec

CLUSTER_SECONDS = 60
_NODES = """
import json, ray
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
print(json.dumps([node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]))
"""


def device_of_rank(
    gpus_per_worker: float, local_rank: int, visible: Sequence[str], assigned: Sequence[str] = ()
) -> str:
    """Return ``cpu``, or ``cuda:i`` with i the place of the rank's GPU among those that its process sees.

    Args:
        gpus_per_worker: 0, or 1: a rank works on one GPU.
        local_rank: number of the rank on its host. Ranks of a host take its GPUs in order.
        visible: the GPUs that the process sees, in CUDA's order (:func:`visible_gpus`).
        assigned: the GPUs that Ray gave to this rank, by the same names. Since Ray's ranks on a host see each other's
            GPUs, as NCCL needs it, ``local_rank`` alone does not determine the rank's own.

    Raises:
        ValueError: there is no GPU for this rank.
    """
    if not gpus_per_worker:
        return "cpu"
    if assigned:
        places = [number for number, name in enumerate(visible) if name in assigned]
        if not places:
            raise ValueError(
                f"rank {local_rank} of this host was given GPU {', '.join(assigned)}, but its process sees "
                f"{', '.join(visible) or 'none'}: leave CUDA_VISIBLE_DEVICES to Ray"
            )
        return f"cuda:{places[0]}"
    if not 0 <= local_rank < len(visible):
        raise ValueError(
            f"rank {local_rank} of this host has no GPU of its own (there are {len(visible)}): lower "
            "resources.num_workers, or set resources.gpus_per_worker to 0"
        )
    return f"cuda:{local_rank}"


def visible_gpus(installed: int, variable: str | None) -> list[str]:
    """Return the names of the GPUs that a process sees, in CUDA's order: numbers, or names of GPUs.

    ``installed``: number of GPUs of the machine. ``variable``: value of CUDA_VISIBLE_DEVICES, a list of numbers or
    names, of which CUDA reads those before the first invalid entry; None: the process sees all GPUs.
    """
    if variable is None:
        return [str(number) for number in range(installed)]
    seen: list[str] = []
    for name in (part.strip() for part in variable.split(",")):
        if not (int(name) < installed if name.isdigit() else name.startswith(("GPU-", "MIG-"))):
            break
        seen.append(name)
    return seen if installed else []


def installed_gpus() -> int:
    """Return the number of GPUs of this machine's NVIDIA driver; 0 without a driver."""
    count = ctypes.c_uint(0)
    with _nvml() as library:
        if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return 0
    return count.value


def machine_gpus() -> list[str]:
    """Return the GPUs that a process started by this one would see."""
    return visible_gpus(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def machine_gpu_bytes() -> int | None:
    """Return the bytes of memory of the smallest GPU that a process started by this one would see; None without GPU."""
    sizes = []
    names = machine_gpus()
    with _nvml() as library:
        for name in names if library is not None else ():
            device, memory = ctypes.c_void_p(), _Memory()
            by_number = name.isdigit()
            handle = library.nvmlDeviceGetHandleByIndex_v2 if by_number else library.nvmlDeviceGetHandleByUUID
            known = handle(ctypes.c_uint(int(name)) if by_number else name.encode(), ctypes.byref(device)) == 0
            if known and library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
                sizes.append(int(memory.total))
    return min(sizes, default=None)


class _Memory(ctypes.Structure):
    """The struct nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Open and initialize NVIDIA's management library NVML; yield None if there is no driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def known_gpu_bytes(job: JobSpec, ray_address: str | None) -> int | None:
    """Return the bytes of each rank's GPU; None for a run without GPUs, or on a Ray cluster (not known)."""
    return None if ray_address or not job.resources.gpus_per_worker else machine_gpu_bytes()


def cluster_gpus(address: str) -> list[int]:
    """Return the number of GPUs on each node of the Ray cluster at ``address``.

    The function starts a process that asks the cluster, which takes seconds.

    Raises:
        OSError: no cluster answers at the address.
    """
    code = _NODES.format(address=address)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        # Ray itself takes a minute to find out that no server answers at the address.
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except ValueError:
        raise OSError(f"'{address}' is not HOST:PORT") from None
    except OSError as error:
        raise OSError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=CLUSTER_SECONDS,
            env=os.environ | {"RAY_AUTH_MODE": "token"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OSError(f"the Ray cluster at {address} did not answer within {CLUSTER_SECONDS} seconds") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OSError(f"the Ray cluster at {address} cannot be asked for its GPUs: {last}")
    return [int(count) for count in json.loads(done.stdout.strip().splitlines()[-1])]


def gpu_problem(job: JobSpec, ray_address: str | None = None) -> tuple[str, str] | None:
    """Return (problem, remedy) if the Ray cluster, or else this machine, has too few GPUs for the job; else None.

    The result is None for a job without GPUs.
    """
    num_workers = job.resources.least_workers
    if not job.resources.gpus_per_worker:
        return None
    if ray_address:
        try:
            nodes = cluster_gpus(ray_address)
        except OSError as error:
            return str(error), "check EVENKEEL_RAY_ADDRESS and the cluster's token"
        return missing_gpus(num_workers, sum(nodes), f"the Ray cluster at {ray_address} ({len(nodes)} nodes)")
    return missing_gpus(num_workers, len(machine_gpus()), "this machine") or torch_problem(
        importlib.metadata.version("torch")
    )


def check_gpus(job: JobSpec, ray_address: str | None = None) -> None:
    """Check that the Ray cluster at this address, else this machine, has enough GPUs for the job.

    Raises:
        ResourceError: it has too few.
    """
    problem = gpu_problem(job, ray_address)
    if problem is not None:
        raise ResourceError(". Remedy: ".join(problem))


def missing_gpus(num_workers: int, num_gpus: int, where: str) -> tuple[str, str] | None:
    """Return (problem, remedy) if ``num_workers`` ranks, each with a GPU, are more than ``num_gpus``; else None."""
    if num_gpus >= num_workers:
        return None
    remedy = "set resources.gpus_per_worker to 0 to train on CPU, or run where there is a GPU for each worker"
    if num_gpus:
        remedy = f"lower resources.num_workers to {num_gpus}, or run where there is a GPU for each worker"
    return f"resources.gpus_per_worker: {num_workers} workers need {num_workers} GPUs, {where} has {num_gpus}", remedy


def torch_problem(version: str) -> tuple[str, str] | None:
    """Return (problem, remedy) if the installed torch of this version is built without CUDA; else None."""
    if version.endswith("+cpu"):
        return (
            f"resources.gpus_per_worker: torch {version} of this installation is built for the CPU only",
            "`make setup EXTRA=cuda`, or set resources.gpus_per_worker to 0",
        )
    return None
