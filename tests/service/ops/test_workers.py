"""Several processes behind one socket: one copy of the vectors between them, replaced when they die, ended together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from embeddings.store import open_store
from service.app import listen
from service.client import Client
from tests.service import published, serving
from tests.service.serving import Served

pytestmark = pytest.mark.process


def workers_of(served: Served) -> list[psutil.Process]:
    return psutil.Process(served.process.pid).children()


def born(served: Served, count: int) -> list[psutil.Process]:
    """The workers, once there are ``count``: the address is said before."""
    deadline = time.monotonic() + 300
    while len(workers_of(served)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return workers_of(served)


def pss_bytes(process: psutil.Process) -> int:
    """The process's share of memory: a page that n processes map counts 1/n in each."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def mapped_rows(process: psutil.Process) -> int:
    """Bytes of the version's file that are resident in the process."""
    total, counting = 0, False
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            counting = line.endswith("items.arrow")
        elif counting and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def read_everything(served: Served, num_items: int, file_bytes: int) -> list[psutil.Process]:
    """Fetches until every process that serves has all rows mapped; these processes."""
    ids = np.arange(1, num_items + 1, 8)  # a row of 512 bytes in every page of 4096
    deadline = time.monotonic() + 300
    while True:
        # A connection of its own for each round, so that no worker is left out for long.
        with Client(served.url, served.key, timeout_seconds=300) as client:
            for part in np.array_split(ids, -(-len(ids) // 10_000)):
                client.vectors(view="raw", ids=part, dtype="float16")
        serving_now = workers_of(served)
        if all(mapped_rows(process) > 0.95 * file_bytes for process in serving_now):
            return serving_now
        assert time.monotonic() < deadline, [mapped_rows(process) for process in serving_now]


@pytest.mark.slow
def test_a_second_worker_adds_less_than_a_tenth_of_the_file(tmp_path: Path) -> None:
    num_items, dim = 1_000_000, 128
    home = tmp_path / "home"
    collection = open_store(home / "store").collection("items")
    rows = np.resize(published.directions(1000, 0, dim), (num_items, dim))
    collection.publish(published.write(collection, np.arange(1, num_items + 1), rows), None)
    collection.create_view("raw", kind="identity")
    del rows
    (file,) = home.rglob("items.arrow")
    file_bytes = file.stat().st_size
    used = []
    for num_workers in (1, 2):
        with serving.serving(tmp_path, "vectors", "--workers", str(num_workers), real=True) as served:
            found = read_everything(served, num_items, file_bytes)
            assert len(found) == num_workers
            used.append(sum(map(pss_bytes, [psutil.Process(served.process.pid), *found])))
    one, two = used
    assert one > file_bytes
    assert two - one < 0.1 * file_bytes, f"{(two - one) / file_bytes:.3f} of the file"


def test_a_worker_that_dies_is_replaced_and_all_end_together(tmp_path: Path) -> None:
    with serving.serving(tmp_path, "vectors", "--workers", "2") as served:
        published.publish(served.settings)
        first = born(served, 2)
        first[0].kill()
        deadline = time.monotonic() + 300
        while len(set(workers_of(served)) - {first[0]}) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with Client(served.url, served.key, timeout_seconds=300) as client:
            assert client.vectors("items", [10]).found.all()
        now = workers_of(served)
    assert served.process.returncode == 0
    assert not any(psutil.pid_exists(process.pid) for process in now)


def test_metrics_are_those_of_all_workers_also_of_the_dead(tmp_path: Path) -> None:
    def counted() -> float:
        text = httpx.get(f"{served.url}/metrics", timeout=300).raise_for_status().text
        lines = [
            line for line in text.splitlines() if line.startswith("evenkeel_http_requests_total") and "healthz" in line
        ]
        return sum(float(line.split()[-1]) for line in lines)

    with serving.serving(tmp_path, "vectors", "--workers", "2") as served:
        first = born(served, 2)
        for _ in range(40):  # a connection each: whichever is free takes it
            httpx.get(f"{served.url}/healthz", timeout=300).raise_for_status()
        assert counted() == 40
        first[0].kill()
        deadline = time.monotonic() + 300
        while len(set(workers_of(served)) - {first[0]}) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert counted() == 40
        directories = set(Path(tempfile.gettempdir()).glob("evenkeel-metrics-*"))
        assert directories
    assert not any(any(directory.glob(f"*_{first[0].pid}.db")) for directory in directories)


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVENKEEL_")}
    command = [str(serving.EVENKEEL), "serve", "--role", "vectors", "--workers", "2", "--port", "0"]
    process = subprocess.Popen(
        command, env={**kept, "EVENKEEL_HOME": str(tmp_path / "home")}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    deadline = time.monotonic() + 300
    while len(workers := psutil.Process(process.pid).children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert httpx.get(f"{url}/healthz", timeout=300).status_code == 200
    process.kill()
    process.wait()
    process.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert len(workers) == 2
    assert alive == []


BROKEN = """
import sys
from service.ops import workers
sys.exit(workers.run(2, lambda: 3))
"""


def test_workers_that_cannot_work_are_given_up() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "as soon as they start" in done.stderr


TOLD_WHILE_WAITED_FOR = """
import os, signal, sys
from service.ops import workers

def work():
    if os.path.exists(sys.argv[1]):
        signal.pause()
    open(sys.argv[1], "w").close()
    return 0

def wait_and_be_told(wait=os.wait):
    done = wait()
    if not told:
        told.append(done)
        os.kill(os.getpid(), signal.SIGTERM)
    return done

told = []
os.wait = wait_and_be_told
code = workers.run(2, work)
assert told
sys.exit(code)
"""


def test_sigterm_when_a_worker_was_just_waited_for(tmp_path: Path) -> None:
    """The signal comes between the end of a worker, whose process is no more, and its leaving the list."""
    command = [sys.executable, "-c", TOLD_WHILE_WAITED_FOR, str(tmp_path / "one ended")]
    done = subprocess.run(command, timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_several_workers_serve_vectors_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(serving.EVENKEEL), "serve", "--workers", "2", "--port", "0"],
        env={**os.environ, "EVENKEEL_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--role vectors" in done.stderr


def test_small_answers_are_not_delayed() -> None:
    """asyncio sets TCP_NODELAY for sockets of this protocol alone."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == 6  # TCP


@pytest.mark.parametrize("role", ["api", "vectors"])
def test_nobody_waits_for_full_collections_or_threads_that_compute(tmp_path: Path, role: str) -> None:
    code = "import gc, sys\nfrom pathlib import Path\n"
    code += "from service import app\nfrom service.core.settings import Settings\n"
    code += "def serve_on(listener, config):\n    print('seen', len(gc.get_objects()), 'not', gc.get_freeze_count())\n"
    code += "    assert sys.getswitchinterval() < 0.001\n    return 0\napp._serve_on = app.workers.run = serve_on\n"
    code += f"sys.exit(app.serve(Settings(Path({str(tmp_path)!r})), port=0, role={role!r}))"
    done = subprocess.run([sys.executable, "-c", code], timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen, frozen = re.findall(r"seen (\d+) not (\d+)", done.stdout)[0]
    assert int(seen) < 10_000 < int(frozen)


def test_sigterm_while_workers_start(tmp_path: Path) -> None:
    code = "import os, signal, sys\nfrom service.ops import workers\n"
    code += "def work():\n    os.kill(os.getppid(), signal.SIGTERM)\n    signal.pause()\n"
    code += "sys.exit(workers.run(3, work))"
    done = subprocess.run([sys.executable, "-c", code], timeout=300, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert signal.SIGTERM  # sent by the first worker to its parent, before the others are born
