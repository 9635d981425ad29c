"""Runs as RayJobs on a Kubernetes cluster, each with a Ray cluster of its own, created by KubeRay (docs/adr/0026).

There is one RayJob per attempt. The RayJob's name is derived from run and attempt, and labels name its owner, so that
it is found again after a crash at any point. The run's log is the log of the pod that submits the RayJob.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from embeddings.durable_files import write_json
from service.core.errors import Problem
from service.core.settings import Settings
from service.jobs.executors.base import (
    ENTRYPOINT,
    Check,
    ClusterExecutor,
    ExecutorUnavailable,
    check_cluster_runs,
    read_record,
)
from service.jobs.executors.kube_api import AlreadyExists, KubeApi, Refused, cluster_configuration, default_namespace
from service.jobs.executors.ray_job_manifest import (
    ATTEMPT_LABEL,
    FENCE_LABEL,
    MANAGED,
    ROLE_LABEL,
    RUN_LABEL,
    ClusterTemplate,
    fence,
    object_name,
    ray_job,
    token_secret,
)
from trainer.runs.directory import RUN_FILE

log = logging.getLogger("evenkeel.runner")

RECORD_FILE = "kuberay.json"
MANAGED_SELECTOR = ",".join(f"{label}={value}" for label, value in MANAGED.items())
ENDED = ("Complete", "Failed", "ValidationFailed")
"""Deployment states of a RayJob that has ended; from others, such as Suspended and Waiting, it may still start."""
GONE_SECONDS = 60.0
"""Longest wait for deleted pods to disappear; applies before they are killed, and again after."""
WATCH_SECONDS = 1.0
TEMPLATE_REMEDY = "correct the cluster template (EVENKEEL_KUBERAY_TEMPLATE) or the job's resources"


class KubeRayJobs(ClusterExecutor):
    """Executor of runs as RayJobs.

    ``template``: description of the Ray cluster that each run gets. ``queue``: a LocalQueue of Kueue that decides when
    a run starts; None to start at once.
    """

    settings_read = ("internal_url", "shared_runs")
    options = ("TEMPLATE", "NAMESPACE", "QUEUE")

    def __init__(
        self,
        api: KubeApi,
        template: ClusterTemplate,
        stop_seconds: float,
        *,
        shared_runs: Path | None = None,
        queue: str | None = None,
        entrypoint: Sequence[str] = ENTRYPOINT,
    ):
        super().__init__(stop_seconds, shared_runs, entrypoint)
        self._api = api
        self._template = template
        self._queue = queue

    @classmethod
    def from_settings(cls, settings: Settings) -> KubeRayJobs:
        return cls(
            _api(settings),
            ClusterTemplate.read(_template(settings)),
            settings.cancel_grace_seconds,
            shared_runs=settings.shared_runs,
            queue=dict(settings.executor_options).get("QUEUE"),
        )

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        _template(settings)
        check_cluster_runs(settings)

    @classmethod
    def diagnose(cls, settings: Settings) -> Iterator[Check]:
        try:
            ClusterTemplate.read(_template(settings))
            api = _api(settings)
        except ValueError as error:
            yield Check("executor", "fail", str(error), "correct the setting or file that the message names")
            return
        try:
            running = len(api.list("rayjobs", MANAGED_SELECTOR))
            yield Check("executor", "ok", f"{api.address} answers; {running} RayJobs of runs in {api.namespace}")
        except ExecutorUnavailable as error:
            yield Check(
                "executor", "fail", str(error), "check that KubeRay is installed and that this account may use it"
            )
        finally:
            api.close()

    def ping(self) -> None:
        self._api.list("rayjobs", MANAGED_SELECTOR)

    def launch(self, run_dir: Path, /) -> str:
        """Create the RayJob of the attempt and return its name.

        If the RayJob exists because an earlier response was lost, it is found instead of created again.
        """
        run = json.loads((run_dir / RUN_FILE).read_text("utf-8"))
        if self.is_alive(run_dir):
            raise RuntimeError(f"{run_dir}: its RayJob is still running; end it first")
        directory = self._on_cluster(run, run_dir)
        document = ray_job(
            run, directory, self._template, self._stop_seconds, queue=self._queue, entrypoint=self._entrypoint
        )
        name = str(document["metadata"]["name"])
        write_json(run_dir / RECORD_FILE, {"name": name})
        if (job := self._api.get("rayjobs", name)) is None:
            secret = token_secret(run)
            try:
                if secret is not None:
                    self._replace_secret(secret)
                job = self._create(document)
            except Refused as error:
                wrong = {"field": "EVENKEEL_KUBERAY_TEMPLATE", "message": str(error), "remedy": TEMPLATE_REMEDY}
                raise Problem(422, "ray-job-refused", f"Kubernetes refuses the RayJob: {error}", [wrong]) from error
            if secret is not None:
                self._give(secret, job)
        if job["metadata"].get("labels", {}).get(FENCE_LABEL) != fence(run):
            raise RuntimeError(f"RayJob {name} in {self._api.namespace} belongs to another service: delete it first")
        return name

    def is_alive(self, run_dir: Path, /) -> bool:
        jobs = self._jobs(run_dir)
        # If somebody deleted the RayJob, its run may still be alive: it lasts as long as its submitter.
        alive = any(map(_runs, jobs)) or (
            not any(map(_ended, jobs)) and any(map(_is_active, self._submitters(run_dir)))
        )
        self._follow(run_dir, jobs, last=not alive)
        return alive

    def terminate(self, run_dir: Path, /, grace_seconds: float) -> bool:
        """End the attempt: KubeRay stops it, then its pods are deleted; pods that remain are killed."""
        by_itself = self._stop(run_dir, grace_seconds)
        deadline = time.monotonic() + GONE_SECONDS
        force = not by_itself
        while self._remove(run_dir, force):
            if time.monotonic() > deadline:
                if force:
                    raise RuntimeError(f"{run_dir}: its pods still exist long after they were killed")
                force, deadline = True, time.monotonic() + GONE_SECONDS
            self._api.wait("pods", _of(run_dir), WATCH_SECONDS)
        return by_itself

    def close(self) -> None:
        self._api.close()

    def _jobs(self, run_dir: Path) -> list[dict[str, Any]]:
        return self._api.list("rayjobs", _of(run_dir))

    def _submitters(self, run_dir: Path) -> list[dict[str, Any]]:
        return self._api.list("pods", f"{_of(run_dir)},{ROLE_LABEL}=submitter")

    def _replace_secret(self, secret: Mapping[str, Any]) -> None:
        """Create the Secret, replacing one left by an earlier launch that failed before it created its RayJob."""
        try:
            self._api.create("secrets", secret)
        except AlreadyExists:
            self._api.delete("secrets", secret["metadata"]["name"])
            try:
                self._api.create("secrets", secret)
            except AlreadyExists as error:
                raise ExecutorUnavailable(f"Secret {secret['metadata']['name']} is still being deleted") from error

    def _give(self, secret: Mapping[str, Any], owner: Mapping[str, Any]) -> None:
        """Let Kubernetes delete the Secret together with its RayJob."""
        reference = {key: owner[key] for key in ("apiVersion", "kind")} | {
            key: owner["metadata"][key] for key in ("name", "uid")
        }
        self._api.patch("secrets", secret["metadata"]["name"], {"metadata": {"ownerReferences": [reference]}})

    def _create(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Create the RayJob, or return it if an earlier request, whose response was lost, created it."""
        try:
            return self._api.create("rayjobs", document)
        except (AlreadyExists, ExecutorUnavailable):
            job = self._api.get("rayjobs", document["metadata"]["name"])
            if job is None:
                raise
            return job

    def _stop(self, run_dir: Path, grace_seconds: float) -> bool:
        """Ask the attempt to end and wait for that; return False if it has not ended within ``grace_seconds``.

        If a RayJob is deleted without the objects that it owns, KubeRay stops it (SIGTERM) and its pods remain. One of
        these has the last lines of the log.
        """
        # Computed before the stop is requested, so that the deadline is never after Ray's own.
        deadline = time.monotonic() + grace_seconds
        jobs = self._jobs(run_dir)
        for job in filter(_runs, jobs):
            self._api.delete("rayjobs", job["metadata"]["name"], propagation="Orphan")
        waited, late = False, False
        while not any(map(_ended, jobs)) and any(map(_is_running, self._submitters(run_dir))):
            if late := time.monotonic() > deadline:
                break
            waited = True
            self._follow(run_dir, jobs, last=False)
            self._api.wait("pods", _of(run_dir), WATCH_SECONDS)
        self._follow(run_dir, jobs, last=True)
        return not (late or (waited and time.monotonic() > deadline))

    def _remove(self, run_dir: Path, force: bool) -> bool:
        """Delete all objects of the run, and return True if some still existed."""
        selector = _of(run_dir)
        left = {resource: self._api.list(resource, selector) for resource in ("rayjobs", "rayclusters", "pods")}
        names = {_name(item) for items in left.values() for item in items}
        if "name" in (record := read_record(run_dir / RECORD_FILE)):
            names.add(record["name"])
        for name in names:
            # KubeRay gives the submitter's Job the name of the RayJob, but not its labels. The Secret is not listed,
            # because the right to list Secrets is a right to read all of them.
            self._api.delete("jobs", name)
            self._api.delete("secrets", name)
        for resource, items in left.items():
            for item in items:
                if "deletionTimestamp" not in item["metadata"] or (resource == "pods" and force):
                    grace = 0 if resource == "pods" and force else None
                    self._api.delete(resource, item["metadata"]["name"], grace_seconds=grace)
        return any(left.values())

    def _follow(self, run_dir: Path, jobs: Sequence[Mapping[str, Any]], last: bool) -> None:
        """Append the submitter pod's new log lines to the run's log, and KubeRay's message, if any, at the end."""
        record, started = read_record(run_dir / RECORD_FILE), time.monotonic()
        if "name" not in record or record.get("ended") or not self._log_is_due(run_dir, last):
            return
        position = Position(**record.get("position", {}))
        try:
            fresh = b""
            for pod in self._submitters(run_dir):
                text, position = fresh_lines(self._api.log(pod["metadata"]["name"], position.time), position)
                fresh += text
        except ExecutorUnavailable as error:
            log.warning("%s: its log could not be fetched: %s", record["name"], error)
            return
        if last:
            fresh += b"".join(_verdict(job) for job in jobs if job["metadata"]["name"] == record["name"])
        self._append_log(run_dir, fresh, started, last)
        if fresh or last:
            write_json(run_dir / RECORD_FILE, record | {"position": position._asdict(), "ended": last})


def _of(run_dir: Path) -> str:
    """Return the label selector of all objects that belong to a run."""
    return f"{RUN_LABEL}={run_dir.name}"


def _runs(job: Mapping[str, Any]) -> bool:
    """Return True if a RayJob is running or may still start."""
    return "deletionTimestamp" not in job["metadata"] and not _ended(job)


def _ended(job: Mapping[str, Any]) -> bool:
    return job.get("status", {}).get("jobDeploymentStatus", "") in ENDED


def _name(item: Mapping[str, Any]) -> str:
    """Return the name of the RayJob to which an object belongs."""
    labels = item["metadata"]["labels"]
    return object_name(labels[RUN_LABEL], int(labels[ATTEMPT_LABEL]))


def _is_running(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") == "Running"


def _is_active(pod: Mapping[str, Any]) -> bool:
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def _template(settings: Settings) -> Path:
    if path := dict(settings.executor_options).get("TEMPLATE"):
        return Path(path)
    raise ValueError(
        "EVENKEEL_EXECUTOR=kuberay needs EVENKEEL_KUBERAY_TEMPLATE, a file with the RayClusterSpec of its runs: the "
        "Helm chart creates one"
    )


def _api(settings: Settings) -> KubeApi:
    return KubeApi(cluster_configuration(), dict(settings.executor_options).get("NAMESPACE") or default_namespace())


def _verdict(job: Mapping[str, Any]) -> bytes:
    """Return KubeRay's message about a RayJob that it could not start or finish; b"" for any other RayJob."""
    status = job.get("status", {})
    if status.get("jobDeploymentStatus") not in ("Failed", "ValidationFailed"):
        return b""
    return f"KubeRay: {status.get('reason', 'Failed')}: {status.get('message', '')}\n".encode()


class Position(NamedTuple):
    """Read position in a pod's log: the time of the last line, and the number of lines read with that time.

    Byte offsets cannot be used: Kubernetes does not provide them, and rotates logs.
    """

    time: str = ""
    lines: int = 0


def fresh_lines(text: bytes, position: Position) -> tuple[bytes, Position]:
    """Return (lines of ``text`` after ``position``, without their times; the position after them).

    ``text`` must have lines ``TIME TEXT`` in ascending order of time, beginning at or before the position. Times are in
    RFC 3339, in UTC, with a fraction of any length.
    """
    reached = _key(position.time)
    skip, lines = position.lines, []
    for line in text.splitlines(keepends=True):
        time, _, rest = line.partition(b" ")
        key = _key(when := time.decode("ascii", "replace"))
        if key < reached:
            continue
        if key == reached:
            if skip:
                skip -= 1
                continue
            position = Position(when, position.lines + 1)
        else:
            reached, skip, position = key, 0, Position(when, 1)
        lines.append(rest)
    return b"".join(lines), position


def _key(time: str) -> tuple[str, str]:
    """Return a sort key of a time, which does not depend on trailing zeros of the fraction."""
    seconds, _, fraction = time.rstrip("Z").partition(".")
    return seconds, fraction.ljust(9, "0")
