"""The comparison of several labels runs every method on the same rows, and its table is of the best epochs."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.several_labels import LABELS, MODELS, Result, main, table


def test_every_method_says_the_auc_of_each_label(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 20, 900) for name in ("user", "item")}
    rows |= {"rating": 1 + (rows["item"] + rng.integers(0, 3, 900)) % 5, "pos": np.arange(900)}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    assert main(["--data", str(tmp_path / "rows.parquet"), "--seeds", "1", "--epochs", "1"]) == 0
    *lines, header, _, _, _, _, _, last = [line for line in capsys.readouterr().out.splitlines() if line]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [one["case"] for one in found] == list(MODELS)
    assert all(set(one["test_auc"]) == set(LABELS) and one["epoch"] == 1 for one in found)
    assert header == "| method | like | love | seconds |"
    assert last.startswith("| esmm | 0.")


def test_the_table_has_means_and_deviations():
    results = [Result("mmoe", seed, {"like": 0.8 + seed / 10, "love": 0.7}, 1, 2.0) for seed in (0, 1)]
    assert table(results).splitlines()[-1] == "| mmoe | 0.8500 ± 0.0707 | 0.7000 ± 0.0000 | 2 |"


def test_an_unknown_method_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--methods", "mmoe,mlp"])
    assert "no such method: mlp (there are alone, shared_bottom" in capsys.readouterr().err
