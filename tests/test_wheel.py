"""What an installation is made of: the source distribution, and the wheel that is built from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import httpx
import pytest

from embeddings.kernels.cpu import build
from tests.service.serving import serving

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("embeddings", "trainer", "service")
BUILD_SDIST = "import sys; sys.path.insert(0, 'deploy'); import build_backend; build_backend.build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed in a folder of its own; built from the source distribution alone.

    The libraries of this machine's kernel are laid into it: compiled anew they take a minute.
    """
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    for name in (*PACKAGES, "benchmarks", "deploy"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-c", BUILD_SDIST, folder], cwd=source, check=True, timeout=300, capture_output=True
    )
    (archive,) = folder.glob("evenkeel-*.tar.gz")
    with tarfile.open(archive) as packed:
        assert not [name for name in packed.getnames() if name.endswith(".so")]
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    for library in (ROOT / "embeddings/kernels/cpu/src").glob("*.so"):
        shutil.copy(library, unpacked / "embeddings/kernels/cpu/src")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, unpacked], check=True, timeout=300
    )
    (wheel,) = folder.glob("*.whl")
    assert "none-any" not in wheel.name
    assert "linux" in wheel.name
    target = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", "--target", target, wheel], check=True, timeout=300)
    return target


@pytest.mark.process
def test_it_holds_the_compiled_kernel(installed: Path, tmp_path: Path):
    script = (
        "from embeddings.kernels.cpu.build import library_path; from embeddings.kernels.cpu.library import library; "
        "library(); print(library_path())"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(installed))
    assert len(list((installed / "embeddings/kernels/cpu/src").glob("*.so"))) == len(build.levels())


@pytest.mark.process
def test_what_only_a_checkout_has_is_not_in_it(installed: Path):
    modules = {path.name for path in installed.iterdir() if (path / "__init__.py").exists()}
    assert modules == set(PACKAGES)


@pytest.mark.process
@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_read_its_types(installed: Path, package: str):
    assert (installed / package / "py.typed").exists()


@pytest.mark.process
def test_its_service_has_its_migrations_pages_and_examples(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import service; print(service.__file__)"]
    found = subprocess.run(where, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(installed))
    with serving(tmp_path / "service", "api", real=True, PYTHONPATH=str(installed)) as served:
        with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.key}"}) as client:
            assert client.get("/").status_code == 200
            assert client.get("/static/dashboard.css").status_code == 200
            assert client.get("/v1/jobs").json()["items"] == []
            assert "examples" in client.get("/openapi.json").text
