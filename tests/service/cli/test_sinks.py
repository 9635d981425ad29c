"""``evenkeel sinks``: a sink is added, brought up to date and removed without a service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors
from service.cli.main import app
from service.cli.output import CommandError
from tests.support import sinks
from tests.support.sinks import Readable


@pytest.fixture
def lance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readable]:
    with sinks.readable("lancedb", tmp_path) as sink:
        file = tmp_path / "sinks.yaml"
        file.write_text(f"lake: {{url: '{sink.url}'}}\naway: {{url: 'postgresql://127.0.0.1:1/none'}}\n")
        monkeypatch.setenv("EVENKEEL_SINKS", str(file))
        yield sink


@pytest.fixture
def store(tmp_path: Path) -> str:
    collection = open_store(tmp_path / "store").collection("items")
    collection.publish(collection.write(ItemVectors([7, 9], np.eye(2, dtype=np.float32))), None)
    return str(tmp_path / "store")


def test_a_sink_is_added_and_removed(store: str, lance: Readable) -> None:
    command = ["sinks", "sync", "items", "--store", store, "--json"]
    done = CliRunner().invoke(app, [*command, "--add", "lake"])
    assert done.exit_code == 0, done.output
    (shown,) = json.loads(done.stdout)
    assert (shown["name"], shown["version"], shown["rows"], shown["lag_seconds"]) == ("lake", "v000001", 2, 0.0)
    assert set(lance.rows("items") or ()) == {7, 9}
    done = CliRunner().invoke(app, [*command, "--remove", "lake"])
    assert json.loads(done.stdout) == []
    assert lance.rows("items") is None


def test_a_sink_that_fails_is_named_and_the_others_are_brought_up_to_date(store: str, lance: Readable) -> None:
    done = CliRunner().invoke(app, ["sinks", "sync", "items", "--store", store, "--add", "away", "--add", "lake"])
    assert isinstance(done.exception, CommandError)
    assert str(done.exception).startswith("away: ConnectionRefusedError")
    assert set(lance.rows("items") or ()) == {7, 9}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["items", "--add", "other"], "other: no such sink of tenant default"),
        (["items", "--add", "lake", "--tenant", "shop"], "lake: no such sink of tenant shop"),
        (["none", "--add", "lake"], "there is no collection 'none'"),
    ],
)
def test_names_that_are_not_there_are_refused(store: str, lance: Readable, arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["sinks", "sync", "--store", store, *arguments])
    assert isinstance(done.exception, CommandError)
    assert says in str(done.exception)
