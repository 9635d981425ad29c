"""`python -m benchmarks.gpu.torchrec` where there is no GPU: all but the device and its kernel is as on one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "6", "--small-rows", "200", "--small-batch", "32", "--rows", "100", "--batch", "16"]
SHORT = ["--rounds", "2", "--round-steps", "2", "--warm-steps", "3"]


@pytest.mark.slow
@pytest.mark.process
def test_every_check_runs_on_the_cpu(tmp_path):
    out = tmp_path / "torchrec.json"
    command = [sys.executable, "-m", "benchmarks.gpu.torchrec", "--device", "cpu", "--out", str(out), *SMALL, *SHORT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(out.read_text("utf-8"))
    assert {"python", "torch", "torchrec", "fbgemm"} <= report["versions"].keys()
    one, two, *timed = report["checks"].values()
    assert one["against_reference"]["close"]
    assert min(one["largest_move"].values()) > 100 * one["against_reference"]["largest_difference"]
    assert one["other_bits_again"] == one["other_bits_in_pipeline"] == []
    assert two["table_wise"]["rows_by_rank"] == [300, 200]
    assert two["row_wise"]["rows_by_rank"] == [250, 250]
    assert len(timed) == 2
    for case in timed:
        # FBGEMM has no fused Adam for the CPU.
        pair = "ours_rowwise_adagrad / fbgemm_rowwise_adagrad"
        assert case["ratios"].keys() == {pair}
        own, peer = (case["contestants"][name] for name in pair.split(" / "))
        assert case["ratios"][pair]["step"] == pytest.approx(own["step_ms"] / peer["step_ms"], rel=1e-2)
        assert "ours_adam_ar_unchecked" in case["contestants"]


@pytest.mark.slow
@pytest.mark.process
def test_a_check_that_fails_is_recorded_and_the_next_ones_run(tmp_path):
    out = tmp_path / "torchrec.json"
    command = [sys.executable, "-c", "import sys; from benchmarks.gpu.torchrec import __main__ as t, results, steps\n"
               "def bad(*_): raise ValueError('no such thing')\n"
               "results.by_reference = steps.theirs = bad\n"
               f"sys.exit(t.main(['--device', 'cpu', '--out', {str(out)!r}, '--only', 'one_rank', 'steps', "
               f"*{[*SMALL, *SHORT]!r}]))"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    one, *timed = json.loads(out.read_text("utf-8"))["checks"].values()
    assert one["failed"][-1] == "ValueError: no such thing"
    assert len(timed) == 2
    for case in timed:
        assert not case["passed"]
        assert case["missing"]["fbgemm_rowwise_adagrad"][-1] == "ValueError: no such thing"
        assert case["contestants"].keys() == {"ours_adam_ar", "ours_adam_ar_unchecked", "ours_rowwise_adagrad"}
