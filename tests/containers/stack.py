"""docker-compose.yml as an operator runs it, one service after the other as its conditions say.

podman 4.3 tells podman-compose of no health: this plays the conditions of ``depends_on`` and runs the health checks.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.containers.engine import ROOT, Engine
from tests.support.free_ports import free_ports
from tests.support.ray_cluster import PATIENCE

SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
OURS = ("scheduler", "api-1", "api-2", "vectors")
HANG_SECONDS = 900.0
"""Nothing here takes so long, unless it hangs."""


class Stack:
    """Containers of the compose file under a project name of their own."""

    def __init__(self, engine: Engine, folder: Path, tag: str, **settings: str):
        self.engine, self.folder = engine, folder
        self.project = f"evenkeel-test-{os.getpid()}"
        port, grafana = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        (folder / "data").mkdir()
        self.settings = {
            "EVENKEEL_DATA": str(folder / "data"), "EVENKEEL_TAG": tag, "EVENKEEL_WORKER_CPUS": "2",
            "EVENKEEL_PORT": str(port), "EVENKEEL_GRAFANA_PORT": str(grafana), **settings,
        }  # fmt: skip
        self.key = ""
        self._volumes: set[str] = set()

    def compose(self, *words: str, check: bool = True) -> str:
        """``docker compose`` with this project and the settings of ``.env``."""
        env_file = self.folder / "env"
        env_file.write_text("".join(f"{name}={value}\n" for name, value in self.settings.items()))
        return self.engine.run(
            "podman-compose", "--project-name", self.project, "--env-file", str(env_file),
            "--file", str(self._file()), *words, check=check,
        )  # fmt: skip

    def _file(self) -> Path:
        """The compose file as podman-compose is given it.

        Without dependencies: podman-compose makes anew, with a service, all that depend on it, as docker does not. And
        with a Ray that waits longer, on a machine that has other work.
        """
        given = yaml.safe_load((ROOT / "docker-compose.yml").read_text().replace("- ./", f"- {ROOT}/"))
        for name, service in given["services"].items():
            service.pop("depends_on", None)
            service.pop("build", None)
            if name in ("ray-head", "ray-worker"):
                service["environment"].update(PATIENCE)
        file = self.folder / "compose.yml"
        file.write_text(yaml.safe_dump(given))
        return file

    def up(self, *names: str, **scale: int) -> None:
        """Starts services, or makes them anew where their settings have changed, and waits as ``depends_on`` would."""
        for name in names:
            scaled = [word for one, count in scale.items() for word in ("--scale", f"{one.replace('_', '-')}={count}")]
            self.compose("up", "-d", "--no-deps", "--no-build", *scaled, name)
            self.await_(name)

    def await_(self, name: str) -> None:
        """Until the containers of a service are healthy, or have ended well where they are to end."""
        once = SERVICES[name].get("restart") == "no"
        until(lambda: self.ended(name) if once else self.healthy(name), lambda: self.said(name))
        for container in self.containers(name):
            self._volumes |= {one["Name"] for one in self.inspect(container)["Mounts"] if one["Type"] == "volume"}

    def containers(self, name: str) -> list[str]:
        filters = (f"label=io.podman.compose.project={self.project}", f"label=com.docker.compose.service={name}")
        words = [word for one in filters for word in ("--filter", one)]
        return sorted(self.engine.run("podman", "ps", "--all", *words, "--format", "{{.Names}}").split())

    def healthy(self, name: str) -> bool:
        """By the health check that compose or the image has for the service."""
        containers = self.containers(name)
        return bool(containers) and all(self.engine.succeeds("podman", "healthcheck", "run", one) for one in containers)

    def ended(self, name: str) -> bool:
        (container,) = self.containers(name)
        state = self.inspect(container)["State"]
        assert state["ExitCode"] == 0, self.said(name)
        return bool(state["Status"] == "exited")

    def inspect(self, container: str) -> Any:
        return json.loads(self.engine.run("podman", "inspect", container))[0]

    def said(self, name: str) -> dict[str, str]:
        """The ends of the logs of a service's containers, for who looks why something did not come."""
        return {one: self._log(one)[-3000:] for one in self.containers(name)}

    def _log(self, container: str) -> str:
        return self.engine.run("sh", "-c", f"podman logs --tail 60 {container} 2>&1", check=False)

    def down(self) -> None:
        """Ends and removes all of it, its volumes too, those without a name and of containers made anew included."""
        for name in reversed(SERVICES):
            for container in self.containers(name):
                self.engine.run("podman", "rm", "--force", "--volumes", "--time", "5", container, check=False)
        self.compose("down", "--volumes", check=False)
        self.engine.run("podman", "volume", "rm", "--force", *sorted(self._volumes), check=False)

    # --- what an operator types ------------------------------------------------------------------------------------

    def evenkeel(self, *words: str, check: bool = True) -> str:
        return self.compose("exec", "-T", "api-1", "evenkeel", *words, check=check)

    def told(self, *words: str) -> Any:
        return json.loads(self.evenkeel(*words, "--json"))

    def job(self, job_id: str) -> Any:
        return json.loads(self.get(f"/v1/jobs/{job_id}"))

    def wait(self, job_id: str, look: Any) -> Any:
        """The job, once ``look`` says of it that it is as expected."""

        def once() -> Any:
            job = self.job(job_id)
            ended = job["state"] in ("succeeded", "failed", "cancelled")
            assert not ended or look(job), (job, self.evenkeel("logs", job_id, check=False)[-6000:])
            return job if look(job) else None

        return until(once, lambda: self.job(job_id))

    def published(self, job_id: str) -> Any:
        return self.wait(
            job_id, lambda job: job["state"] == "succeeded" and job["publication"]["status"] == "published"
        )

    def get(self, path: str, body: Any = None) -> bytes:
        """An answer through the port that the proxy publishes."""
        request = urllib.request.Request(
            self.url + path, data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def vectors(self, *ids: str) -> Any:
        return json.loads(self.get("/v1/collections/items/vectors", {"ids": list(ids)}))


def in_order() -> list[str]:
    """Services without a profile, each after those that it depends on."""
    found: list[str] = []

    def visit(name: str) -> None:
        for needed in SERVICES[name].get("depends_on", {}):
            visit(needed)
        if name not in found and "profiles" not in SERVICES[name]:
            found.append(name)

    for name in SERVICES:
        visit(name)
    return found


def until(look: Any, what: Any = lambda: "") -> Any:
    """What ``look`` returns, once that is something; a connection that is refused is nothing."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        try:
            if value := look():
                return value
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < deadline, f"nothing came within {HANG_SECONDS} s: {what()}"
        time.sleep(0.5)
