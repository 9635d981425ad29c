"""A served dataset, and the command that talks to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.client import Client
from tests.service import serving
from tests.service.serving import Run, Served


@pytest.fixture(scope="module")
def served(served: Served) -> Served:
    with Client(served.url, served.key) as client:
        client.add_dataset(serving.dataset(served.data))
    return served


@pytest.fixture
def run(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return serving.in_this_process(served, monkeypatch, capsys)


@pytest.fixture
def spec(served: Served, tmp_path: Path) -> Path:
    """A file with a dataset and a job, as examples have it."""
    return serving.write_spec(tmp_path / "clicks.yaml", serving.dataset(served.data), serving.job("from-cli"))
