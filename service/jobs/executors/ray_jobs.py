"""Runs as jobs of a Ray cluster, submitted to the cluster's dashboard over HTTP (docs/adr/0026).

There is one submission per attempt, named ``RUN-ATTEMPT``. The submission is recorded in ``ray_job.json`` of the run
directory before it is submitted, so that after a crash at any point the run is found again.

Ray's own client is not used because it would import Ray. Observed with Ray 2.60: a submission id that was used before
gives 500. A job that has not started cannot be deleted (500), and a stop takes effect only once it has started. The log
is always returned whole.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from embeddings.durable_files import write_json
from service.core.errors import Problem
from service.core.settings import EXECUTOR_SETTINGS, Settings
from service.jobs.executors.base import (
    ENTRYPOINT,
    Check,
    ClusterExecutor,
    ExecutorUnavailable,
    FreeResources,
    check_cluster_runs,
    read_record,
    variables_of,
)
from trainer.runs.directory import RUN_FILE
from trainer.runs.protocol import EXIT_ENVIRONMENT, REPORT_TOKEN_VARIABLE, REPORT_URL_VARIABLE, RUN_DIR_VARIABLE

log = logging.getLogger("evenkeel.runner")

JOB_FILE = "ray_job.json"
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
PENDING_SECONDS = 3.0
"""Time after which a job that was asked to stop counts as ended if it is still PENDING: it waits for resources."""
FORCED_SECONDS = 60.0
"""Longest wait, after SIGKILL is due, for the cluster to report the end of a job."""
POLL_SECONDS = 0.2
CHECK = (
    "import importlib.util, sys; "
    "lacks = [name for name in ('trainer', 'torch', 'ray') if importlib.util.find_spec(name) is None]; "
    "lacks and sys.exit(f\"{sys.executable} (Python {sys.version.split()[0]}) lacks {', '.join(lacks)}\")"
)
"""Program that fails, with the names of missing packages, in an environment that cannot execute runs."""

ANSWER_SECONDS = 10.0
SUBMIT_SECONDS = 60.0
"""Longest wait for the response to a submission, since the dashboard asks an agent that may still be starting."""
TOKEN_REMEDY = (
    "generate one secret, and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (a file with it) both here and wherever "
    "`ray start` runs"
)


def ray_token(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the cluster's token, sought as by Ray: RAY_AUTH_TOKEN, file RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    source = os.environ if environment is None else environment
    if source.get("RAY_AUTH_TOKEN", "").strip():
        return source["RAY_AUTH_TOKEN"].strip()
    named = source.get("RAY_AUTH_TOKEN_PATH", "").strip()
    path = Path(named) if named else Path(source.get("HOME") or Path.home()) / ".ray" / "auth_token"
    try:
        return path.read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


class RayApi:
    """A client of the Ray dashboard at ``address``, such as ``http://HOST:8265``.

    Each call raises ExecutorUnavailable if the cluster does not answer as expected.
    """

    def __init__(self, address: str, token: str):
        self.address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._certificates = ssl.create_default_context()

    def refuse_open_cluster(self) -> None:
        """Check that the cluster demands a token; without a token, anyone who reaches the cluster can run code on it.

        Raises:
            Problem: The cluster answers without a token.
        """
        try:
            answer = self._request("GET", "/api/version")
        except httpx.HTTPError as error:
            raise self._unknown(error) from error
        if answer.is_success:
            detail = f"The Ray cluster at {self.address} answers requests without a token: nothing is submitted to it."
            wrong = {"field": "EVENKEEL_RAY_ADDRESS", "message": detail, "remedy": TOKEN_REMEDY}
            raise Problem(503, "open-cluster", detail, [wrong])

    def job(self, submission_id: str) -> dict[str, Any] | None:
        """Return the cluster's record of a job, or None if the job is unknown.

        The field ``status`` is PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        """
        answer = self._ask("GET", _path(submission_id))
        return None if answer.status_code == 404 else dict(answer.json())

    def submit(self, document: Mapping[str, Any]) -> None:
        """Submit a job described by ``document``.

        Raises:
            ExecutorUnavailable: The cluster did not accept the job, perhaps because its id exists: check with
                :meth:`job`.
        """
        self._ask("POST", "/api/jobs/", json=document, timeout=SUBMIT_SECONDS)

    def stop(self, submission_id: str) -> None:
        """Ask the cluster to stop a job: by SIGTERM, and after the job's RAY_JOB_STOP_WAIT_TIME_S by SIGKILL."""
        self._ask("POST", _path(submission_id, "/stop"))

    def log(self, submission_id: str) -> bytes:
        """Return the job's whole log."""
        answer = self._ask("GET", _path(submission_id, "/logs"))
        return b"" if answer.status_code == 404 else str(answer.json()["logs"]).encode()

    def room(self) -> list[FreeResources] | None:
        """Return the free resources of each node, some seconds old; None if the cluster reports none."""
        answer = self._ask("GET", "/api/cluster_status").json()
        report = ((answer.get("data") or {}).get("clusterStatus") or {}).get("loadMetricsReport") or {}
        nodes = report.get("usageByNode")
        if not nodes:
            return None

        def free(node: Mapping[str, Any], name: str) -> float:
            used, total = node.get(name) or (0.0, 0.0)
            return float(total) - float(used)

        return [
            FreeResources(free(node, "CPU"), int(free(node, "memory")), free(node, "GPU")) for node in nodes.values()
        ]

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._request(method, path, headers=self._headers, **options)
        except httpx.HTTPError as error:
            raise self._unknown(error) from error
        if answer.status_code in (401, 403):
            message = (
                f"the Ray cluster at {self.address} does not accept our token ({answer.status_code}): {TOKEN_REMEDY}"
            )
            raise ExecutorUnavailable(message)
        if not answer.is_success and answer.status_code != 404:
            last_line = (answer.text.strip().splitlines() or [""])[-1][:300]
            raise ExecutorUnavailable(
                f"the Ray cluster at {self.address} answers {method} {path} with {answer.status_code}: {last_line}"
            )
        return answer

    def _request(self, method: str, path: str, *, timeout: float = ANSWER_SECONDS, **options: Any) -> httpx.Response:
        url = self.address + path
        return httpx.request(method, url, timeout=timeout, verify=self._certificates, trust_env=False, **options)

    def _unknown(self, error: httpx.HTTPError) -> ExecutorUnavailable:
        return ExecutorUnavailable(
            f"the Ray cluster at {self.address} does not answer: {str(error) or type(error).__name__}"
        )


def _path(submission_id: str, rest: str = "") -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}{rest}"


class RayJobs(ClusterExecutor):
    """Executor of runs as jobs of a Ray cluster.

    ``resources``: custom Ray resources that select the driver's node; the head node if empty. The driver always asks
    for 0 CPUs, because the ranks may need all CPUs of a small cluster.
    """

    settings_read = tuple(EXECUTOR_SETTINGS)

    def __init__(
        self,
        api: RayApi,
        stop_seconds: float,
        *,
        shared_runs: Path | None = None,
        resources: Mapping[str, float] | None = None,
        entrypoint: Sequence[str] = ENTRYPOINT,
    ):
        super().__init__(stop_seconds, shared_runs, entrypoint)
        self._api = api
        self._resources = dict(resources or {})

    @classmethod
    def from_settings(cls, settings: Settings) -> RayJobs:
        token = ray_token()
        if token is None:
            raise ValueError(f"EVENKEEL_EXECUTOR=ray_jobs needs a token, and finds none: {TOKEN_REMEDY}")
        assert settings.ray_address is not None
        return cls(
            RayApi(settings.ray_address, token),
            settings.cancel_grace_seconds,
            shared_runs=settings.shared_runs,
            resources=dict(settings.driver_resources),
        )

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
            yield Check("executor", "fail", "ray_jobs needs a token, and finds none", TOKEN_REMEDY)
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

        If an earlier submission succeeded but its response was lost, it is found instead of sent again.
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
        record = read_record(run_dir / JOB_FILE)
        job = self._api.job(record["submission_id"]) if "submission_id" in record else None
        if job is None:
            return False
        # A waiting job ends as soon as it would start, and holds no resources until then.
        alive = job["status"] not in ENDED and not (job["status"] == "PENDING" and record["asked_to_stop"])
        self._fetch_log(run_dir, record, last=not alive)
        if not alive and record.get("exit_code") != job.get("driver_exit_code"):
            write_json(run_dir / JOB_FILE, read_record(run_dir / JOB_FILE) | {"exit_code": job["driver_exit_code"]})
        return alive

    def exit_code(self, run_dir: Path, /) -> int | None:
        return read_record(run_dir / JOB_FILE).get("exit_code")

    def ping(self) -> None:
        self._api.refuse_open_cluster()

    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        """End the attempt; ``grace_seconds`` is ignored, because the grace was fixed when the job was submitted."""
        record = read_record(run_dir / JOB_FILE)
        if not self.is_alive(run_dir):
            return True
        submission_id = record["submission_id"]
        write_json(run_dir / JOB_FILE, {**record, "asked_to_stop": True})
        # Read before the stop is requested: a job that the cluster kills has then had the whole grace period.
        asked_at = time.monotonic()
        self._api.stop(submission_id)
        while True:
            job = self._api.job(submission_id)
            passed = time.monotonic() - asked_at
            if job is None or job["status"] in ENDED:
                self._fetch_log(run_dir, record, last=True)
                return passed < self._stop_seconds
            if job["status"] == "PENDING" and passed > PENDING_SECONDS:
                return True
            if passed > self._stop_seconds + FORCED_SECONDS:
                raise RuntimeError(f"{run_dir}: job {submission_id} is {job['status']} long after it was killed")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Do nothing, since each request to the cluster opens and closes its own connection."""

    def _submission(self, submission_id: str, run_dir: Path, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document to submit.

        The submission contains no code, which is in the cluster's image. If run.json has ``report``, the run fetches
        its run.json from the service and reports its events to the service.
        """
        directory = self._on_cluster(run, run_dir)
        variables = variables_of(run, directory, self._stop_seconds)
        # With a run storage, the run directory is in the cache of the host that the cluster chooses.
        stored = run.get("storage") is not None
        if stored:
            del variables[RUN_DIR_VARIABLE]
        if run.get("report"):
            variables |= {REPORT_URL_VARIABLE: run["report"]["url"], REPORT_TOKEN_VARIABLE: run["report"]["token"]}
        check = shlex.join((self._entrypoint[0], "-c", CHECK))
        # With exec the run itself gets the job's signals and sets its exit code.
        command = shlex.join(("exec", *self._entrypoint, *(() if stored else ("--run-dir", str(directory)))))
        return {
            "submission_id": submission_id,
            "entrypoint": f"{check} || exit {EXIT_ENVIRONMENT}; {command}",
            "runtime_env": {"env_vars": variables},
            "entrypoint_num_cpus": 0,
            "entrypoint_resources": self._resources,
            "metadata": {"run_id": str(run["run_id"])},
        }

    def _fetch_log(self, run_dir: Path, record: dict[str, Any], last: bool) -> None:
        """Append the job's new log lines to the run's log; a crash in between can repeat lines but loses none."""
        submission_id, started = record["submission_id"], time.monotonic()
        if record.get("log_ended") or not self._log_is_due(run_dir, last):
            return
        try:
            text = self._api.log(submission_id)
        except ExecutorUnavailable as error:
            log.warning("%s: its log could not be fetched: %s", submission_id, error)
            return
        fresh = text[record["log_bytes"] :]
        self._append_log(run_dir, fresh, started, last)
        if fresh or last:
            progress = {"log_bytes": len(text), "log_ended": last}
            record |= progress
            write_json(run_dir / JOB_FILE, (read_record(run_dir / JOB_FILE) or record) | progress)


def _free(address: str, nodes: Sequence[FreeResources] | None) -> Check:
    if nodes is None:
        free = "does not report its free resources: only EVENKEEL_MAX_RUNS limits the number of runs"
        return Check("executor", "warn", f"{address} answers, token on, but {free}", "wait for its autoscaler")
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    where = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    free = f"{cpus:g} CPUs and {gpus:g} GPUs free on {where}"
    return Check("executor", "ok", f"{address} answers, and only with a token; {free}")
