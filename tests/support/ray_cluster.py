"""A real Ray cluster of several node processes on free ports of this host, in token mode, ended by pid.

Each node is as a host of its own: it has a cache that no other one has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

from tests.contracts.store_servers import CREDENTIALS
from tests.support.free_ports import free_port, free_ports

BIN = Path(sys.executable).parent
MARKER = "EVENKEEL_TEST_CLUSTER"
START_SECONDS = 240.0
ATTEMPTS = 8
# Ray ends a node whose agents have not registered within half a minute, which is short on a machine with other work.
PATIENCE = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_server_port_wait_time_s": "180",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180",
    # Beside the suite's other worker, workers of Ray's own niceness (15) hardly come to their first step.
    "RAY_worker_niceness": "0",
}


class Cluster:
    """``ray start`` as a deployment calls it: an empty home, one secret on both sides (``token=None``: as a fresh
    machine without any, which is open to all). What runs on it finds this interpreter as ``python``."""

    def __init__(self, token: str | None = "generated"):
        self.folder = Path(tempfile.mkdtemp(prefix="ek-cluster-", dir="/tmp"))
        (self.folder / "home").mkdir()
        self.token = secrets.token_hex(32) if token == "generated" else token
        self.port, self.dashboard_port, self.s3_port = free_ports(3)
        self._num_nodes = 0
        self._starters: list[subprocess.Popen[bytes]] = []
        self._head: subprocess.Popen[bytes] | None = None
        self._head_cpus = 0
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "EVENKEEL_"))}
        self.environment = {
            **kept,
            "HOME": str(self.folder / "home"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Workers without a run's environment, of which runs and their drivers can use none.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            # What a node waits for a head that does not answer, before it ends: a minute otherwise.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
            # Where a test may start an S3 server.
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.s3_port}",
            **PATIENCE,
            MARKER: str(self.folder),
            **({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token} if self.token else {}),
        }

    @property
    def caches(self) -> list[Path]:
        """The cache of each host that was started, the head's first."""
        return [self.folder / f"host-{number}" for number in range(self._num_nodes)]

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def start_head(self, num_cpus: int = 0) -> None:
        """On the same ports each time: processes that knew the old head find the new one."""
        self._head, self._head_cpus = None, num_cpus
        self._end_orphans()
        self._start(
            "--head", f"--port={self.port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard_port}",
            "--include-dashboard=true", f"--temp-dir={self.folder}/ray", f"--num-cpus={num_cpus}",
        )  # fmt: skip
        self._head = self._starters[-1]

    def start_node(self, num_cpus: int = 2) -> subprocess.Popen[bytes]:
        """A head that has ended meanwhile is started again before."""
        self._start(f"--address=127.0.0.1:{self.port}", f"--num-cpus={num_cpus}")
        return self._starters[-1]

    def _start(self, *options: str) -> None:
        """Ray gives each of its processes seconds to come up, and on a busy machine gives up: then once more."""
        for attempt in range(ATTEMPTS):
            if self._has_lost_its_head():
                self._end_processes()
                self.start_head(self._head_cpus)
            log = self.folder / f"start-{uuid.uuid4().hex[:8]}.log"
            starter = self._try_to_start(log, *options)
            if starter is not None:
                self._starters.append(starter)
                return
            assert attempt + 1 < ATTEMPTS, log.read_text()

    def _try_to_start(self, log: Path, *options: str) -> subprocess.Popen[bytes] | None:
        before = {process.pid for process in self.processes()}
        command = [
            str(BIN / "ray"), "start", "--block", *options, f"--dashboard-agent-listen-port={free_port()}",
            "--object-store-memory=100000000", "--node-ip-address=127.0.0.1", "--disable-usage-stats",
            "--include-log-monitor=false",  # it reads logs for drivers that want them: ours do not
        ]  # fmt: skip
        environment = self.environment | {"EVENKEEL_CACHE": str(self.folder / f"host-{self._num_nodes}")}
        with open(log, "wb") as file:
            starter = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            if starter.poll() is not None or self._has_lost_its_head():
                for process in self.processes():
                    if process.pid not in before:
                        with contextlib.suppress(psutil.Error):
                            process.kill()
                starter.wait(300)
                return None
            time.sleep(0.1)
        self._num_nodes += 1
        return starter

    def _has_lost_its_head(self) -> bool:
        return self._head is not None and self._head.poll() is not None

    def kill_head(self) -> None:
        """kill -9 of all that the head's machine ran for Ray, at once; what jobs started is left to die by itself."""
        assert self._head is not None
        self.kill_node(self._head)
        self._head = None

    def kill_node(self, starter: subprocess.Popen[bytes]) -> None:
        """kill -9 of all that a machine ran for Ray, at once."""
        node = psutil.Process(starter.pid)
        for process in [node, *node.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        starter.wait(300)

    def drain_node(self, starter: subprocess.Popen[bytes], seconds: int) -> None:
        """Say to Ray that a machine will be taken away, as a cloud's notice does."""
        raylet = next(one for one in psutil.Process(starter.pid).children(recursive=True) if one.name() == "raylet")
        node_id = next(word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--node_id="))
        subprocess.run(
            [
                str(BIN / "ray"), "drain-node", f"--address=127.0.0.1:{self.port}", f"--node-id={node_id}",
                "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=notice",
                f"--deadline-remaining-seconds={seconds}",
            ],
            env=self.environment, check=True, capture_output=True, timeout=300,
        )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """All that descends from the cluster, jobs included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARKER) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _end_orphans(self) -> None:
        """Ray's agents of a node that has ended write their names over the marker, and look for their head for another
        minute, with half a processor."""
        for process in self._of_sessions([one for one in self._starters if one.poll() is not None]):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._starters = [one for one in self._starters if one.poll() is None]

    def _of_sessions(self, starters: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
        """What Ray runs stays in the session that its starter leads. Where that has ended and there is a process of its
        number, the number is another's by now."""
        pids = {one.pid for one in starters if one.poll() is None or not psutil.pid_exists(one.pid)}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) in pids and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _end_processes(self) -> None:
        deadline = time.monotonic() + 300
        while left := {*self.processes(), *self._of_sessions(self._starters)}:
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)

    def stop(self) -> None:
        self._end_processes()
        for starter in self._starters:
            starter.wait(300)
        shutil.rmtree(self.folder, ignore_errors=True)


_shared: list[Cluster] = []


def shared(num_nodes: int = 1, *, or_more: bool = False) -> Cluster:
    """A head that trains nothing and ``num_nodes`` nodes with two CPUs, for all tests that leave it as it is. One that
    has more nodes, as others asked for them, is another one's unless ``or_more``."""
    if _shared and len(_shared[0].caches) > 1 + num_nodes and not or_more:
        end_shared()
    if not _shared:
        cluster = Cluster()
        try:
            cluster.start_head()
        except BaseException:
            cluster.stop()
            raise
        _shared.append(cluster)
    while len(_shared[0].caches) < 1 + num_nodes:
        _shared[0].start_node(num_cpus=2)
    return _shared[0]


def end_shared() -> None:
    """Its processes are at work while nothing runs on it: it is to end before tests that do not need it."""
    while _shared:
        _shared.pop().stop()
