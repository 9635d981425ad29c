"""Evenkeel as an operator has it who shares no directory: S3, PostgreSQL and Redis on hosts of their own, Ray on
``node1`` to ``node3``, the service on ``service``. All of it is asked by commands that run on the hosts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from service import DEFAULT_PORT
from tests.contracts.store_servers import CREDENTIALS
from tests.hosts.net import ROOT, Host, Net, network, until
from tests.support.ray_cluster import PATIENCE

PYTHON = sys.executable
EVENKEEL = str(Path(sys.executable).with_name("evenkeel"))
NODES = HEAD, *_ = ("node1", "node2", "node3")
S3, POSTGRES, REDIS, RAY, DASHBOARD, SERVICE = 9000, 5432, 6379, 6380, 8265, DEFAULT_PORT
ONLY_ASKED = pytest.mark.skipif(
    "EVENKEEL_TEST_HOSTS" not in os.environ, reason="no hosts here that train: make test-hosts, minutes"
)
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"
MAKE_ROWS = """
import sys
import numpy as np, pyarrow as pa, pyarrow.fs as fs, pyarrow.parquet as pq
count = int(sys.argv[1])
rng = np.random.default_rng(0)
user, item = rng.integers(0, 60, count), (rng.random(count) ** 2 * 120).astype(np.int64)
click = (rng.random(count) < np.array([0.05, 0.4, 0.95])[item % 3]).astype(np.int64)
s3 = fs.S3FileSystem(endpoint_override="s3:9000", scheme="http", allow_bucket_creation=True)
s3.create_dir("bucket")
with s3.open_output_stream("bucket/data/clicks.parquet") as file:
    pq.write_table(pa.table({"user": user, "item": item, "click": click}), file, row_group_size=count // 4)
"""
GUIDE = ROOT / "docs" / "guides" / "several_hosts.md"


def of_guide(name: str) -> str:
    """A spec as the guide has it."""
    (text,) = re.findall(rf"```yaml\n# {re.escape(name)}\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    return str(text)


class Stack:
    """What runs on the hosts of ``net``."""

    def __init__(self, net: Net):
        self.net = net
        self.token = secrets.token_hex(32)
        self.access = {**CREDENTIALS, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://s3:{S3}"}
        for host in net.hosts.values():
            host.environment = {"PYTHONPATH": str(ROOT), **self.access}

    @property
    def service(self) -> Host:
        return self.net["service"]

    @property
    def nodes(self) -> list[str]:
        return [name for name in NODES if name in self.net.hosts]

    # --- starting: each returns at once, ``await_`` and what follows wait for it ----------------------------------

    def start_s3(self) -> None:
        self.net["s3"].start(PYTHON, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(S3), log="s3")

    def start_redis(self) -> None:
        self.net["redis"].start(
            "redis-server", "--bind", "0.0.0.0", "--port", str(REDIS), "--protected-mode", "no", "--save", "",
            log="redis",
        )  # fmt: skip

    def start_postgres(self) -> None:
        programs = postgres_programs()
        script = f"""
        mkdir /srv/postgres && chown postgres /srv/postgres && cd /srv/postgres
        as="setpriv --reuid=postgres --regid=postgres --clear-groups"
        $as {programs}/initdb -D data -U postgres -A trust --no-sync
        echo "host all all 10.77.0.0/24 trust" >> data/pg_hba.conf
        exec $as {programs}/postgres -D data -c listen_addresses='*' -c unix_socket_directories='' -c fsync=off
        """
        self.net["postgres"].start("bash", "-ec", script, log="postgres")

    def start_node(self, name: str, cpus: int) -> None:
        """``ray start`` on a host; ``node1`` is the head, which the others join, and leaves drivers to them."""
        host = self.net[name]
        host.environment = {
            **self.access, **PATIENCE, "PATH": f"{Path(PYTHON).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        where = (
            ["--head", f"--port={RAY}", "--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD}"]
            if name == HEAD
            else [f"--address={HEAD}:{RAY}", '--resources={"driver": 1}']
        )
        host.start(
            PYTHON, "-m", "ray.scripts.scripts", "start", "--block", *where, f"--node-ip-address={host.address}",
            f"--num-cpus={cpus}", "--object-store-memory=100000000", "--disable-usage-stats", log="ray",
        )  # fmt: skip

    def await_node(self, name: str) -> None:
        """Until Ray has started there."""
        host = self.net[name]

        def started() -> bool:
            assert all(process.poll() is None for process in host.started), host.said()
            return "Ray runtime started" in host.path("/srv/ray.log").read_text()

        until(started, host.said, 240)

    def start_service(self, **more: str) -> None:
        """``evenkeel serve``, with nothing of its own on disk but its home."""
        self.service.environment |= {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token,
            "EVENKEEL_HOME": "/srv/evenkeel", "EVENKEEL_DATA_ROOTS": "s3://bucket/data",
            "EVENKEEL_DATABASE_URL": f"postgresql+asyncpg://postgres@postgres:{POSTGRES}/postgres",
            "EVENKEEL_STORE_URL": f"redis://redis:{REDIS}/0",
            "EVENKEEL_EXECUTOR": "ray_jobs", "EVENKEEL_RAY_ADDRESS": f"http://{HEAD}:{DASHBOARD}",
            "EVENKEEL_DRIVER_RESOURCES": "driver=0.01",
            "EVENKEEL_RUN_STORAGE": "s3://bucket/runs", "EVENKEEL_INTERNAL_URL": f"http://service:{SERVICE}",
            **more,
        }  # fmt: skip
        self.service.start(EVENKEEL, "serve", "--host", "0.0.0.0", log="service")

    def await_port(self, name: str, port: int) -> None:
        """Until somebody listens there, as the service's host sees it."""
        host = self.net[name]

        def listens() -> bool:
            assert all(process.poll() is None for process in host.started), host.said()
            return self.service.run(PYTHON, "-c", CONNECT, name, str(port), check=False).returncode == 0

        until(listens, host.said, 120)

    def make_rows(self, rows: int = 3000) -> None:
        """A file of rows in the bucket, which is made too."""
        self.net["s3"].run(PYTHON, "-c", MAKE_ROWS, str(rows))

    def mend(self, cpus: int = 1) -> None:
        """Another host for each node that has vanished, or on which Ray has ended; none is cut off."""
        for name in self.nodes:
            host = self.net[name]
            if host.alive and all(process.poll() is None for process in host.started):
                continue
            host.stop()
            self.net.boot(name)
            self.start_node(name, cpus)
            self.await_node(name)

    # --- what an operator types --------------------------------------------------------------------------------------

    def evenkeel(self, *words: str, check: bool = True) -> Any:
        """A command on the service's host: its CompletedProcess."""
        return self.service.run(EVENKEEL, *words, check=check)

    def told(self, *words: str) -> Any:
        """What a command says as JSON."""
        return json.loads(self.evenkeel(*words, "--json").stdout)

    def submit(self, **fields: Any) -> str:
        """Submits the job of the guide, with ``fields`` in the place of its own."""
        dataset, job = yaml.safe_load_all(of_guide("job.yaml"))
        self.service.path("/srv/job.yaml").write_text(yaml.safe_dump_all([dataset, {**job, **fields}]))
        self.evenkeel("datasets", "add", "/srv/job.yaml", check=False)
        return str(self.told("submit", "/srv/job.yaml")["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.told("job", job_id))

    def log(self, job_id: str) -> str:
        return str(self.evenkeel("logs", job_id, check=False).stdout)

    def wait(self, job_id: str, look: Any, seconds: float = 300.0) -> dict[str, Any]:
        """The job, once ``look`` says of it that it is as expected."""

        def once() -> Any:
            job = self.job(job_id)
            ended = job["state"] in ("succeeded", "failed", "cancelled")
            assert not ended or look(job), (job, self.log(job_id)[-6000:])
            return job if look(job) else None

        return dict(until(once, lambda: (self.job(job_id), self.log(job_id)[-6000:]), seconds))

    def holders(self, job_id: str, part: str) -> list[str]:
        """The nodes that have a directory for ``part`` of a run, ``driver`` or ``ranks``."""
        inside = f"/var/tmp/evenkeel-cache/runs/{job_id}/{part}"
        return [name for name in self.nodes if self.net[name].path(inside).is_dir()]

    def events(self, job_id: str) -> str:
        """What the run's driver, or the last of them, has written, as it lies on its node."""
        inside = f"/var/tmp/evenkeel-cache/runs/{job_id}/driver/events.jsonl"
        files = [self.net[name].path(inside) for name in self.nodes]
        return "".join(file.read_text() for file in files if file.is_file())

    def ended(self, job_id: str, seconds: float = 300.0) -> dict[str, Any]:
        return self.wait(job_id, lambda job: job["state"] in ("succeeded", "failed", "cancelled"), seconds)


def postgres_programs() -> Path:
    """Where PostgreSQL's programs lie; skips where they are not installed."""
    found = [Path(name).resolve().parent for name in [shutil.which("initdb")] if name]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    usable = [folder for folder in found if (folder / "initdb").exists() and (folder / "postgres").exists()]
    if not usable or shutil.which("redis-server") is None:
        pytest.skip("no hosts here: PostgreSQL or Redis is not installed")
    return usable[0]


@contextlib.contextmanager
def stack(folder: Path, nodes: int = 3, cpus: int = 1) -> Iterator[Stack]:
    """Everything started: the service answers, and Ray has ``nodes`` nodes of ``cpus`` each."""
    postgres_programs()
    with network(folder, "s3", "postgres", "redis", "service", *NODES[:nodes]) as net:
        found = Stack(net)
        found.start_node(HEAD, cpus)
        found.start_s3()
        found.start_redis()
        found.start_postgres()
        found.await_node(HEAD)
        for name in NODES[1:nodes]:
            found.start_node(name, cpus)
        for name, port in (("s3", S3), ("redis", REDIS), ("postgres", POSTGRES)):
            found.await_port(name, port)
        found.make_rows()
        found.start_service()
        for name in NODES[1:nodes]:
            found.await_node(name)
        found.await_port("service", SERVICE)
        yield found
