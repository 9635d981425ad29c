"""Results of a report are computed once for what decides them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.rff.kept_results import kept


def test_a_result_is_computed_again_where_anything_that_decides_it_changes(tmp_path: Path) -> None:
    computed: list[int] = []

    def compute() -> dict[str, Any]:
        computed.append(1)
        return {"recall": [0.5, 0.25], "call": len(computed)}

    arrays = (np.arange(3.0), np.arange(4))
    first = kept(tmp_path / "kept", "day", ["h", {"TOP": 5}], arrays, compute)
    assert kept(tmp_path / "kept", "day", ["h", {"TOP": 5}], arrays, compute) == first
    assert first == {"recall": [0.5, 0.25], "call": 1}
    assert kept(tmp_path / "kept", "day", ["h", {"TOP": 6}], arrays, compute)["call"] == 2
    assert kept(tmp_path / "kept", "day", ["h", {"TOP": 5}], (arrays[0] + 1e-9, arrays[1]), compute)["call"] == 3
    assert kept(tmp_path / "kept", "night", ["h", {"TOP": 5}], arrays, compute)["call"] == 4
    assert len(list((tmp_path / "kept").iterdir())) == 4
