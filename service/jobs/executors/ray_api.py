"""The HTTP interface of a Ray cluster's dashboard (jobs, free resources), without Ray's own client, which imports Ray.

Measured on Ray 2.60: a submission id that was used before gives 500; a job that has not started cannot be deleted (500)
and is not stopped, but starts and is ended at once when its turn comes; the log is always returned whole.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from service.core.errors import Problem
from service.jobs.executors.base import ExecutorUnavailable, FreeResources

ANSWER_SECONDS = 10.0
SUBMIT_SECONDS = 60.0
"""The dashboard asks an agent, which may just be starting."""
TOKEN_REMEDY = (
    "generate one secret, and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (a file with it) both here and wherever "
    "`ray start` runs"
)


def ray_token(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the cluster's token, searched as by Ray: RAY_AUTH_TOKEN, file RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
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
    """A client for ``address``, ``http://HOST:8265``.

    Each call raises ExecutorUnavailable if the cluster does not answer as expected.
    """

    def __init__(self, address: str, token: str):
        self.address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._certificates = ssl.create_default_context()

    def refuse_open_cluster(self) -> None:
        """Check that the cluster demands a token; if it does not, anyone who reaches it can run code on it.

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
        """Return the cluster's record of a job, or None if it has none.

        Its ``status`` is PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED.
        """
        answer = self._ask("GET", _path(submission_id))
        return None if answer.status_code == 404 else dict(answer.json())

    def submit(self, document: Mapping[str, Any]) -> None:
        """Submit a job.

        Raises:
            ExecutorUnavailable: The cluster did not accept it; its id may have been used before: ask :meth:`job`.
        """
        self._ask("POST", "/api/jobs/", json=document, timeout=SUBMIT_SECONDS)

    def stop(self, submission_id: str) -> None:
        """Ask a job to stop: SIGTERM, and SIGKILL after its RAY_JOB_STOP_WAIT_TIME_S."""
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
                f"the Ray cluster at {self.address} does not take our token ({answer.status_code}): {TOKEN_REMEDY}"
            )
            raise ExecutorUnavailable(message)
        if not answer.is_success and answer.status_code != 404:
            said = (answer.text.strip().splitlines() or [""])[-1][:300]
            raise ExecutorUnavailable(
                f"the Ray cluster at {self.address} answers {method} {path} with {answer.status_code}: {said}"
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
