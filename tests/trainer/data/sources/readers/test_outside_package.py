"""A reader of a package of one's own, as docs/development/add_a_reader.md writes it: installed, prepared, trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from tests.support import outside_package
from trainer.data.sources.click_log import ClickLog

ROOT = Path(__file__).resolve().parents[5]
GUIDE = ROOT / "docs" / "development" / "add_a_reader.md"
SPEC = """
name: clicks
uri: rows.npz
features:
  user: {type: id}
  item: {type: id}
label: {column: click}
timestamp: timestamp
---
spec_version: 1
name: own-reader
dataset: {name: clicks}
model: {kind: fm, embedding_dim: 4}
optimizer: {kind: adam, learning_rate: 0.01}
batch_size: 256
evaluation: {split: {kind: random}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    blocks = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", GUIDE.read_text("utf-8"), flags=re.DOTALL))
    assert list(blocks) == ["my_readers.py", "pyproject.toml"]
    folder = tmp_path_factory.mktemp("site")
    entry_points = tomllib.loads(blocks["pyproject.toml"])["project"]["entry-points"]
    outside_package.install(folder, "my_readers", blocks["my_readers.py"], entry_points)
    return folder


TRAIN = "from service.cli.entrypoint import main; main()"
PREPARE = """
from trainer.data.prepare.preparation import prepare
from trainer.spec import load_documents
prepare(*load_documents("job.yaml"), "data")
"""


def run(code: str, site: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "job.yaml").write_text(SPEC)
    return subprocess.run(
        [sys.executable, "-c", code, "train", "job.yaml"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": f"{site}:{ROOT}", "EVENKEEL_HOME": str(folder / "home")},
    )  # fmt: skip


@pytest.mark.process
def test_its_rows_are_prepared_and_trained(site: Path, tmp_path: Path) -> None:
    table = ClickLog(num_rows=2000, num_days=1).day_table(0)
    np.savez(tmp_path / "rows.npz", **{name: table[name].to_numpy() for name in table.column_names})
    done = run(TRAIN, site, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "auc" in done.stdout + done.stderr


@pytest.mark.process
def test_a_file_that_it_cannot_read_is_told_with_its_remedy(site: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", user=np.zeros((2, 2)))
    done = run(PREPARE, site, tmp_path)
    assert done.returncode != 0
    assert "cannot be read as NumPy" in done.stderr
    assert "write it with numpy.savez" in done.stderr


@pytest.mark.process
def test_without_the_package_its_ending_is_unknown(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", user=np.zeros(2))
    assert "has none of the endings .parquet" in run(PREPARE, tmp_path, tmp_path).stderr


@pytest.mark.process
def test_a_reader_that_cannot_be_imported_is_named_to_who_has_such_a_file(tmp_path: Path) -> None:
    entry_points = {"evenkeel.readers": {"npz": "cut_readers:CutReader"}}
    outside_package.install(tmp_path, "cut_readers", "import no_such_module\n", entry_points)
    np.savez(tmp_path / "rows.npz", user=np.zeros(2))
    said = run(PREPARE, tmp_path, tmp_path).stderr
    assert "has none of the endings .parquet" in said
    assert "'npz' of package cut_readers cannot be imported" in said
