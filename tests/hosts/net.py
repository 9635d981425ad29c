"""Hosts that share nothing but processor and memory: each has network, process, mount, IPC and host name namespaces.

Nothing has a name outside: a host is its first process, which ends with the standard input that this process holds. So
whatever ends the tests, kill -9 included, ends every host, its processes, its links and its mounts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = ("/tmp", "/var/tmp", "/run", "/srv")
"""Where a host has directories of its own; the rest of the file system (programs, this code) it reads."""
START_SECONDS = 60.0
PROGRAMS = ("bash", "ip", "mount", "nsenter", "unshare")

# ``read`` ends when nobody holds the other end of standard input any more, and with the first process of a PID
# namespace the kernel ends all the others. Bash also takes leave of the children of others that end here.
_FIRST_PROCESS = """
set -e
hostname "$NAME"
mount -t tmpfs tmpfs "$FOLDER/keep"
mkdir "$FOLDER/keep/code"
mount --bind "$ROOT" "$FOLDER/keep/code"
cp "$FOLDER/hosts" "$FOLDER/keep/hosts"
exec 3< "$FOLDER/keep"
for own in $PRIVATE; do mkdir -p "$FOLDER$own"; chmod 1777 "$FOLDER$own"; done
exec 4< "$FOLDER"
for own in $PRIVATE; do mount --bind "/proc/self/fd/4$own" "$own"; done
mkdir -p "$ROOT"
mount --bind /proc/self/fd/3/code "$ROOT"
mount --bind /proc/self/fd/3/hosts /etc/hosts
exec 3<&- 4<&-
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
ip link set lo up
echo ready
read -r forever || true
"""


@functools.cache
def why_not() -> str | None:
    """What keeps this machine from having hosts; None if nothing does."""
    if os.geteuid() != 0:
        return "no hosts here: namespaces with networks of their own need root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no hosts here: {', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    probe = "ip link add veth-probe type veth peer name eth-probe && mount -t tmpfs tmpfs /mnt"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", probe],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return None if done.returncode == 0 else f"no hosts here: {done.stderr.strip()}"


class Host:
    """A host of ``net``, at ``address`` under its name, with file systems of its own below ``folder``."""

    def __init__(self, name: str, address: str, folder: Path, hosts_file: str):
        self.name, self.address, self.folder = name, address, folder
        (folder / "keep").mkdir(parents=True)
        (folder / "hosts").write_text(hosts_file)
        environment = {
            "PATH": os.environ["PATH"], "NAME": name, "FOLDER": str(folder), "ROOT": str(ROOT),
            "PRIVATE": " ".join(PRIVATE),
        }  # fmt: skip
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
             "bash", "-c", _FIRST_PROCESS],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} does not start: {self._holder.stderr.read()}")
        (self.pid,) = (child.pid for child in psutil.Process(self._holder.pid).children())
        self.environment: dict[str, str] = {}
        self.started: list[subprocess.Popen[bytes]] = []

    @property
    def alive(self) -> bool:
        return self._holder.poll() is None

    def command(self, *command: str, **environment: str) -> list[str]:
        """``command`` as this machine calls it to have it run on the host."""
        given = {"PATH": os.environ["PATH"], "HOME": "/srv", "LANG": "C.UTF-8", **self.environment, **environment}
        variables = [f"{name}={value}" for name, value in given.items()]
        return [
            "nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid", "--wdns=/srv",
            "env", "-i", *variables, *command,
        ]  # fmt: skip

    def run(self, *command: str, check: bool = True, seconds: float = 300.0, **environment: str) -> Any:
        """Runs a command to its end: its CompletedProcess, with text."""
        done = subprocess.run(
            self.command(*command, **environment), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (self.name, shlex.join(command), done.stdout[-2000:], done.stderr)
        return done

    def start(self, *command: str, log: str, **environment: str) -> subprocess.Popen[bytes]:
        """Starts a command that goes on, which writes what it says to ``/srv/LOG.log``."""
        with open(self.path(f"/srv/{log}.log"), "ab") as said:
            process = subprocess.Popen(
                self.command(*command, **environment), stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        self.started.append(process)
        return process

    def said(self) -> dict[str, str]:
        """The ends of the logs of what was started, and how it ended, for who looks why something did not come."""
        logs = {log.name: log.read_text("utf-8", "replace")[-3000:] for log in self.path("/srv").glob("*.log")}
        return {**logs, "exit codes": str([process.poll() for process in self.started])}

    def path(self, own: str) -> Path:
        """Where a file below one of PRIVATE is found from outside, while the host runs and afterwards."""
        assert own.startswith(PRIVATE), own
        return self.folder / own.removeprefix("/")

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes of the host, seen from outside, whose command has all the words."""
        found = []
        for process in psutil.Process(self.pid).children(recursive=True) + self._entered():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if process.name() != "nsenter" and all(word in line for word in words):
                    found.append(process)
        return found

    def _entered(self) -> list[psutil.Process]:
        """Those that were entered by ``nsenter`` are not children of the host's first process."""
        found: list[psutil.Process] = []
        for process in self.started:
            with contextlib.suppress(psutil.Error):
                found += psutil.Process(process.pid).children(recursive=True)
        return found

    def stop(self) -> None:
        """Ends all that the host runs, at once."""
        if self.alive:
            psutil.Process(self.pid).kill()
        self._holder.wait(60)
        for process in self.started:
            process.wait(60)
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()


class Net:
    """A switch, which is a host too, and hosts that it connects."""

    def __init__(self, folder: Path, names: tuple[str, ...]):
        self._folder = folder
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
        self._hosts_file = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in addresses.items()
        )
        self._addresses = addresses
        self.hosts: dict[str, Host] = {}
        self.switch = Host("switch", "", folder / "switch", self._hosts_file)
        try:
            self._ip("link", "add", "name", "bridge", "type", "bridge")
            self._ip("link", "set", "dev", "bridge", "up")
            for name in names:
                self.boot(name)
        except BaseException:
            self.stop()
            raise

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def boot(self, name: str) -> Host:
        """Starts a host, or another one under the name and address of one that has vanished, with empty disks."""
        number = sum(1 for folder in self._folder.iterdir() if folder.name.startswith(f"{name}."))
        host = Host(name, self._addresses[name], self._folder / f"{name}.{number}", self._hosts_file)
        self.hosts[name] = host
        if number:
            self._unplug(name)
        self._ip("link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._ip("link", "set", "dev", name, "up", "master", "bridge")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "dev", "eth0", "up")
        return host

    def cut(self, name: str) -> None:
        """From now on nothing that the host sends arrives, and it hears nothing; its link stays up."""
        self._ip("link", "set", "dev", name, "nomaster")

    def heal(self, name: str) -> None:
        self._ip("link", "set", "dev", name, "master", "bridge")

    def vanish(self, name: str) -> None:
        """The host loses its power: no process of it says a last word, and its connections stay as they were."""
        self.cut(name)
        self.hosts[name].stop()

    def limit(self, rate: str) -> None:
        """Lets each host hear no more than ``rate`` (as of ``tc``: ``1gbit``)."""
        for name in self.hosts:
            self.switch.run("tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate", rate, "burst", "256kb",
                            "latency", "50ms")  # fmt: skip

    def stop(self) -> None:
        for host in (*self.hosts.values(), self.switch):
            host.stop()

    def _unplug(self, name: str) -> None:
        """The kernel takes a host's link away some time after its end: not to be waited for."""
        self.switch.run("ip", "link", "delete", "dev", name, check=False)

    def _ip(self, *arguments: str) -> None:
        """On the switch, but with this machine's numbers of processes."""
        enter = ["nsenter", f"--target={self.switch.pid}", "--net"]
        done = subprocess.run([*enter, "ip", *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (arguments, done.stderr)


@contextlib.contextmanager
def network(folder: Path, *names: str) -> Iterator[Net]:
    """Hosts of these names; skips where this machine cannot have any."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    net = Net(folder, names)
    try:
        yield net
    finally:
        net.stop()


def until(look: Any, what: Any = lambda: "", seconds: float = 300.0) -> Any:
    """What ``look`` returns, once that is something."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"nothing came within {seconds} s: {what()}"
        time.sleep(0.2)
    return value
