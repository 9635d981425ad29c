"""evenkeel-client, built and installed apart: the same client without this repository's packages, torch and Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.service import published
from tests.service.serving import Served

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import asyncio, json, sys
sys.path[:] = [path for path in sys.path if path != {root!r}]
sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
import service
from evenkeel.client import AsyncClient, Client

async def names():
    async with AsyncClient() as client:
        return [one["name"] for one in await client.collections()]

with Client() as client:
    got = client.vectors("films", ["10", "11"])
foreign = [name for name in ("torch", "ray", "embeddings", "trainer") if name in sys.modules]
print(json.dumps([got.status.tolist(), asyncio.run(names()), service.MINE, foreign]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    subprocess.run(
        [ROOT / "deploy/client/build.sh", folder], check=True, env={**os.environ, "PYTHON": sys.executable}, timeout=300
    )
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.process
def test_it_works_alone_beside_a_package_of_the_same_name_as_ours(wheel: Path, served: Served, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("MINE = 1\n")
    published.publish(served.settings, "films", carried=(1,))
    environment = {
        "PYTHONPATH": f"{tmp_path}:{tmp_path / 'installed'}",
        "EVENKEEL_URL": served.url, "EVENKEEL_API_KEY": served.key, "PATH": os.environ["PATH"],
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root=str(ROOT))],
        check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    status, names, mine, foreign = json.loads(ran.stdout)
    assert status == ["found", "missing"]
    assert "films" in names
    assert (mine, foreign) == (1, [])


def test_it_has_the_version_and_the_requirements_of_the_whole() -> None:
    files = "pyproject.toml", "deploy/client/pyproject.toml"
    whole, client = (tomllib.loads((ROOT / file).read_text())["project"] for file in files)
    assert client["version"] == whole["version"]
    assert client["requires-python"] == whole["requires-python"].partition(",")[0]
    assert set(client["dependencies"]) <= set(whole["dependencies"])
