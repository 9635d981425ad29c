"""The comparison of output calibrators fits all to the scores of one training, and its table is of means."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.output_calibration import Result, main, table
from trainer.output_calibration.registry import CALIBRATORS


def test_every_kind_has_its_figures(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 20, 900) for name in ("user", "item")}
    rows |= {"rating": 1 + (rows["item"] + rng.integers(0, 3, 900)) % 5, "pos": np.arange(900)}
    pq.write_table(pa.table(rows), tmp_path / "ml1m.parquet")
    assert main(["--data", str(tmp_path), "--seeds", "1", "--epochs", "1", "--cases", "ml1m"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    (found,) = [json.loads(line) for line in lines if line.startswith("{")]
    assert all(0.0 < found[kind]["ece"] < 0.5 for kind in CALIBRATORS)
    assert found["platt"]["auc"] == pytest.approx(found["none"]["auc"])
    assert lines[-1].startswith("| ml1m | isotonic | 0.")


def test_the_table_has_means_and_deviations():
    results = [Result("ml1m", seed, dict.fromkeys(CALIBRATORS, (0.1 * seed, 0.5, 0.8))) for seed in (0, 1)]
    assert (
        table(results).splitlines()[-1] == "| ml1m | isotonic | 0.0500 ± 0.0707 | 0.5000 ± 0.0000 | 0.8000 ± 0.0000 |"
    )


def test_an_unknown_case_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--cases", "ml1m,criteo"])
    assert "no such case: criteo (there are ml1m" in capsys.readouterr().err
