"""The study of sinks says so if a promise is broken; its small form runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sinks import GOAL_ROWS_PER_SECOND, LanceReader, Look, Run, Watch, holds, measure

GOOD: dict[str, Any] = {
    "rows_per_second": GOAL_ROWS_PER_SECOND, "reads": 5, "mixed": 0, "final": True, "erased_left": 0, "rows_left": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("figure", "value"),
    [("rows_per_second", GOAL_ROWS_PER_SECOND - 1), ("reads", 0), ("mixed", 1), ("final", False), ("erased_left", 1),
     ("rows_left", False)],
)  # fmt: skip
def test_a_broken_promise_fails(figure: str, value: Any) -> None:
    assert holds(GOOD)
    assert not holds({**GOOD, figure: value})


def test_a_read_of_two_versions_is_seen() -> None:
    whole = Look(2, (1.0, 1.0), (1.0, 1.0), ("v1", "v1"))
    looks = [whole, whole._replace(norms=(1.0, 2.0)), whole._replace(rows=1), whole]

    class Reader:
        url = ""

        def look(self) -> Look:
            if len(looks) == 1:
                watch._ended.set()
            return looks.pop(0)

        rows = ids_anywhere = look

    with Watch(Reader(), {"v1": whole}) as watch:  # type: ignore[arg-type]
        watch._thread.join()
    assert (watch.reads, watch.mixed) == (4, 2)


@pytest.mark.process
def test_the_small_form_runs(tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason="lancedb is not installed")
    line = measure("lancedb", Run(tmp_path / "store", LanceReader(tmp_path / "lance"), 2000, 8), 2, random.Random(0))
    assert holds({**line, "rows_per_second": GOAL_ROWS_PER_SECOND}), line
    assert line["kills"] == 2
