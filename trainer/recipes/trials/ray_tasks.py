"""Trials as tasks of a Ray cluster of their own on this host: one CPU, one process and one gloo rank each."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from embeddings.durable_files import write_json
from trainer.launch.on_ray import ROOT
from trainer.recipes.trials.run_trial import machine, path_of, run_trial
from trainer.recipes.trials.trial import Trial
from trainer.runs.events import utc_now
from trainer.runs.failures import ResourceError

OBJECT_STORE_BYTES = 100 * 2**20
"""Trials exchange nothing through Ray's object store: what Ray asks for at least, and a little."""


def run_on_ray(trials: Sequence[Trial], out: Path, workers: int, command: str) -> Iterator[dict[str, Any]]:
    """Yield the record of each trial as it ends, ``workers`` at a time.

    A task whose process dies is a failed trial.

    Raises:
        ResourceError: Ray does not start.
    """
    # Ray reads them when it is imported. A token of its own: none is written into the home directory.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Tasks are as nice as the command, not nicer: beside other work they would never end.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    # A process for each: what one leaves behind in memory or in threads is not the next one's.
    remote = ray.remote(num_cpus=1, max_calls=1, max_retries=0)(_task)
    temporary = _temporary_directory(out)
    try:
        _start(temporary, workers)
        running = {remote.remote(trial, str(out.resolve()), command): trial for trial in trials}
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            trial = running.pop(done)
            try:
                yield ray.get(done)
            except ray.exceptions.RayError as error:
                yield _lost(trial, out, command, f"{type(error).__name__}: {str(error).strip()[:500]}")
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


def _task(trial: Trial, out: str, command: str) -> dict[str, Any]:
    return run_trial(trial, Path(out), command)


def _start(temporary: Path, workers: int) -> None:
    """Start a local cluster that joins nothing and is joined by nobody."""
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    try:
        ray.init(
            address="local",
            num_cpus=workers,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
            _temp_dir=str(temporary),
        )
    except Exception as error:
        raise ResourceError(
            f"Ray on this host: {type(error).__name__}: {str(error).strip()[:500]}; --here runs trials without it"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # ray.init takes SIGTERM for itself


def _lost(trial: Trial, out: Path, command: str, error: str) -> dict[str, Any]:
    """Return the record of a trial whose process could not write its own."""
    record: dict[str, Any] = {
        "name": trial.name, "key": trial.key, "state": "failed", "error": error, "metrics": [], "alpha": None,
        "seconds": 0.0, "finished_at": utc_now(), "command": command, "machine": machine(), "packages": {},
        "git_commit": None, "dataset_fingerprint": None,
    }  # fmt: skip
    path_of(trial, out).parent.mkdir(parents=True, exist_ok=True)
    write_json(path_of(trial, out), record)
    return record


def _temporary_directory(out: Path) -> Path:
    """Return Ray's folder of logs and sockets.

    The name is that of the results, so that what a killed grid left is cleared by the next. A socket's path may have
    107 bytes, of which Ray takes most: not under a long TMPDIR.
    """
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 16 else "/tmp"
    folder = Path(parent) / f"evenkeel-ray-{hashlib.sha256(str(out).encode()).hexdigest()[:12]}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder
