"""The program itself: usage, version, help, a service that is not there, a terminal, what it imports."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from service.cli import output
from tests.service.serving import EVENKEEL, Run, Served

pytestmark = pytest.mark.process


def test_usage_errors_exit_with_2(run: Run, spec: Path):
    for arguments in (
        ["frobnicate"],
        ["jobs", "--stat", "x"],
        ["job"],
        ["fetch", "items"],
        ["serve", "--role", "chef"],
    ):
        assert run(*arguments).code == 2, arguments


def test_version_and_help(run: Run):
    assert re.fullmatch(r"evenkeel \d+\.\d+\.\d+\n", run("--version").out)
    shown = run("--help").out
    commands = ("serve", "submit", "validate", "jobs", "job", "logs", "cancel", "retry", "schedules", "keys")
    later = (
        "datasets",
        "versions",
        "promote",
        "fetch",
        "train",
        "doctor",
        "predict",
        "export",
        "search",
        "generalization",
        "generate",
    )
    for command in (*commands, *later, "search"):
        assert f" {command} " in shown


def test_the_papers_tables_are_refused_with_where_they_are(run: Run):
    done = run("recipe", "sse", "--quick")
    assert (done.code, done.out) == (2, "")
    assert "python -m benchmarks.papers NAME" in done.err
    assert " recipe " not in run("--help").out


def test_no_service(run: Run, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("EVENKEEL_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        done = run("jobs")
    assert (done.code, done.out) == (1, "")
    assert "no service answers" in done.err
    assert "evenkeel serve" in done.err


def test_wrong_key(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EVENKEEL_API_KEY", "ek_wrong_key")
    done = run("jobs")
    assert done.code == 1
    assert done.err.count("unknown, revoked or expired") == 1
    assert done.err.count("reset-admin") == 1


def test_port_taken(served: Served, tmp_path: Path):
    port = served.url.rpartition(":")[2]
    done = subprocess.run(
        [EVENKEEL, "serve", "--port", port],
        env={**os.environ, "EVENKEEL_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(served: Served):
    done = subprocess.run(
        f"set -o pipefail; {EVENKEEL} jobs --json | true",
        shell=True, executable="/bin/bash", env=served.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""


@pytest.mark.parametrize(("command", "option"), [("train", "--run-dir"), ("generalization", "--report")])
def test_arguments_are_handed_to_the_trainer(command: str, option: str):
    done = subprocess.run([EVENKEEL, command, "--help"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert option in done.stdout


def test_a_command_starts_without_what_others_need():
    heavy = ("numpy", "pydantic", "pyarrow", "sqlalchemy", "fastapi", "yaml", "trainer.spec")
    code = f"import sys; from service.cli import main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cli_imports_no_torch():
    code = """
import sys
sys.argv = ["evenkeel", "--version"]
from service.cli import main, datasets, vectors, serve
from service.ops import doctor
from service import app
import trainer.spec
print([name for name in ("torch", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1_736_421_400, "1.7 GB"), (1e16, "10000.0 TB")],
)
def test_sizes(num_bytes: float, text: str):
    assert output.size(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567.0, "1234570"), (0.00001, "0.00001"), (0.5, "0.5"), (0.0, "0"), (-2.5e-7, "-0.00000025"),
        (1e300, "1e+300"), (float("inf"), "inf"), (3, "3"), (None, ""), (True, "yes"),
    ],
)  # fmt: skip
def test_numbers_are_written_without_exponents(value: object, text: str):
    assert output.cell(value) == text


def test_nouns_agree_with_their_number():
    counted = [output.counted(*one) for one in ((1, "row"), (0, "row"), (2500, "row"), (2, "class"))]
    assert counted == ["1 row", "0 rows", "2,500 rows", "2 classes"]


def test_a_terminal_gets_tables_and_a_progress_bar(served: Served, spec: Path):
    """On a pseudo-terminal: colours and columns instead of tabs, a bar while waiting."""

    def on_terminal(*arguments: str) -> str:
        leader, follower = os.openpty()
        process = subprocess.Popen(
            [EVENKEEL, *arguments], stdin=follower, stdout=follower, stderr=follower,
            env=served.environment(TERM="xterm", COLUMNS="160"),
        )  # fmt: skip
        os.close(follower)
        said = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:
                break
            if not chunk:
                break
            said += chunk
            found = re.search(rb"job (job_\w+)", said)
            if found and b"queued" in said:
                served.set_job(found[1].decode(), state="succeeded", publication={"status": "none"})
        os.close(leader)
        assert process.wait(300) == 0
        return said.decode()

    waited = on_terminal("submit", str(spec), "--wait")
    assert "\x1b[" in waited
    assert "queued" in waited
    assert "succeeded" in waited
    listed = on_terminal("jobs", "--name", "from-cli", "--limit", "1")
    assert "\t" not in listed
    assert re.search(r"\x1b\[\d+m.*succeeded", listed)


def test_a_public_data_set_is_got(run: Run, tmp_path: Path):
    (tmp_path / "train.txt").write_text("0 0 1\n1 2\n")
    (tmp_path / "test.txt").write_text("0 3\n")
    done = run("datasets", "get", "gowalla", "--to", str(tmp_path / "data"), "--from", str(tmp_path))
    assert done.code == 0, done.err
    assert "no licence of the data is stated" in done.out
    assert "there is no published checksum to compare with" in done.out
    assert f"{tmp_path}/data/gowalla.parquet: 4 rows" in done.out
    unknown = run("datasets", "get", "netflix")
    assert unknown.code == 1
    assert "there are amazon_beauty" in unknown.err
