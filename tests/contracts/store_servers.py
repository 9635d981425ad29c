"""Servers that the stores elsewhere are tested against: real ones, of our own, on free ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.fs as pafs
import redis

from tests.support.free_ports import free_port

SECONDS = 240.0
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None, f"the server on port {port} ended: {process.returncode}"
            assert time.monotonic() < deadline, f"no server on port {port}"
            time.sleep(0.02)


@contextmanager
def s3_server(bucket: str = "vectors", port: int | None = None) -> Iterator[str]:
    """An S3 server process with a bucket; its address HOST:PORT. Set CREDENTIALS before."""
    port = port or free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        address = f"127.0.0.1:{port}"
        files = pafs.S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True)
        files.create_dir(bucket)
        yield address
    finally:
        process.kill()
        process.wait()


class RedisServer:
    """A redis-server process that may be killed and started again. ``directory``: where it keeps its data."""

    def __init__(self, directory: Path, *options: str):
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._command = [
            "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "",
            *options,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self.port, self.process)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(directory, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def redis_prefix(url: str, name: str) -> Iterator[str]:
    """``url`` with a prefix of keys of our own, none of which are left."""
    prefix = f"evenkeel-test-{os.getpid()}-{time.monotonic_ns()}-{name}:".replace("[", "-").replace("]", "")
    client = redis.Redis.from_url(url)
    try:
        yield f"{url}?prefix={prefix}"
    finally:
        keys = list(client.scan_iter(match=f"{prefix}*", count=10_000))
        for start in range(0, len(keys), 10_000):
            client.unlink(*keys[start : start + 10_000])
        client.close()
