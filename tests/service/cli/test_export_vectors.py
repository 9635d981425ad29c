"""``evenkeel export-vectors`` writes a version of a store, without a service."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from embeddings.store import open_store
from embeddings.vectors.item_vectors import ItemVectors
from service.cli.main import app
from service.cli.output import CommandError


@pytest.fixture
def store(tmp_path: Path) -> str:
    collection = open_store(tmp_path / "store").collection("items")
    collection.publish(collection.write(ItemVectors([7, 9], np.eye(2, dtype=np.float32))), None)
    return str(tmp_path / "store")


def test_a_version_is_written(store: str, tmp_path: Path) -> None:
    file = tmp_path / "items.parquet"
    done = CliRunner().invoke(app, ["export-vectors", "items", str(file), "--store", store, "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer == {"collection": "items", "file": str(file), "version": "v000001", "num_rows": 2}
    assert pq.read_table(file)["id"].to_pylist() == [7, 9]


@pytest.mark.parametrize(
    ("name", "file", "says"),
    [
        ("items", "v.npz", "the ending sets the format"),
        ("others", "v.parquet", "others"),
        ("items", "no/v.parquet", "no/v"),
        ("items", "no/v.safetensors", "no/v.safetensors: No such file or directory"),
        ("items", "no/v.usearch", "no/v"),
    ],
)
def test_what_cannot_be_written_is_refused(store: str, tmp_path: Path, name: str, file: str, says: str) -> None:
    done = CliRunner().invoke(app, ["export-vectors", name, str(tmp_path / file), "--store", store])
    assert isinstance(done.exception, CommandError), done.exception
    assert says in str(done.exception)
