"""KubeRay and the kubelet, as far as a RayJob needs them: its cluster, its submitter, and its driver, a real process.

The states, and what is made and deleted in which of them, are those of KubeRay's controller of RayJobs (1.5): a RayJob
gets a finalizer, a RayCluster with its labels, a submitter Job of its name; one that is deleted has its driver asked to
stop (SIGTERM, then SIGKILL after RAY_JOB_STOP_WAIT_TIME_S) and is let go at once; one that is suspended loses its pods.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

from tests.kube.api_server import ApiServer, Failure, Object

FINALIZER = "ray.io/rayjob-finalizer"


class Operator:
    """Acts on the objects of a server from a thread of its own, until it is closed.

    Attributes:
        paused: Nothing is done while it is set: KubeRay is away.
        admit: Clusters become ready; without it their pods stay Pending, as where there is no place for them.
        refusal: What a RayJob is refused for, as KubeRay does for what the schemas allow and it does not.
    """

    def __init__(self, api: ApiServer):
        self._api = api
        self.paused, self.admit, self.refusal = False, True, ""
        self._drivers: dict[str, subprocess.Popen[bytes]] = {}
        self._kill_at: dict[str, float] = {}
        self._readers: list[threading.Thread] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        for name in list(self._drivers):
            self._kill(name, signal.SIGKILL)
        for driver in self._drivers.values():
            driver.wait()
        for reader in self._readers:
            reader.join()

    def _run(self) -> None:
        while not self._closed:
            if not self.paused:
                for job in self._api.list("rayjobs"):
                    with suppress(Failure):  # deleted under our hands
                        self._reconcile(job)
            self._kubelet()
            with self._api.changed:
                self._api.changed.wait(0.02)

    def _reconcile(self, job: Object) -> None:
        name, metadata = job["metadata"]["name"], job["metadata"]
        state = job.get("status", {}).get("jobDeploymentStatus", "")
        if "deletionTimestamp" in metadata:
            self._stop(job)
            self._api.change("rayjobs", name, {"metadata": {"finalizers": None}})
        elif self.refusal and not state:
            self._status(name, "ValidationFailed", reason="ValidationFailed", message=self.refusal)
        elif not state:
            self._api.change("rayjobs", name, {"metadata": {"finalizers": [FINALIZER]}})
            self._status(name, "Initializing", rayClusterName=f"{name}-abcde")
        elif state in ("Initializing", "Running") and job["spec"].get("suspend"):
            self._status(name, "Suspending")
        elif state == "Suspending":
            for kind, item in (("jobs", name), ("rayclusters", f"{name}-abcde")):
                with suppress(Failure):
                    self._api.delete(kind, item)
            self._status(name, "Suspended", jobStatus="")
        elif state == "Suspended" and not job["spec"].get("suspend"):
            self._status(name, "")
        elif state == "Initializing":
            self._make(job)
        elif state == "Running":
            self._look(name)

    def _status(self, name: str, state: str, **more: str) -> None:
        self._api.change("rayjobs", name, {"status": {"jobDeploymentStatus": state, **more}})

    def _make(self, job: Object) -> None:
        """Make the cluster of a RayJob and its pods, then the pod that submits it."""
        name, spec = job["metadata"]["name"], job["spec"]
        cluster, cluster_spec = f"{name}-abcde", spec["rayClusterSpec"]
        if self._api.get("rayclusters", cluster) is None:
            made = self._object("ray.io/v1", "RayCluster", cluster, job, cluster_spec, job["metadata"]["labels"])
            owner = self._api.create("rayclusters", made)
            self._pod(f"{cluster}-head", owner, cluster_spec["headGroupSpec"]["template"])
            for group in cluster_spec["workerGroupSpecs"]:
                for number in range(group["replicas"]):
                    self._pod(f"{cluster}-worker-{number}", owner, group["template"])
        if not self.admit:
            return
        template = {**spec["submitterPodTemplate"]}
        template["metadata"] = {"labels": template["metadata"]["labels"]}
        batch = {"template": template, "backoffLimit": spec["submitterConfig"]["backoffLimit"]}
        owner = self._api.create("jobs", self._object("batch/v1", "Job", name, job, batch, {}))
        self._pod(f"{name}-xyz", owner, template)
        for pod in self._api.list("pods"):
            if pod["metadata"]["name"].startswith(name):
                self._api.change("pods", pod["metadata"]["name"], {"status": {"phase": "Running"}})
        self._drivers[name] = self._start(name, job)
        self._status(name, "Running", jobStatus="RUNNING", jobId=spec["jobId"])

    def _start(self, name: str, job: Object) -> subprocess.Popen[bytes]:
        """Start the driver with the environment of the head's container, as a shell of the head's does."""
        container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        environment = dict(os.environ)
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("secretKeyRef")
            secret = None if source is None else self._api.get("secrets", source["name"])
            environment[variable["name"]] = variable["value"] if source is None else secret["data"][source["key"]]  # type: ignore[index]
        driver = subprocess.Popen(
            job["spec"]["entrypoint"],
            shell=True,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(f"{name}-xyz", driver), daemon=True)
        reader.start()
        self._readers.append(reader)
        return driver

    def _read(self, pod: str, driver: subprocess.Popen[bytes]) -> None:
        assert driver.stdout is not None
        with driver.stdout:
            for line in driver.stdout:
                self._api.say(pod, line)

    def _pod(self, name: str, owner: Object, template: Object) -> None:
        made = self._object("v1", "Pod", name, owner, template["spec"], template["metadata"]["labels"])
        self._api.create("pods", {**made, "status": {"phase": "Pending"}})

    def _object(
        self, version: str, kind: str, name: str, owner: Object, spec: Object, labels: dict[str, str]
    ) -> Object:
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        metadata = {"name": name, "labels": labels, "ownerReferences": [reference]}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _look(self, name: str) -> None:
        driver, submitter = self._drivers.get(name), self._api.get("pods", f"{name}-xyz")
        if driver is None or submitter is None or submitter["status"]["phase"] == "Running":
            return
        if driver.returncode == 0:
            self._status(name, "Complete", jobStatus="SUCCEEDED")
        else:
            message = f"Job entrypoint command failed with exit code {driver.returncode}"
            self._status(name, "Failed", jobStatus="FAILED", reason="AppFailed", message=message)

    def _stop(self, job: Object) -> None:
        name = job["metadata"]["name"]
        if name in self._drivers and name not in self._kill_at:
            container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
            (wait,) = (one["value"] for one in container["env"] if one["name"] == "RAY_JOB_STOP_WAIT_TIME_S")
            self._kill_at[name] = time.monotonic() + float(wait)
            self._kill(name, signal.SIGTERM)

    def _kubelet(self) -> None:
        """Kill a driver whose time is over, or whose pod is gone; a submitter ends with its driver."""
        for name, driver in list(self._drivers.items()):
            head = self._api.get("pods", f"{name}-abcde-head")
            if head is None or time.monotonic() > self._kill_at.get(name, float("inf")):
                self._kill(name, signal.SIGKILL)
            if driver.poll() is None or any(reader.is_alive() for reader in self._readers):
                continue
            submitter = self._api.get("pods", f"{name}-xyz")
            if submitter is not None and submitter["status"]["phase"] == "Running":
                phase = "Failed" if driver.returncode else "Succeeded"
                with suppress(Failure):
                    self._api.change("pods", f"{name}-xyz", {"status": {"phase": phase}})
            if head is None:
                self._drivers.pop(name)
                self._kill_at.pop(name, None)

    def _kill(self, name: str, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._drivers[name].pid, number)
