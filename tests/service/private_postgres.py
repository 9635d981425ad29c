"""A PostgreSQL of a test's own, on a free port: to be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


class PrivatePostgres:
    def __init__(self, folder: Path, binaries: Path, user: str | None):
        self._data = folder / "data"
        self._binaries = binaries
        self._user = user
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._call("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "--no-sync")
        settings = f"port = {self.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\n"
        with (self._data / "postgresql.conf").open("a") as file:
            file.write(settings)

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        self._call("pg_ctl", "-D", str(self._data), "-l", str(self._data / "log"), "-w", "-t", "120", "start")

    def crash(self) -> None:
        """Ends it as a crash would: recovery at the next start."""
        self._call("pg_ctl", "-D", str(self._data), "-w", "-t", "120", "-m", "immediate", "stop")

    def stop(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # it is down
            self.crash()

    def _call(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._binaries / program, *arguments],
            user=self._user,
            cwd="/",
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=300,
        )


@contextlib.contextmanager
def private_postgres() -> Iterator[PrivatePostgres]:
    """Skips where PostgreSQL's programs are not installed, or would have to run as root."""
    binaries = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    binaries += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    usable = next((one for one in binaries if (one / "initdb").exists() and (one / "postgres").exists()), None)
    if usable is None:
        pytest.skip("no PostgreSQL at hand to start: initdb is not installed")
    user = "postgres" if os.geteuid() == 0 else None  # it does not run as root
    folder = Path(tempfile.mkdtemp(prefix="evenkeel-postgres-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        server = PrivatePostgres(folder, usable, user)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
