"""A service that may open no more files: what it cannot take waits, its log is short, and nothing is lost or refused
for good."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import psutil
import pytest

from service.client import Client
from service.client.http import ServiceError
from tests.service import serving

pytestmark = pytest.mark.process


def test_connections_beyond_the_limit_of_open_files(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with serving.serving(tmp_path, log=log) as served, Client(served.url, served.key, timeout_seconds=300) as client:
        client.add_dataset(serving.dataset(served.data))
        process = psutil.Process(served.process.pid)
        before = process.rlimit(psutil.RLIMIT_NOFILE)
        assert before[0] == min(before[1], 65_536)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 8, before[1]))
        port = int(served.url.rpartition(":")[2])
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        while "many open files" not in log.read_text():
            time.sleep(0.02)
        with contextlib.suppress(ServiceError):  # on the connection that there is
            client.submit(serving.job("first"), idempotency_key="first")
        process.rlimit(psutil.RLIMIT_NOFILE, before)
        for one in waiting:
            one.close()
        client.submit(serving.job("first"), idempotency_key="first")
        assert [job["name"] for job in client.jobs()] == ["first"]
        assert log.read_text().count("open files") < 20
