"""What a run imports: not what it has no use for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

HEAVY = (
    "ray", "tensordict", "torch._dynamo", "torch._inductor", "networkx", "redis", "sklearn", "sympy", "httpx", "scipy",
    "service", "typer", "rich", "fastapi", "sqlalchemy", "opentelemetry", "onnx", "usearch", "polars", "matplotlib",
    "kubernetes", "boto3",
)  # fmt: skip
TRAIN = f"""
import gc, sys
from trainer.launch.in_process import main
code = main(sys.argv[1:])
print("collects", gc.isenabled())
print("imported", sorted(set(sys.modules) & {set(HEAVY)!r}))
import tensordict
print("the real one", hasattr(tensordict, "stack"))
from trainer.runs.protocol import leave
leave(code)
"""


@pytest.mark.slow
def test_evenkeel_train_imports_neither_ray_nor_torchs_compiler(tmp_path: Path, rows: Path) -> None:
    dataset = {
        "name": "clicks", "uri": str(rows), "features": {"user": {"type": "id"}, "item": {"type": "id"}},
        "label": {"negatives": {"per_positive": 1, "of": "item"}},
    }  # fmt: skip
    job = {
        "spec_version": 1, "name": "light", "dataset": {"name": "clicks"}, "epochs": 1, "batch_size": 256,
        "model": {"kind": "two_tower", "embedding_dim": 8}, "publish": {"collection": "items", "feature": "item"},
    }  # fmt: skip
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump_all([dataset, job]))
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, spec, "--run-dir", tmp_path / "run", "--store", tmp_path / "store"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imported []" in done.stdout.splitlines()
    assert "collects True" in done.stdout.splitlines()
    # Code that wants it afterwards is not given an empty class.
    assert "the real one True" in done.stdout.splitlines()


@pytest.mark.process
def test_the_console_script_becomes_the_trainer_without_the_other_commands(tmp_path: Path) -> None:
    script = "import sys; sys.argv[0] = 'evenkeel'; from service.cli.entrypoint import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script, "train", tmp_path / "nothing.yaml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "nothing.yaml" in done.stderr
    assert "typer" not in done.stderr
    other = subprocess.run([sys.executable, "-c", script, "--version"], capture_output=True, text=True, check=True)
    assert other.stdout.startswith("evenkeel ")
