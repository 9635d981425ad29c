"""Runs as detached processes on this host: the executor interface over :mod:`trainer.runs.run_process`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from service.core.settings import Settings
from service.jobs.executors.base import Check, Executor, Placement
from trainer.runs import run_process
from trainer.runs.warm_pool import WarmPool


class LocalRuns(Executor):
    """Executor of runs on this host; their ranks join the Ray cluster of EVENKEEL_RAY_ADDRESS, if that is set.

    ``command``, followed by ``--run-dir D``, is run instead of a training, each time as a new process. A training
    itself is forked from a process that has its imports loaded.
    """

    settings_read = ("ray_address", "stored_runs")

    def __init__(self, command: Sequence[str] = run_process.COMMAND):
        self._command = tuple(command)
        self._warm_pool = WarmPool() if self._command == run_process.COMMAND else None

    @classmethod
    def from_settings(cls, settings: Settings) -> LocalRuns:
        return cls()

    @classmethod
    def placement(cls, settings: Settings) -> Placement:
        return Placement(uses_this_host=settings.ray_address is None, ray_address=settings.ray_address)

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        if (settings.ray_address or "").startswith(("http://", "https://")):
            raise ValueError(
                f"EVENKEEL_RAY_ADDRESS is '{settings.ray_address}': with EVENKEEL_EXECUTOR={settings.executor} it is "
                "HOST:6379 or unset"
            )

    @classmethod
    def diagnose(cls, settings: Settings) -> Iterator[Check]:
        yield _diagnose_cluster(settings.ray_address)

    def warm_up(self) -> None:
        if self._warm_pool is not None:
            self._warm_pool.warm_up(run_process.environment_of_runs())

    def launch(self, run_dir: Path, /) -> int:
        return run_process.launch(run_dir, command=self._command, warm_pool=self._warm_pool)

    def is_alive(self, run_dir: Path, /) -> bool:
        return run_process.is_alive(run_dir)

    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        return run_process.terminate(run_dir, grace_seconds)

    def close(self) -> None:
        if self._warm_pool is not None:
            self._warm_pool.close()


def _diagnose_cluster(address: str | None) -> Check:
    if address is None:
        return Check("ray", "ok", "none needed: runs are processes of this host")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except ValueError:
        message = f"EVENKEEL_RAY_ADDRESS '{address}' is not HOST:PORT"
        return Check("ray", "fail", message, "set it to, for example, 10.0.0.5:6379")
    except OSError as error:
        message = f"no Ray answers at {address}: {error.strerror or error}"
        return Check("ray", "fail", message, "start the cluster, or unset EVENKEEL_RAY_ADDRESS")
    if os.environ.get("RAY_AUTH_MODE") != "token":
        message = f"{address} is joined without a token: anyone who reaches an open Ray can run code on it"
        remedy = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here and where `ray start` runs"
        return Check("ray", "fail", message, remedy)
    return Check("ray", "ok", f"{address} answers, token on")
