"""Runs as jobs of a Ray cluster, through its dashboard: the same entrypoint, on other machines (docs/adr/0026).

There is one submission per attempt, named ``RUN-ATTEMPT``. It is recorded in ``ray_job.json`` of the run directory
before it is submitted, so that after a crash at any point the run is found again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from embeddings.durable_files import write_json
from service.core.check import Check
from service.core.errors import Problem
from service.core.settings import EXECUTOR_SETTINGS, Settings
from service.jobs.executors.base import Executor, ExecutorUnavailable, FreeResources, check_cluster_runs
from service.jobs.executors.placement import Placement
from service.jobs.executors.ray_api import TOKEN_REMEDY, RayApi, ray_token
from trainer.runs.directory import RUN_FILE, THIS_CLUSTER
from trainer.runs.protocol import (
    ATTEMPT_VARIABLE,
    LOG_FILE,
    REPORT_TOKEN_VARIABLE,
    REPORT_URL_VARIABLE,
    RUN_DIR_VARIABLE,
    RUN_ID_VARIABLE,
    STOP_SECONDS_VARIABLE,
)

log = logging.getLogger("evenkeel.runner")

JOB_FILE = "ray_job.json"
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
LOG_SECONDS = 3.0
"""The cluster hands out a log as a whole: not at each look."""
LOG_SHARE = 20.0
"""Fetch logs for at most 1/LOG_SHARE of the time, however long they have grown."""
PENDING_SECONDS = 3.0
"""Time after which a stopped job that is still PENDING counts as ended: it is one that waits."""
FORCED_SECONDS = 60.0
"""From SIGKILL until the cluster has noticed."""
POLL_SECONDS = 0.2


class RayJobs(Executor):
    """Executes runs as jobs of a Ray cluster.

    ``stop_seconds``: time from SIGTERM to SIGKILL. Ray takes it with the submission, so it is the same for every
    ending. ``shared_runs``: location of the run directories on the cluster, if it differs from here. ``resources``:
    custom Ray resources that place the driver (on the head node if empty; always 0 CPUs, because the ranks of a small
    cluster need them all).
    """

    settings_read = tuple(EXECUTOR_SETTINGS)

    def __init__(
        self,
        api: RayApi,
        stop_seconds: float,
        *,
        shared_runs: Path | None = None,
        resources: Mapping[str, float] | None = None,
        entrypoint: Sequence[str] = ("python", "-m", "trainer.launch.entrypoint"),
    ):
        self._api = api
        self._stop_seconds = stop_seconds
        self._shared_runs = shared_runs
        self._resources = dict(resources or {})
        self._entrypoint = tuple(entrypoint)
        self._log_due: dict[str, float] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> RayJobs:
        token = ray_token()
        if token is None:
            raise ValueError(f"EVENKEEL_EXECUTOR=ray_jobs submits with a token only, and finds none: {TOKEN_REMEDY}")
        assert settings.ray_address is not None
        return cls(
            RayApi(settings.ray_address, token),
            settings.cancel_grace_seconds,
            shared_runs=settings.shared_runs,
            resources=dict(settings.driver_resources),
        )

    @classmethod
    def placement(cls, settings: Settings) -> Placement:
        return Placement(uses_this_host=False, ray_address=THIS_CLUSTER)

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        if not (settings.ray_address or "").startswith(("http://", "https://")):
            raise ValueError(
                f"EVENKEEL_RAY_ADDRESS is '{settings.ray_address or ''}': with EVENKEEL_EXECUTOR=ray_jobs it is "
                "http://HOST:8265, the cluster's dashboard"
            )
        check_cluster_runs(settings)

    @classmethod
    def diagnose(cls, settings: Settings) -> Iterator[Check]:
        token = ray_token()
        if token is None:
            yield Check("executor", "fail", "ray_jobs submits with a token only, and finds none", TOKEN_REMEDY)
            return
        assert settings.ray_address is not None
        api = RayApi(settings.ray_address, token)
        try:
            api.refuse_open_cluster()
            yield _free(settings.ray_address, api.room())
        except Problem as problem:
            yield Check("executor", "fail", problem.detail, TOKEN_REMEDY)
            return
        except ExecutorUnavailable as error:
            remedy = "start the cluster, or correct EVENKEEL_RAY_ADDRESS and the token"
            yield Check("executor", "fail", str(error), remedy)
            return
        if settings.internal_url is None:
            where = f"share EVENKEEL_HOME {settings.home} with this service: mount it at the same path on every node"
        else:
            kept = f"keep {settings.run_storage}, which every node has to " + (
                "reach" if settings.stored_runs else "see"
            )
            where = f"report to {settings.internal_url} and {kept}"
        yield Check("runs", "ok", f"runs {where}")

    def room(self) -> list[FreeResources] | None:
        return self._api.room()

    def launch(self, run_dir: Path, /) -> str:
        """Submit the attempt and return the submission's id.

        A submission whose response was lost is found, not made again.
        """
        run = json.loads((run_dir / RUN_FILE).read_text("utf-8"))
        submission_id = f"{run['run_id']}-{run.get('attempt', 1)}"
        self._api.refuse_open_cluster()
        if self.is_alive(run_dir):
            raise RuntimeError(f"{run_dir}: its job on the Ray cluster is still running; end it first")
        write_json(run_dir / JOB_FILE, {"submission_id": submission_id, "log_bytes": 0, "asked_to_stop": False})
        if self._api.job(submission_id) is None:
            try:
                self._api.submit(self._submission(submission_id, run_dir, run))
            except ExecutorUnavailable:
                if self._api.job(submission_id) is None:
                    raise
        return submission_id

    def is_alive(self, run_dir: Path, /) -> bool:
        record = _read(run_dir)
        job = None if record is None else self._api.job(record["submission_id"])
        if record is None or job is None:
            return False
        # A job that waits is ended by its next word, and until then holds nothing.
        alive = job["status"] not in ENDED and not (job["status"] == "PENDING" and record["asked_to_stop"])
        self._fetch_log(run_dir, record, last=not alive)
        return alive

    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        """End the attempt; the grace is that of the submission, whatever ``grace_seconds`` says (see the class)."""
        record = _read(run_dir)
        if record is None or not self.is_alive(run_dir):
            return True
        submission_id = record["submission_id"]
        write_json(run_dir / JOB_FILE, {**record, "asked_to_stop": True})
        # Before the cluster is asked: whom it kills when the grace is over has had all of it.
        asked = time.monotonic()
        self._api.stop(submission_id)
        while True:
            job = self._api.job(submission_id)
            passed = time.monotonic() - asked
            if job is None or job["status"] in ENDED:
                self._fetch_log(run_dir, record, last=True)
                return passed < self._stop_seconds
            if job["status"] == "PENDING" and passed > PENDING_SECONDS:
                return True
            if passed > self._stop_seconds + FORCED_SECONDS:
                raise RuntimeError(f"{run_dir}: job {submission_id} is {job['status']} long after it was killed")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Do nothing: each request to the cluster uses a connection of its own."""

    def _submission(self, submission_id: str, run_dir: Path, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document to submit.

        It contains no code: the cluster's image has it. A ``report`` in run.json means that the run fetches the rest
        from the service and reports its events to it.
        """
        directory = self._shared_runs / run["run_id"] if self._shared_runs is not None else run_dir.resolve()
        # With a run storage it is one of the cache of the host that the cluster chooses.
        stored = run.get("storage") is not None
        variables = {
            RUN_ID_VARIABLE: str(run["run_id"]),
            **({} if stored else {RUN_DIR_VARIABLE: str(directory)}),
            ATTEMPT_VARIABLE: str(run.get("attempt", 1)),
            STOP_SECONDS_VARIABLE: str(math.ceil(self._stop_seconds)),
        }
        if run.get("report"):
            variables |= {REPORT_URL_VARIABLE: run["report"]["url"], REPORT_TOKEN_VARIABLE: run["report"]["token"]}
        return {
            "submission_id": submission_id,
            # exec: the job's exit code, and its signals, are the run's own.
            "entrypoint": shlex.join(("exec", *self._entrypoint, *(() if stored else ("--run-dir", str(directory))))),
            "runtime_env": {"env_vars": variables},
            "entrypoint_num_cpus": 0,
            "entrypoint_resources": self._resources,
            "metadata": {"run_id": str(run["run_id"])},
        }

    def _fetch_log(self, run_dir: Path, record: dict[str, Any], last: bool) -> None:
        """Append what the job has logged since; a crash in between repeats lines, and loses none."""
        submission_id, started = record["submission_id"], time.monotonic()
        if record.get("log_ended") or (not last and started < self._log_due.get(submission_id, 0.0)):
            return
        try:
            said = self._api.log(submission_id)
        except ExecutorUnavailable as error:
            log.warning("%s: its log could not be fetched: %s", submission_id, error)
            return
        fresh = said[record["log_bytes"] :]
        if fresh:
            with open(run_dir / LOG_FILE, "ab", opener=_private) as file:
                file.write(fresh)
        if fresh or last:
            told = {"log_bytes": len(said), "log_ended": last}
            record |= told
            write_json(run_dir / JOB_FILE, (_read(run_dir) or record) | told)
        taken = time.monotonic() - started
        self._log_due[submission_id] = time.monotonic() + max(LOG_SECONDS, LOG_SHARE * taken)
        if last:
            self._log_due.pop(submission_id, None)


def _free(address: str, nodes: Sequence[FreeResources] | None) -> Check:
    if nodes is None:
        free = "does not tell what is free: jobs are submitted whenever EVENKEEL_MAX_RUNS lets them"
        return Check("executor", "warn", f"{address} answers, token on, but {free}", "wait for its autoscaler")
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    where = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    free = f"{cpus:g} CPUs and {gpus:g} GPUs free on {where}"
    return Check("executor", "ok", f"{address} answers, token on, nobody is let in without; {free}")


def _read(run_dir: Path) -> dict[str, Any] | None:
    try:
        document = json.loads((run_dir / JOB_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and "submission_id" in document else None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
