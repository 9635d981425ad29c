"""``evenkeel clean`` gives back what runs of this machine share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli.main import app
from trainer.data.prepare.shared import SharedPreparedData


def test_it_removes_what_is_shared_and_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "column").write_bytes(b"12345")
    shared = SharedPreparedData(tmp_path / "cache" / "prepared")
    shared.keep("key", {"column": tmp_path / "column"})
    (tmp_path / "taken").mkdir()
    assert shared.take("key", tmp_path / "taken")
    done = CliRunner().invoke(app, ["clean", "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"bytes": 5})
    (tmp_path / "again").mkdir()
    assert not shared.take("key", tmp_path / "again")
    assert (tmp_path / "taken" / "column").read_bytes() == b"12345"


def test_a_folder_that_others_write_is_told_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_CACHE", str(tmp_path))
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "key.json").touch()
    (tmp_path / "prepared").chmod(0o777)
    done = CliRunner().invoke(app, ["clean"])
    assert done.exit_code != 0
    assert "other users may access" in str(done.exception or done.output)
    assert (tmp_path / "prepared" / "key.json").exists()
