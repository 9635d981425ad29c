"""The study of refreshes on fewer days: all of its stages on a small log, and what its table and its exit code say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import news_windows
from benchmarks.news_windows import Line, lose, main, tables
from embeddings.vectors.item_vectors import ItemVectors

HONEST: Line = {
    "windows": "2:1", "case": "honest", "refreshes": 20, "held": 1, "carried": [0.2, 0.3], "newly_carried": [],
    "newly_carried_rise": [], "unreplaced": [], "unreplaced_traffic": [],
}  # fmt: skip


@pytest.mark.process
@pytest.mark.slow
def test_every_stage_on_a_small_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(news_windows, "ROWS_A_DAY", 500)
    code = main(
        ["--stay", "--windows", "2:2", "--faults", "2:2", "--seeds", "1", "--refreshes", "2", "--folder", str(tmp_path)]
    )
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    honest, *others = lines
    # Of so small a log two days share too few items to be aligned: each refresh is held, and the study says so.
    assert (honest["refreshes"], honest["held"], honest["held_by"]) == (2, 2, [["shared"]] * 2)
    assert code == 1
    assert [line["what"] for line in others if line["case"] == "lost"] == [
        *(f"{share:g} of the items, not {how}" for share in news_windows.LOST for how in ("trained", "there")),
        "the last days, half of them",
    ]
    faults = {line["fault"] for line in others if line["case"] == "fault"}
    assert len(faults) == 10
    assert all("finite" in line["caught_by"] for line in others if line.get("fault") == "NaN rows")
    assert all(line["bench"] == "news_windows" and line["windows"] == "2:2" for line in lines)
    assert "| 2:2 | 0 of 2 |" in out
    assert "| NaN rows, 0.001 | 1 of 1 |" in out


def test_lost_items_keep_their_rows_and_lose_what_trained_them() -> None:
    evidence = np.array([True] * 8 + [False] * 2)
    items = ItemVectors(
        list(range(10)), np.ones((10, 2), np.float32), norms=np.ones(10), evidence=evidence, counts=np.arange(10)
    )
    lost = lose(items, 0.5, seed=1)
    gone = items.evidence & ~lost.evidence
    assert gone.sum() == 4
    assert lost.counts is not None
    assert (lost.counts[gone] == 0).all()
    assert (lost.counts[~gone] == np.arange(10)[~gone]).all()
    assert len(lost) == 10
    assert items.evidence.sum() == 8


def test_the_table_has_the_largest_figure_and_what_held() -> None:
    lost: Line = {"windows": "2:1", "case": "lost", "what": "half"}
    found = tables([HONEST, {**lost, "caught_by": ["carried"]}, {**lost, "caught_by": []}])
    assert "| 2:1 | 19 of 20 | 0.30 |  |" in found
    assert "| half | 1 of 2 |" in found


@pytest.mark.parametrize(("held", "code"), [(1, 0), (2, 1)])
def test_more_than_one_of_twenty_held_fails(
    held: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def studied(flow: Any, faults: bool) -> list[Line]:
        return [{**HONEST, "held": held}]

    monkeypatch.setattr(news_windows, "Flow", lambda *settings: None)
    monkeypatch.setattr(news_windows, "study", studied)
    assert main(f"--windows 2:1 --seeds 1 --folder {tmp_path}".split()) == code
