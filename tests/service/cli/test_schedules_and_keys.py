"""Schedules and keys on the command line, and what commands beside the service cannot use."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from tests.service.serving import Run, Served

pytestmark = pytest.mark.process


def test_schedules(run: Run, spec: Path):
    assert "next firing 20" in run("schedules", "add", "nightly", str(spec), "--cron", "0 3 * * *").out
    done = run("schedules", "add", "bad", str(spec), "--cron", "61 * * * *")
    assert done.code == 2
    assert "cron" in done.err
    lines = run("schedules", "list").lines
    assert lines[1][:3] == ["nightly", "0 3 * * *", "UTC"]
    assert run("schedules", "pause", "nightly").code == 0
    assert run("schedules", "list", "--json").json[0]["paused"] is True
    assert "next firing 20" in run("schedules", "resume", "nightly").out
    fired = run("schedules", "trigger", "nightly", "--date", "2026-01-02", "--json").json
    assert fired["firing_date"] == "2026-01-02"
    busy = run("schedules", "trigger", "nightly")
    assert busy.code == 1
    assert "has not ended" in busy.err
    assert run("schedules", "firings", "nightly", "--json").json[-1]["job_id"] == fired["job_id"]
    assert fired["job_id"] in run("schedules", "firings", "nightly").out
    assert run("schedules", "delete", "nightly").code == 0
    assert run("schedules", "trigger", "nightly").code == 1


def test_keys(run: Run, monkeypatch: pytest.MonkeyPatch):
    made = run("keys", "create", "reader", "--scope", "features:read")
    assert re.fullmatch(r"ek_\w+_[\w-]+\n", made.out)
    key_id = re.search(r"key_\w+", made.err)
    assert key_id is not None
    monkeypatch.setenv("EVENKEEL_API_KEY", made.out.strip())
    refused = run("jobs")
    assert refused.code == 1
    assert "remedy: " in refused.err
    assert "jobs:read" in refused.err
    monkeypatch.delenv("EVENKEEL_API_KEY")
    assert key_id[0] in run("keys", "list").out
    assert made.out.strip() not in run("keys", "list", "--json").out
    assert run("keys", "revoke", key_id[0]).code == 0
    monkeypatch.setenv("EVENKEEL_API_KEY", made.out.strip())
    done = run("jobs")
    assert done.code == 1
    assert "admin.key" in done.err


def test_a_key_that_expires(run: Run):
    until = "2099-01-31T18:00:00+01:00"
    made = run("keys", "create", "for-a-while", "--scope", "jobs:read", "--expires-at", until, "--json").json
    assert datetime.datetime.fromisoformat(made["expires_at"]) == datetime.datetime.fromisoformat(until)
    assert run("keys", "revoke", made["id"]).code == 0
    for wrong, says in (("2020-01-31T18:00:00Z", "lies in the past"), ("2099-01-31T18:00:00", "zone")):
        refused = run("keys", "create", "for-a-while", "--scope", "jobs:read", "--expires-at", wrong)
        assert refused.code == 2
        assert "expires_at" in refused.err
        assert says in refused.err


def test_reset_admin_replaces_a_lost_key(run: Run, served: Served):
    file = served.home / "admin.key"
    before = file.read_text()
    try:
        file.write_text("ek_lost_key\n")
        assert run("jobs").code == 1
        done = run("keys", "reset-admin")
        assert done.code == 0, done.err
        assert str(file) in done.out
        assert file.read_text() != before
        assert file.stat().st_mode & 0o777 == 0o600
        assert run("jobs").code == 0
    finally:
        object.__setattr__(served, "key", file.read_text().strip())


@pytest.mark.parametrize("command", [("keys", "reset-admin"), ("retention",)])
def test_commands_beside_the_service_make_no_home(
    run: Run, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVENKEEL_HOME")
    monkeypatch.delenv("EVENKEEL_DATABASE_URL", raising=False)
    done = run(*command)
    assert done.code == 1
    assert f"there is no database at {tmp_path}/.evenkeel/evenkeel.db" in done.err
    assert "set EVENKEEL_HOME and EVENKEEL_DATABASE_URL as for `evenkeel serve`" in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("keys", "reset-admin"), ("retention",)])
@pytest.mark.parametrize(
    ("variables", "code", "says"),
    [
        (
            {"DATABASE_URL": "postgresql+asyncpg://nobody@127.0.0.1:1/none"},
            1,
            "EVENKEEL_DATABASE_URL as for `evenkeel serve`",
        ),
        ({"DATABASE_URL": "nonsense"}, 1, "EVENKEEL_DATABASE_URL as for `evenkeel serve`"),
        ({"MAX_RUNS": "0"}, 2, "EVENKEEL_MAX_RUNS is '0'"),
    ],
)
def test_commands_beside_the_service_say_what_they_cannot_use(
    run: Run, command: tuple[str, ...], variables: dict[str, str], code: int, says: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in variables.items():
        monkeypatch.setenv(f"EVENKEEL_{name}", value)
    done = run(*command)
    assert done.code == code
    assert says in done.err
