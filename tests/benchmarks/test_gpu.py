"""make gpu-check where there is no GPU: it says what is missing, writes nothing and fails."""

from __future__ import annotations

import pytest

from benchmarks import gpu


def test_what_is_missing_is_said(capsys, monkeypatch, tmp_path):
    if not gpu.missing():
        pytest.skip("there is a GPU, and this needs a GPU not to be there")
    monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path / "gpu.json")])
    assert gpu.main() == 1
    said = capsys.readouterr().err
    assert f"this machine lacks {gpu.missing()[0]}" in said
    assert "make gpu-check GPU_PYTHON=" in said
    assert not (tmp_path / "gpu.json").exists()
