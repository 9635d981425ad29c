"""A real ``evenkeel serve`` process for tests of what talks to it over a socket."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from service.cli import main as cli_main
from service.core.settings import Settings
from tests.service.forked_service import Forked, evenkeel

EVENKEEL = Path(sys.executable).with_name("evenkeel")


@dataclasses.dataclass(frozen=True)
class Served:
    """A running service: its address, its first key, its home, the directory for data, its process."""

    url: str
    key: str
    home: Path
    data: Path
    process: subprocess.Popen[str] | Forked

    @property
    def settings(self) -> Settings:
        return Settings(home=self.home)

    def environment(self, **more: str) -> dict[str, str]:
        """For a process that is to talk to it."""
        return {**os.environ, "EVENKEEL_URL": self.url, "EVENKEEL_HOME": str(self.home), **more}

    def set_job(self, job_id: str, **columns: Any) -> None:
        """Writes a job's columns as the runner would: role ``api`` runs nothing by itself."""
        values = [json.dumps(value) if isinstance(value, dict) else value for value in columns.values()]
        assignments = ", ".join(f"{name} = ?" for name in columns)
        with contextlib.closing(sqlite3.connect(self.home / "evenkeel.db", timeout=120)) as database, database:
            database.execute(f"UPDATE job SET {assignments} WHERE id = ?", [*values, job_id])

    def add_metrics(self, job_id: str, aucs: list[float]) -> None:
        rows = [(job_id, epoch, "test", json.dumps({"auc": auc})) for epoch, auc in enumerate(aucs, 1)]
        with contextlib.closing(sqlite3.connect(self.home / "evenkeel.db", timeout=120)) as database, database:
            database.executemany('INSERT INTO job_metric (job_id, epoch, split, "values") VALUES (?, ?, ?, ?)', rows)
            database.execute("UPDATE job SET attempt = max(attempt, 1) WHERE id = ?", [job_id])


@contextlib.contextmanager
def serving(
    directory: Path, role: str = "api", *options: str, log: Path | None = None, real: bool = False, **more: str
) -> Iterator[Served]:
    """Starts one over ``directory/home`` with data root ``directory/data``; ends it with SIGTERM, unless the test has
    killed it. ``options`` of the command, ``log``: a file for its stderr, ``more`` environment. ``real``: the command
    itself, in the place of a fork that does the same (forked_service.py)."""
    home, data = directory / "home", directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "EVENKEEL_HOME": str(home), "EVENKEEL_DATA_ROOTS": str(data)}
    for name in ("EVENKEEL_API_KEY", "EVENKEEL_URL", "EVENKEEL_STORE_URL", "EVENKEEL_DATABASE_URL"):
        environment.pop(name, None)
    environment.update(more)
    arguments = ["serve", "--role", role, "--port", "0", *options]
    said = log or directory / "serve.err"
    process = start_command(arguments, environment, said, real)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, f"the service did not say where it listens: {said.read_text()}"
        key_file = home / "admin.key"
        yield Served(found[0], key_file.read_text().strip() if _appears(key_file) else "", home, data, process)
    finally:
        killed = process.poll() == -signal.SIGKILL
        process.send_signal(signal.SIGTERM)
        assert killed or process.wait(300) in (0, -signal.SIGTERM)
        process.stdout.close()


def start_command(
    arguments: list[str], environment: dict[str, str], log: Path, real: bool = False
) -> subprocess.Popen[str] | Forked:
    """``evenkeel ARGUMENTS``, its stderr in ``log``."""
    if not real:
        return Forked(log, environment, evenkeel, *arguments)
    with open(log, "a") as stderr:
        return subprocess.Popen(
            [str(EVENKEEL), *arguments], env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )


class Done(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[list[str]]:
        return [line.split("\t") for line in self.out.splitlines()]


Run = Callable[..., Done]


def in_this_process(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("jobs", "--json")``: the command in this process, talking to the service."""
    monkeypatch.setenv("EVENKEEL_URL", served.url)
    monkeypatch.setenv("EVENKEEL_HOME", str(served.home))
    monkeypatch.delenv("EVENKEEL_API_KEY", raising=False)
    return command_in_this_process(monkeypatch, capsys)


def command_in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("retention")``: the command in this process, by its environment."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["evenkeel", *arguments])
        capsys.readouterr()
        code = 0
        try:
            cli_main.main()
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Done(code, said.out, said.err)

    return run


def _appears(path: Path, seconds: float = 300.0) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


def dataset(data: Path, name: str = "clicks") -> dict[str, Any]:
    """A dataset whose file is there."""
    file = data / f"{name}.parquet"
    pq.write_table(pa.table({"user": [1, 2, 3], "item": [3, 4, 3], "click": [0, 1, 1]}), file)
    return {
        "name": name,
        "uri": str(file),
        "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"column": "click"},
    }


def job(name: str = "daily", **fields: Any) -> dict[str, Any]:
    return {"name": name, "dataset": {"name": "clicks"}, "model": {"kind": "dnn"}, "epochs": 2, **fields}


def write_spec(path: Path, *documents: dict[str, Any]) -> Path:
    """Write the documents to one file, as examples have a dataset and a job."""
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return path
