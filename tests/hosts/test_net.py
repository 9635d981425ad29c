"""The hosts of these tests are what they are said to be: apart, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.hosts.net import network, until

pytestmark = [pytest.mark.hosts, pytest.mark.process]

FILE = f"evenkeel-{uuid.uuid4().hex}"
"""A name that no file of this machine has."""
FETCH = f"import urllib.request as u; print(u.urlopen('http://a:8000/{FILE}', timeout=1).read().decode(), end='')"
LEFT_ALONE = """
import os, sys
from pathlib import Path
from tests.hosts.net import Net
net = Net(Path(sys.argv[1]), ("a",))
net["a"].start("sleep", "1000", log="log")
print(net["a"].pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_hosts_have_files_processes_and_addresses_of_their_own(tmp_path: Path) -> None:
    with network(tmp_path, "a", "b") as net:
        a, b = net["a"], net["b"]
        assert a.run("hostname").stdout == "a\n"
        for own in ("/tmp", "/var/tmp", "/run", "/srv", "/dev/shm"):
            a.run("sh", "-c", f"echo here > {own}/{FILE}")
            assert b.run("test", "-e", f"{own}/{FILE}", check=False).returncode == 1
            assert not Path(own, FILE).exists()
        assert a.path(f"/srv/{FILE}").read_text() == "here\n"
        a.run("sh", "-c", "echo here > where-commands-run")
        assert a.path("/srv/where-commands-run").exists()
        serving = a.start(sys.executable, "-m", "http.server", "8000", log="http")
        fetch = [sys.executable, "-c", FETCH]
        until(lambda: b.run(*fetch, check=False).stdout == "here\n")
        assert b.processes() == []
        assert len(a.processes("http.server")) == 1
        net.cut("a")
        assert b.run(*fetch, check=False).returncode != 0
        net.heal("a")
        until(lambda: b.run(*fetch, check=False).stdout == "here\n")
        net.vanish("a")
        assert not a.alive
        assert serving.poll() is not None
        assert b.run(*fetch, check=False).returncode != 0
        assert net.boot("a").run("ls", "/srv").stdout == ""
    assert not b.alive


def named_namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def test_nothing_is_left_of_hosts_whose_tests_are_killed(tmp_path: Path) -> None:
    before = named_namespaces()  # of others, such as podman's
    with network(tmp_path / "probe", "a"):
        pass
    done = subprocess.run(
        [sys.executable, "-c", LEFT_ALONE, str(tmp_path / "hosts")], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    until(lambda: not psutil.pid_exists(int(done.stdout)), seconds=60)
    assert set(named_namespaces()) <= set(before)
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if os.fspath(tmp_path) in line]
