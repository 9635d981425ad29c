"""A Kubernetes API client for the executor: objects are dicts, and an error's type says whether a retry may help.

The module wraps the official Python client (``pip install 'evenkeel[kubernetes]'``), which finds the cluster as kubectl
does: the service account of its pod, else ``KUBECONFIG``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from service.jobs.executors.base import ExecutorUnavailable

if TYPE_CHECKING:
    from kubernetes.client import Configuration

API_PATHS = {
    "rayjobs": "/apis/ray.io/v1",
    "rayclusters": "/apis/ray.io/v1",
    "jobs": "/apis/batch/v1",
    "pods": "/api/v1",
    "secrets": "/api/v1",
}
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 20.0
BROKEN_WATCH_SECONDS = 0.2
CLIENT_REMEDY = "pip install 'evenkeel[kubernetes]'"
ACCESS_REMEDY = "give the service's account the Role of the Helm chart, or correct KUBECONFIG"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class AlreadyExists(Exception):
    """Error for the creation of an object whose name is in use."""


class Refused(Exception):
    """Error for an object that the API server will never accept; the message names the invalid fields."""


def cluster_configuration() -> Configuration:
    """Return the cluster's configuration: this pod's service account, else the current context of KUBECONFIG.

    Raises:
        ValueError: The Kubernetes client is not installed, or neither source names a cluster.
    """
    try:
        from kubernetes import config
        from kubernetes.client import Configuration
    except ImportError as error:
        raise ValueError(f"EVENKEEL_EXECUTOR=kuberay needs the Kubernetes client: {CLIENT_REMEDY} ({error})") from error
    configuration = Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        raise ValueError(
            f"EVENKEEL_EXECUTOR=kuberay finds no cluster: {error}; "
            "run in a pod with a service account, or set KUBECONFIG"
        ) from error
    return configuration


def default_namespace() -> str:
    """Return the namespace of this pod, or ``default`` outside of a cluster."""
    try:
        return NAMESPACE_FILE.read_text("ascii").strip() or "default"
    except OSError:
        return "default"


class KubeApi:
    """Access to the objects of one namespace.

    Each call raises ExecutorUnavailable if the API server does not answer, denies access or is overloaded. After a
    response with Retry-After, no request is sent before that time has passed.
    """

    def __init__(self, configuration: Configuration, namespace: str, answer_seconds: float = ANSWER_SECONDS):
        from kubernetes.client import ApiClient

        configuration.retries = False  # the runner decides on retries
        self.address = configuration.host
        self.namespace = namespace
        self._client = ApiClient(configuration)
        self._timeout = (CONNECT_SECONDS, answer_seconds)
        self._not_before = 0.0

    def close(self) -> None:
        self._client.close()

    def get(self, resource: str, name: str) -> dict[str, Any] | None:
        """Return an object, or None if it does not exist."""
        body = self._ask("GET", self._path(resource, name), absent=True)
        return None if body is None else dict(json.loads(body))

    def list(self, resource: str, selector: str) -> list[dict[str, Any]]:
        """Return the objects that match a label selector."""
        return list(self._listed(resource, selector)["items"])

    def create(self, resource: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object and return it as stored.

        Raises:
            AlreadyExists: An object of this name exists.
            Refused: The object is not valid.
        """
        return dict(json.loads(self._ask("POST", self._path(resource), body=document) or b"{}"))

    def patch(self, resource: str, name: str, changes: Mapping[str, Any]) -> bool:
        """Merge changes into an object; return False if it is gone."""
        return self._ask("PATCH", self._path(resource, name), body=changes, absent=True) is not None

    def delete(
        self, resource: str, name: str, *, propagation: str = "Background", grace_seconds: int | None = None
    ) -> None:
        """Delete an object, if it exists, with (``Background``) or without (``Orphan``) the objects that it owns."""
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        self._ask("DELETE", self._path(resource, name), body=options, absent=True)

    def log(self, pod: str, since: str | None = None) -> bytes:
        """Return a pod's log from the second of ``since`` on, each line preceded by its time; b"" if there is none."""
        query = [("timestamps", "true")] + ([("sinceTime", since)] if since else [])
        try:
            return self._ask("GET", self._path("pods", pod, "/log"), query=query, absent=True) or b""
        except Refused:  # its container has not started
            return b""

    def wait(self, resource: str, selector: str, seconds: float) -> None:
        """Wait until one of the selected objects has changed, ``seconds`` have passed, or the watch breaks off.

        Nothing is returned: the caller must read the objects again.
        """
        version = self._listed(resource, selector)["metadata"]["resourceVersion"]
        query = [
            ("watch", "true"),
            ("labelSelector", selector),
            ("resourceVersion", version),
            ("timeoutSeconds", str(max(1, round(seconds)))),
        ]
        try:
            self._ask("GET", self._path(resource), query=query, first_line=True)
        except (Expired, ExecutorUnavailable):
            time.sleep(min(seconds, BROKEN_WATCH_SECONDS))

    def _listed(self, resource: str, selector: str) -> dict[str, Any]:
        try:
            body = self._ask("GET", self._path(resource), query=[("labelSelector", selector)], absent=True)
        except Expired as error:
            raise ExecutorUnavailable(f"{self._who()} could not finish a list: {error}") from error
        if body is None:
            raise ExecutorUnavailable(
                f"{self._who()} has no {resource}: install the KubeRay operator with its CRDs "
                "(helm install kuberay-operator)"
            )
        return dict(json.loads(body))

    def _path(self, resource: str, name: str = "", rest: str = "") -> str:
        path = f"{API_PATHS[resource]}/namespaces/{quote(self.namespace, safe='')}/{resource}"
        return f"{path}/{quote(name, safe='')}{rest}" if name else path

    def _who(self) -> str:
        return f"the Kubernetes API at {self.address}"

    def _ask(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Mapping[str, Any] | None = None,
        absent: bool = False,
        first_line: bool = False,
    ) -> bytes | None:
        """Send a request and return the body of the response; None for 404 if ``absent`` is True."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        if (left := self._not_before - time.monotonic()) > 0:
            raise ExecutorUnavailable(f"{self._who()} is overloaded and asks to wait for {left:.0f} s")
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            answer = self._client.call_api(
                path,
                method,
                query_params=list(query),
                header_params={"Accept": "*/*", "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=self._timeout,
            )
            try:
                return answer.readline() if first_line else answer.read()
            finally:
                answer.close()
        except ApiException as error:
            if error.status == 404 and absent:
                return None
            raise self._failure(method, path, error) from error
        except (HTTPError, OSError) as error:
            raise ExecutorUnavailable(f"{self._who()} does not answer {method} {path}: {error}") from error

    def _failure(self, method: str, path: str, error: Any) -> Exception:
        status, message = error.status, _message(error.body)
        description = f"{self._who()} answers {method} {path} with {status}: {message}"
        if status == 410:
            return Expired(description)
        if status == 409 and method == "POST":
            return AlreadyExists(description)
        if status in (400, 413, 422):
            return Refused(message)
        if status in (401, 403):
            return ExecutorUnavailable(f"{description}; {ACCESS_REMEDY}")
        wait = str((error.headers or {}).get("Retry-After", ""))
        if wait.isdigit():
            self._not_before = time.monotonic() + float(wait)
        return ExecutorUnavailable(description)


class Expired(Exception):
    """Error for a watch or list whose resource version is too old to continue (410)."""


def _message(body: str | bytes | None) -> str:
    """Return the message of a ``Status``, which names the invalid fields, or the first words of any other body."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        return str(json.loads(text)["message"])[:2000]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:300]
