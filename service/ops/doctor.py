"""``evenkeel doctor``: checks whether this machine can train and serve; one line per check, each with a remedy.

This module does not import torch: a subprocess tests whether torch and fbgemm load together, and which GPUs they see.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
from packaging.specifiers import SpecifierSet

from service.client import Client, ProblemError, ServiceError, Unreachable, home
from service.core.settings import Settings
from service.jobs.executors.base import THIS_HOST, Check, Level, Placement
from service.jobs.executors.registry import executor_class, placement_of
from service.ops.backup_check import out_of_step
from service.ops.locations import check_locations

if TYPE_CHECKING:
    from trainer.spec import DatasetSpec, JobSpec


GB = 10**9
MEMORY_FAIL_BYTES, MEMORY_WARN_BYTES = 2 * GB, 4 * GB  # a run with two workers takes about 2 GB before its tables
DISK_FAIL_BYTES, DISK_WARN_BYTES = 1 * GB, 5 * GB
SHARED_MEMORY_WARN_BYTES = 1 * GB
PACKAGES = ("torch", "torchrec", "ray", "numpy", "pyarrow", "fastapi")
LOAD_SECONDS = 120

_LOAD = """
import json, torch, fbgemm_gpu
from embeddings.kernels.cpu.library import library
library()
torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2]))
count = torch.cuda.device_count()
print(json.dumps([torch.cuda.get_device_name(index) for index in range(count)]))
"""


def examine(spec: Path | None = None) -> list[Check]:
    """Run all checks, in the order shown; takes a few seconds, because torch is loaded once, in another process."""
    checks = [check_python(), *check_packages()]
    if not any(check.level == "fail" for check in checks):
        checks += check_load()
    for check in (check_memory, check_shared_memory, check_disk, check_locations, check_executor, check_service):
        checks += check()
    if spec is not None:
        checks += check_spec(spec)
    return checks


def check_python(metadata_of: Callable[[str], Any] = importlib.metadata.metadata) -> Check:
    """Check that the installed package supports this Python (``requires-python`` of pyproject.toml)."""
    version = f"{platform.python_version()} at {sys.executable}"
    try:
        admitted = metadata_of("evenkeel")["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        return Check("python", "fail", f"{version} does not have evenkeel installed", "run `make setup`")
    if SpecifierSet(admitted).contains(platform.python_version(), prereleases=True):
        return Check("python", "ok", version)
    return Check("python", "fail", version, f"Evenkeel runs on Python {admitted}: `make setup` with PYTHON=/path/to/it")


def abi_partner(fbgemm: str) -> str:
    """Return the torch release that an fbgemm release is built for: 1.X goes with 2.(X+5).

    Raises:
        ValueError: The release does not follow this scheme.
    """
    major, minor = (int(part) for part in fbgemm.split("+")[0].split(".")[:2])
    if major != 1:
        raise ValueError(f"fbgemm {fbgemm} is not a 1.X release")
    return f"2.{minor + 5}"


def check_packages(version_of: Callable[[str], str] = importlib.metadata.version) -> Iterator[Check]:
    """Check installed versions, and that torch and fbgemm fit; ``version_of`` may raise PackageNotFoundError."""
    versions: dict[str, str] = {}
    for package in (*PACKAGES, "fbgemm-gpu-cpu", "fbgemm-gpu"):
        try:
            versions[package] = version_of(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    missing = [package for package in PACKAGES if package not in versions]
    if missing:
        yield Check("packages", "fail", f"not installed: {', '.join(missing)}", "run `make setup`")
    else:
        yield Check("packages", "ok", ", ".join(f"{package} {versions[package]}" for package in PACKAGES))
    builds = [package for package in ("fbgemm-gpu-cpu", "fbgemm-gpu") if package in versions]
    if not builds:
        yield Check("abi", "fail", "fbgemm is not installed", "run `make setup` (EXTRA=cuda on a machine with a GPU)")
        return
    if len(builds) == 2:
        yield Check(
            "abi", "fail", "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other",
            "remove .venv and run `make setup` (EXTRA=cuda for the CUDA build)",
        )  # fmt: skip
        return
    if "torch" not in versions:
        return
    torch, fbgemm = versions["torch"], versions[builds[0]]
    pair = f"{builds[0]} {fbgemm} with torch {torch}"
    try:
        partner = abi_partner(fbgemm)
    except ValueError as error:
        yield Check("abi", "warn", f"{pair}: {error}", "run `make setup`, which installs a pair that was tested")
        return
    if not torch.startswith(partner + "."):
        message = f"{pair}: fbgemm {fbgemm} is built for torch {partner}"
        yield Check("abi", "fail", message, "run `make setup`, which installs a matching pair")
    else:
        yield Check("abi", "ok", pair)


def check_load() -> Iterator[Check]:
    """Check whether torch and fbgemm load into one process, and which GPUs they see."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD],
            check=False,
            capture_output=True,
            text=True,
            timeout=LOAD_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        message = f"loading torch and fbgemm took over {LOAD_SECONDS} seconds"
        yield Check("load", "warn", message, "check whether the disk or the machine is busy")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Check("load", "fail", f"torch and fbgemm do not load: {last}", "remove .venv and run `make setup`")
        return
    yield Check("load", "ok", "torch and fbgemm load together")
    devices = json.loads(done.stdout.strip().splitlines()[-1])
    if devices:
        yield Check("gpu", "ok", ", ".join(devices))
    elif shutil.which("nvidia-smi"):
        message = "nvidia-smi exists, but torch sees no GPU: jobs train on the CPU"
        yield Check("gpu", "warn", message, "`make setup EXTRA=cuda`, and check the driver")
    else:
        yield Check("gpu", "ok", "none: jobs train on the CPU")


def available_memory_bytes() -> int:
    """Return the memory that is still available, within the container's limit, if any."""
    available = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - used)


def check_memory() -> Iterator[Check]:
    available = available_memory_bytes()
    yield _threshold(
        "memory", available, MEMORY_FAIL_BYTES, MEMORY_WARN_BYTES,
        f"{_gb(available)} available, {os.cpu_count()} CPUs", "stop other programs, or train on a larger machine",
    )  # fmt: skip


def check_shared_memory() -> Iterator[Check]:
    try:
        free = psutil.disk_usage("/dev/shm").free
    except OSError:
        return
    if free < SHARED_MEMORY_WARN_BYTES:
        message = f"{_gb(free)} free in /dev/shm: ranks exchange through it, and Ray falls back to the disk"
        yield Check("shm", "warn", message, "in a container, set shm_size to 1gb or more")
    else:
        yield Check("shm", "ok", f"{_gb(free)} free in /dev/shm")


def check_disk() -> Iterator[Check]:
    directory = home().absolute()
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Check("disk", "fail", f"{existing} cannot be written to", "set EVENKEEL_HOME to a directory of your own")
        return
    free = psutil.disk_usage(str(existing)).free
    yield _threshold(
        "disk", free, DISK_FAIL_BYTES, DISK_WARN_BYTES, f"{_gb(free)} free for EVENKEEL_HOME {directory}",
        "free some space, or set EVENKEEL_HOME to another disk",
    )  # fmt: skip


def check_executor() -> Iterator[Check]:
    """Check the settings of the executor that EVENKEEL_EXECUTOR names, and its cluster or host; starts nothing."""
    try:
        settings = Settings.from_environment()
        executor = executor_class(settings)
    except ValueError as error:
        yield Check("executor", "fail", str(error), "correct the variable that the message names")
        return
    yield from executor.diagnose(settings)


def _placement() -> Placement:
    """Return the placement of runs; if the settings are wrong, which another check reports, return this host."""
    try:
        return placement_of(Settings.from_environment())
    except ValueError:
        return THIS_HOST


def check_service() -> Iterator[Check]:
    """Check that the service is running, or that its port is free."""
    try:
        client = Client(timeout_seconds=5)
    except ServiceError as error:
        yield Check("service", "fail", error.message, error.remedy)
        return
    with client:
        try:
            ready = client.ready()
        except Unreachable as error:
            yield from _port(client.url, error)
            return
        except ProblemError as error:
            message = f"{client.url} answers, but is not ready: {error.message}"
            yield Check("service", "fail", message, error.remedy or "see the service's log")
            return
        except ServiceError as error:
            remedy = "another program uses the port: start `evenkeel serve --port N` and set EVENKEEL_URL to match"
            yield Check("port", "fail", error.message, remedy)
            return
        unwell = [f"{name} {status}" for name, status in (ready.get("checks") or {}).items() if status != "ok"]
        if ready.get("status") == "degraded":
            message = f"{client.url} answers, but {'; '.join(unwell)}"
            yield Check("service", "fail", message, "see the service's log")
        else:
            yield Check(
                "service", "ok", f"ready at {client.url}{''.join(f'; {status_text}' for status_text in unwell)}"
            )
        try:
            client.jobs(limit=1)
        except ServiceError as error:
            yield Check("key", "fail", error.message, error.remedy or "set EVENKEEL_API_KEY")
            return
        yield Check("key", "ok", "the API key is accepted")
        try:
            for name, message, remedy in out_of_step(client, home() / "runs"):
                yield Check(name, "warn", message, remedy)
        except ServiceError as error:
            message = f"could not check whether database and store are from the same moment: {error.message}"
            yield Check("database", "warn", message, error.remedy or "see the service's log")


def _port(url: str, error: Unreachable) -> Iterator[Check]:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
    if host not in ("127.0.0.1", "localhost", "::1"):
        yield Check("service", "fail", error.message, "start the service there, or correct EVENKEEL_URL")
        return
    try:
        with socket.create_connection((host, port), timeout=2):
            in_use = True
    except OSError:
        in_use = False
    if in_use:
        message = f"port {port} is taken by something that does not speak HTTP"
        yield Check("port", "fail", message, "start `evenkeel serve --port N` and set EVENKEEL_URL to match")
        return
    yield Check("port", "ok", f"port {port} is free")
    yield Check(
        "service", "warn", f"not running at {url}", "`evenkeel serve` starts it; `evenkeel train` needs no service"
    )


def check_spec(path: Path) -> Iterator[Check]:
    """Check whether this job would be accepted and would fit this machine."""
    from trainer.spec import SpecError, load_documents

    try:
        dataset, job = load_documents(path)
        if job is not None and dataset is not None:
            job = job.against(dataset)
    except SpecError as error:
        yield Check("spec", "fail", str(error), "correct the file; `evenkeel validate` checks it again")
        return
    except ValueError as error:
        yield Check("spec", "fail", f"{path}: {error}", "correct the file; `evenkeel validate` checks it again")
        return
    if job is None:
        yield Check("spec", "ok", f"{path}: a dataset, no job")
        return
    cpus = job.resources.least_workers * job.resources.cpus_per_worker
    have = os.cpu_count() or 1
    placement = _placement()
    if cpus > have and placement.uses_this_host:
        message = f"{path}: asks for {cpus:g} CPUs, but this machine has {have}"
        yield Check("spec", "fail", message, "lower resources.num_workers or cpus_per_worker")
        return
    yield Check("spec", "ok", f"{path}: job '{job.name}', {cpus:g} of {have} CPUs")
    yield from _has_gpus(job, placement)
    if dataset is not None:
        yield from _fits_memory(job, dataset, placement)


def _has_gpus(job: JobSpec, placement: Placement) -> Iterator[Check]:
    """Check whether the GPUs that the job asks for exist on this machine, or in the cluster that runs join."""
    problem = placement.gpu_problem(job)
    if problem is not None:
        yield Check("gpus", "fail", *problem)
    elif job.resources.gpus_per_worker:
        seen = "one for each worker" if placement.gpus_are_visible else "requested when a run starts in the cluster"
        yield Check("gpus", "ok", f"{job.resources.least_workers} GPUs, {seen}")


def _fits_memory(job: JobSpec, dataset: DatasetSpec, placement: Placement) -> Iterator[Check]:
    from trainer.sizing.estimate import estimate, too_large

    try:
        prediction = estimate(job, dataset, placement.gpu_bytes(job))
    except ValueError as error:
        yield Check("estimate", "fail", str(error), "correct the dataset, or put its files there")
        return
    stated = too_large(job, prediction, None)
    if stated is not None:
        yield Check("estimate", "fail", *stated)
        return
    peak, available = prediction["peak_memory_bytes"], available_memory_bytes()
    message = f"{_gb(peak)} at its peak, {_gb(available)} available"
    if peak > available:
        remedy = "lower model.embedding_dim or batch_size, or train on a larger machine"
        yield Check("estimate", "fail", message, remedy)
    else:
        yield Check("estimate", "ok", message)


def _threshold(name: str, value: int, fail: int, warn: int, message: str, remedy: str) -> Check:
    level: Level = "fail" if value < fail else "warn" if value < warn else "ok"
    return Check(
        name,
        level,
        message if level == "ok" else f"{message}: less than {_gb(fail if level == 'fail' else warn)}",
        "" if level == "ok" else remedy,
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB"
