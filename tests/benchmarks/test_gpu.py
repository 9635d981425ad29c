"""make gpu-check where there is no GPU: it says what is missing, writes nothing and fails; every stage by Triton's
interpreter; what it records of tests."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import kernels, profile, timing, train_step, tuning
from benchmarks.gpu.suites import Suite, run_suite

ROOT = Path(__file__).resolve().parents[2]
CASE = kernels.Case("zipf", 2, 100, 8, 6, 2)


@pytest.fixture
def few(monkeypatch):
    """One input, one step of each kind, no untimed rounds."""
    for module in (kernels, tuning, profile):
        monkeypatch.setattr(module, "INPUT_SETS", 1)
        monkeypatch.setattr(module, "NUM_STEPS", 1)
    monkeypatch.setattr(timing, "UNTIMED_ROUNDS", 0)
    monkeypatch.setattr(train_step, "UNTIMED_ROUNDS", 0)
    monkeypatch.setattr(train_step, "NUM_STEPS", 1)


@pytest.mark.slow
@pytest.mark.skipif(timing.ON_GPU, reason="there is a GPU, and this needs a GPU not to be there")
def test_every_stage_runs_on_the_cpu(few, monkeypatch, tmp_path):
    """By the interpreter: what a GPU is needed for is the figures alone."""
    monkeypatch.setattr(kernels, "CASES", [CASE])
    monkeypatch.setattr(tuning, "WAYS", tuning.WAYS[:2])
    monkeypatch.setattr(tuning, "warm_all", lambda cases: tuning.warm(cases, 0, 1))
    report = gpu.Report(tmp_path / "gpu.json", {"gpu": "none"})
    stages = [stage for stage in gpu.STAGES if stage not in ("tests", "suites")]
    gpu.run_stages(report, stages, "", 1)
    found = json.loads(report.path.read_text("utf-8"))
    assert found["stages"] == dict.fromkeys(stages, "passed")
    by_bench = {
        bench: list(lines)
        for bench, lines in itertools.groupby(found["lines"], lambda line: line["bench"])
    }  # fmt: skip
    assert {bench: len(lines) for bench, lines in by_bench.items()} == {
        "plain": 1, "sse": 1, "training": 1, "update": 4, "step": 1, "train_step": 1, "profile": 1, "tuning": 2,
    }  # fmt: skip
    [training] = by_bench["training"]
    # 24 ids with 8 floats, a last step and their own bytes; 12 rows of output; moments of those that momentum moves.
    moved = 24 * (32 + 8 + 4) + 2 * 6 * 32 + training["moving_share"] * 24 * 64
    assert training["gb_per_second"] == pytest.approx(moved / training["ours_ms"] / 1e6, abs=0.1)
    assert by_bench["step"][0]["peers_ms"].keys() == {"torch_sparse_adam"}
    assert by_bench["train_step"][0]["step_ms"]["ours"].keys() == {"eager", "overlapped", "dense_graph"}
    assert by_bench["tuning"][0].keys() >= tuning.WAYS[0].keys()


def test_a_stage_that_fails_is_recorded_and_the_next_one_runs(tmp_path):
    report = gpu.Report(tmp_path / "gpu.json", {})

    def bad():
        yield {"bench": "first"}
        raise ValueError("no\n such thing")

    report.add("lookups", bad)
    report.add("lookups", lambda: [{"bench": "second"}])
    report.add("steps", lambda: [{"bench": "third"}])
    found = json.loads(report.path.read_text("utf-8"))
    assert found["stages"] == {"lookups": "failed: ValueError: no such thing", "steps": "passed"}
    assert [line["bench"] for line in found["lines"]] == ["first", "second", "third"]


@pytest.mark.process
def test_the_package_is_small_and_all_that_is_needed(tmp_path):
    package = tmp_path / "gpu-check.tar.gz"
    command = ["git", "archive", "-o", str(package), "HEAD", "Makefile", "pyproject.toml", "benchmarks", "embeddings"]
    subprocess.run([*command, "tests"], cwd=ROOT, check=True)
    assert f"git archive -o build/gpu-check.tar.gz {' '.join(command[4:])} tests\n" in (ROOT / "Makefile").read_text()
    assert package.stat().st_size < 60 << 20
    with tarfile.open(package) as archive:
        archive.extractall(tmp_path, filter="data")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = (
        "import benchmarks.gpu.kernels, benchmarks.gpu.train_step, benchmarks.gpu.tuning, tests.conftest, embeddings\n"
    )
    code += "print(embeddings.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "embeddings" / "__init__.py")


def test_what_is_missing_is_said(capsys, monkeypatch, tmp_path):
    if not gpu.missing():
        pytest.skip("there is a GPU, and this needs a GPU not to be there")
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path / "gpu.json")])
    assert gpu.main() == 1
    said = capsys.readouterr().err
    assert f"this machine lacks {gpu.missing()[0]}" in said
    assert "make gpu-check GPU_PYTHON=" in said
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.process
def test_tests_that_need_a_gpu_are_recorded_with_what_became_of_them(tmp_path, monkeypatch):
    if not gpu.missing():
        pytest.skip("there is a GPU, and this needs a GPU not to be there")
    monkeypatch.setenv("PYTEST_ADDOPTS", f"--junitxml={tmp_path}/other.xml")  # it has a report of its own
    found = run_suite(Suite(("tests/trainer/launch/test_on_gpu.py",)))
    assert found["outcome"] == "skipped"
    assert found["reason"].startswith("needs a GPU")
    assert found["counts"] == {"skipped": len(found["cases"])}
    assert found["cases"]["test_on_gpu::test_a_job_on_a_gpu_ends_as_on_the_cpu[fbgemm-sgd]"].startswith(
        "skipped: needs"
    )
    (tmp_path / "test_some.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2, 'not\\n  so'\n")
    found = run_suite(Suite((str(tmp_path),)))
    assert (found["outcome"], found["counts"]) == ("failed", {"passed": 1, "failed": 1})
    assert found["cases"]["test_some::test_good"] == "passed"
    assert found["cases"]["test_some::test_bad"].startswith("failed: AssertionError: not so")
    (tmp_path / "test_some.py").write_text("def test_good(): pass\n")
    assert run_suite(Suite((str(tmp_path),)))["outcome"] == "passed"
    (tmp_path / "test_some.py").write_text("import nothing_of_this_name\n")
    assert run_suite(Suite((str(tmp_path),)))["outcome"] == "failed"


@pytest.mark.process
def test_tests_whose_imports_are_missing_are_skipped_with_the_reason():
    found = run_suite(Suite(("tests/trainer/launch/test_on_gpu.py",), "import nothing_of_this_name"))
    assert found == {
        "outcome": "skipped",
        "reason": "a requirement is missing: ModuleNotFoundError: No module named 'nothing_of_this_name'",
    }
