"""Plots of reports are drawn from the reports' tables of today, and say what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.site.__main__ import plot_path
from deploy.site.plots import charts, figure, tables
from deploy.site.plots.registry import PLOTS
from deploy.site.plots.tables import Measured, Source

PAGE = """# A report

| method | AUC | sd | AUC |
|---|---|---|---|
| **ours** | **.7779** ± .0018 | 1,690 to 2,000 ms | 2.2 (1.8) |
| `peer` | 5.6 % | not asked | -3e-5 |

| method | other |
|---|---|
| before | 1 |

## Later

| case | | s |
|---|---|---|
| cold | before | 3 |
| | after | 2 |

| case | | s |
|---|---|---|
| cold | before | 9 |
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables, "REPORTS", tmp_path)
    (tmp_path / "page.md").write_text(PAGE, "utf-8")
    return tmp_path / "page.md"


def test_plots_are_of_the_tables_of_today() -> None:
    stale = [name for name, plot in PLOTS.items() if not plot.is_current(plot_path(name).read_text("utf-8"))]
    assert not stale, f"docs/pictures/reports: {stale} are out of date: run `make pictures`"


@pytest.mark.process
def test_what_the_stamp_promises_is_drawn() -> None:
    """One is drawn: all would take seconds. The name of a row is text, of which no digit is lost."""
    drawn = PLOTS["event_loop"].svg()
    assert drawn == plot_path("event_loop").read_text("utf-8")
    assert "sys.setswitchinterval(0.0001)" in drawn


def test_a_changed_table_and_a_changed_picture_are_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot, text = PLOTS["hosts"], plot_path("hosts").read_text("utf-8")
    assert not plot.is_current(text.replace("172.7", "102.7"))
    assert not plot.is_current("<svg/>")
    page = (tables.REPORTS / "hosts.md").read_text("utf-8")
    monkeypatch.setattr(tables, "REPORTS", tmp_path)
    (tmp_path / "hosts.md").write_text(page + "\nMore.\n", "utf-8")
    assert plot.is_current(text)
    (tmp_path / "hosts.md").write_text(page.replace("172.7 (164.7)", "102.7 (164.7)"), "utf-8")
    assert not plot.is_current(text)


def test_each_plot_is_shown_by_its_report_and_no_other_file_lies_there() -> None:
    assert {path.stem for path in plot_path("one_epoch").parent.iterdir()} == set(PLOTS)
    for name, plot in PLOTS.items():
        shown = f"![{plot.title}](../pictures/reports/{name}.svg)"
        assert shown in (tables.REPORTS / f"{plot.report}.md").read_text("utf-8"), f"docs/reports lacks {shown}"


def test_cells_are_read(page: Path) -> None:
    table = Source("page", "| method | AUC").read()
    assert table.columns == ["AUC", "sd", "AUC (2)"]
    assert table.measured("ours", "AUC") == Measured(0.7779, 0.0018)
    assert table.measured("ours", "AUC (2)") == Measured(2.2, 1.8)
    assert table.measured("peer", "AUC") == Measured(5.6)
    assert table.numbers("ours", "sd") == [1690, 2000]
    assert table.numbers("peer", "AUC (2)") == [-3e-5]
    named = Source("page", "| case | | s", keys=2, below="## Later").read()
    assert named.rows == {"cold / before": ["3"], "cold / after": ["2"]}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Source("page", "| nothing"), r"page.md, table '\| nothing': 0 tables begin so: name one in"),
        (Source("page", "| method"), "2 tables begin so: name one in"),
        (Source("page", "| case", below="## Never"), "no heading '## Never': name one in"),
        (Source("page", "| case", keys=0, below="## Later"), "two rows are named '': name them apart, or give more"),
    ],
)
def test_a_table_that_is_not_found_is_refused(page: Path, source: Source, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        source.read()


@pytest.mark.parametrize(
    ("row", "column", "said"),
    [
        ("theirs", "AUC", "no row 'theirs', but 'ours', 'peer': name the row as the table does"),
        ("ours", "logloss", "0 columns begin with 'logloss', of 'AUC', 'sd', 'AUC .2.': name one"),
        ("ours", "A", "2 columns begin with 'A'"),
        ("peer", "sd", "no number in 'not asked' .peer, sd.: leave the row out"),
    ],
)
def test_a_cell_that_is_not_found_is_refused(page: Path, row: str, column: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Source("page", "| method | AUC").read().numbers(row, column)


def test_names_at_the_ends_of_curves_keep_their_distance_and_order() -> None:
    places = charts._apart({"c": 0.52, "a": 0.5, "b": 0.51, "far": 0.9}, 0.1)
    assert places == pytest.approx({"a": 0.41, "b": 0.51, "c": 0.61, "far": 0.9})


def test_an_axis_that_does_not_begin_at_0_says_so() -> None:
    with figure.style():
        _, (near, from_zero) = figure.panels(2, 2.0)
        charts.dots(near, ["row"], {"ours": ("red", "o", [[Measured(0.77), Measured(0.78)]])})
        near.set(xlabel="AUC")
        charts.bars(from_zero, ["row"], {"ours": ("red", [Measured(0.77)])})
        from_zero.set(xlabel="AUC")
        for axes in (near, from_zero):
            charts.tell_start(axes)
    assert [axes.get_xlabel() for axes in (near, from_zero)] == ["AUC, not from 0", "AUC"]
