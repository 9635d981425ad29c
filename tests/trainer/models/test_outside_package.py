"""A model of a package of one's own, as docs/development/add_a_model.md writes it: installed, trained, refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.outside_package import install
from trainer.data.sources.click_log import ClickLog, generate

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "development" / "add_a_model.md"
SPEC = """
name: clicks
uri: {data}
features:
  user: {{type: id}}
  item: {{type: id}}
label: {{column: click}}
timestamp: timestamp
---
spec_version: 1
name: own-model
dataset: {{name: clicks}}
model: {{kind: mean_product, embedding_dim: 4, hidden: [8], scale: {scale}}}
optimizer: {{kind: adam, learning_rate: 0.01}}
batch_size: 256
evaluation: {{split: {{kind: random}}}}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "my_models").mkdir()
    (source / "my_models" / "__init__.py").touch()
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", GUIDE.read_text("utf-8"), flags=re.DOTALL)
    assert [name for name, _ in blocks] == ["my_models/spec.py", "my_models/module.py", "pyproject.toml"]
    for name, text in blocks:
        (source / name).write_text(text, "utf-8")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", site, source], check=True, timeout=300)
    return site


def train(installed: Path, folder: Path, scale: float) -> subprocess.CompletedProcess[str]:
    generate(ClickLog(num_rows=2000, num_days=1), folder / "data")
    (folder / "job.yaml").write_text(SPEC.format(data=folder / "data", scale=scale))
    code = "from service.cli.entrypoint import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "train", str(folder / "job.yaml")],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": f"{installed}:{ROOT}", "EVENKEEL_HOME": str(folder / "home")},
    )  # fmt: skip


@pytest.mark.process
def test_it_is_trained_and_evaluated(installed: Path, tmp_path: Path) -> None:
    done = train(installed, tmp_path, 2.0)
    assert done.returncode == 0, done.stderr
    assert "auc" in done.stdout + done.stderr


@pytest.mark.process
def test_a_field_out_of_its_bounds_is_named(installed: Path, tmp_path: Path) -> None:
    done = train(installed, tmp_path, -1.0)
    assert done.returncode != 0
    assert "model.scale" in done.stderr


@pytest.mark.process
def test_a_kind_that_cannot_be_imported_stops_the_jobs_that_name_it_alone(tmp_path: Path) -> None:
    install(tmp_path, "cut_models", "import no_such_module\n", {"evenkeel.model_specs": {"cut": "cut_models:CutSpec"}})
    code = (
        "from trainer.spec import parse_job\n"
        "job = {'spec_version': 1, 'name': 'a', 'dataset': {'name': 'clicks'}, 'optimizer': {'kind': 'adam'}}\n"
        "parse_job(job | {'model': {'kind': 'fm', 'embedding_dim': 4}})\n"
        "try:\n    parse_job(job | {'model': {'kind': 'cut'}})\nexcept ValueError as error:\n    print(error)"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "model.kind: 'cut' of package cut_models cannot be imported" in done.stdout
    assert "No module named 'no_such_module'" in done.stdout
    assert "`pip uninstall cut_models`" in done.stdout
