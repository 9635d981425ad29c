"""Tracker that writes to an MLflow server by its REST API, without MLflow's package."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from trainer.runs.directory import Run
from trainer.runs.trackers.base import Point, TrackerUnusableError, parameters_of
from trainer.spec.tracking import MLflowTracking

URI_VARIABLE = "MLFLOW_TRACKING_URI"
RUN_TAG = "evenkeel.run"
ANSWER_SECONDS = 10.0
PARAMETERS_AT_ONCE = 100
"""MLflow's limit of parameters in a request; PARAMETER_LENGTH is its limit of characters of a value."""
PARAMETER_LENGTH = 6000
_STATES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MLflowTracker:
    """Tracker of an MLflow run, which is found by the tag RUN_TAG and shared by all attempts.

    The server knows the last step of each curve.
    """

    def __init__(self, run: Run, spec: MLflowTracking):
        uri = spec.uri or os.environ.get(URI_VARIABLE, "").strip().rstrip("/")
        if not uri.startswith(("http://", "https://")):
            raise TrackerUnusableError(
                f"no server: give tracking's mlflow its uri, or set {URI_VARIABLE} to http://HOST:PORT"
            )
        self._client = httpx.Client(base_url=f"{uri}/api/2.0/mlflow/", timeout=ANSWER_SECONDS, **_credentials())
        try:
            experiment = self._experiment(spec.experiment or run.job.name)
            self._run_id, self._last = self._find_run(experiment, run)
        except BaseException:
            self._client.close()
            raise

    def last_steps(self) -> dict[str, int]:
        return dict(self._last)

    def log(self, points: Sequence[Point]) -> None:
        metrics = [
            {"key": one.name, "value": one.value, "timestamp": int(one.time * 1000), "step": one.step} for one in points
        ]
        self._ask("POST", "runs/log-batch", json={"run_id": self._run_id, "metrics": metrics})

    def end(self, state: str | None, tags: Mapping[str, str]) -> None:
        told = [{"key": name, "value": value[:PARAMETER_LENGTH]} for name, value in tags.items()]
        self._ask("POST", "runs/log-batch", json={"run_id": self._run_id, "tags": told})
        if state is not None:
            self._update(status=_STATES[state], end_time=int(time.time() * 1000))

    def close(self) -> None:
        self._client.close()

    def _experiment(self, name: str) -> str:
        answer = self._client.get("experiments/get-by-name", params={"experiment_name": name})
        if answer.status_code == 404:
            return str(self._ask("POST", "experiments/create", json={"name": name})["experiment_id"])
        return str(_document(answer)["experiment"]["experiment_id"])

    def _find_run(self, experiment: str, run: Run) -> tuple[str, dict[str, int]]:
        """Return the id of the MLflow run, made if there is none, and the last step of each of its curves."""
        named = f"tags.`{RUN_TAG}` = '{run.run_id}'"
        found = self._ask("POST", "runs/search", json={"experiment_ids": [experiment], "filter": named})
        if found.get("runs"):
            (self._run_id, data) = (found["runs"][0]["info"]["run_id"], found["runs"][0]["data"])
            self._update(status="RUNNING")
            last = {one["key"]: int(one.get("step", 0)) for one in data.get("metrics", [])}
        else:
            tags = [{"key": RUN_TAG, "value": run.run_id}]
            tags += [{"key": f"label.{name}", "value": value} for name, value in run.job.labels.items()]
            begun = {"start_time": int(time.time() * 1000), "run_name": run.run_id, "tags": tags}
            made = self._ask("POST", "runs/create", json={"experiment_id": experiment, **begun})
            self._run_id, last = made["run"]["info"]["run_id"], {}
        parameters = [
            {"key": name, "value": value[:PARAMETER_LENGTH]} for name, value in parameters_of(run).items() if value
        ]
        # MLflow's parameters cannot be changed: if a job is resubmitted with more epochs, the first values stay.
        for start in range(0, len(parameters) if not last else 0, PARAMETERS_AT_ONCE):
            part = parameters[start : start + PARAMETERS_AT_ONCE]
            self._ask("POST", "runs/log-batch", json={"run_id": self._run_id, "params": part})
        return self._run_id, last

    def _update(self, **fields: Any) -> None:
        self._ask("POST", "runs/update", json={"run_id": self._run_id, **fields})

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        return _document(self._client.request(method, path, **options))


def _document(answer: httpx.Response) -> dict[str, Any]:
    if not answer.is_success:
        raise RuntimeError(f"{answer.request.url} answers {answer.status_code}: {answer.text[:300]}")
    document: dict[str, Any] = answer.json()
    return document


def _credentials() -> dict[str, Any]:
    """Return the credentials from MLflow's environment variables, as options of httpx.Client."""
    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN", ""), os.environ.get("MLFLOW_TRACKING_USERNAME", "")
    if token:
        return {"headers": {"Authorization": f"Bearer {token}"}}
    return {"auth": (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))} if user else {}
