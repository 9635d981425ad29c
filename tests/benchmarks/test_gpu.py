"""make gpu-check where there is no GPU: it says what is missing, writes nothing and fails; what it records of tests."""

from __future__ import annotations

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.suites import Suite, run_suite


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
def test_tests_that_need_a_gpu_are_recorded_with_what_became_of_them(tmp_path):
    if not gpu.missing():
        pytest.skip("there is a GPU, and this needs a GPU not to be there")
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
        "reason": "what it needs is not here: ModuleNotFoundError: No module named 'nothing_of_this_name'",
    }
