"""Reports from stored results: exact tables, choices by validation, verdicts, and files that can be read again."""

from __future__ import annotations

import base64
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers.data import documents
from benchmarks.papers.pages.figures import Figures
from benchmarks.papers.pages.layout import joined, lay_out, write_report
from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table, Trial
from trainer.report_pages.section import Findings, Panel, Section

OF = documents.dataset("rows", Path("rows.parquet"), {"column": "click"})


def trial(row: str, seed: int, tried: str = "", **optimizer: Any) -> Trial:
    fields = {"optimizer": optimizer} if optimizer else {}
    job = documents.job(f"{row} {tried}", OF, model={"kind": "dnn", "hidden": [4]}, epochs=2, seed=seed, **fields)
    return Trial("t", "dnn", row, OF, job, tried)


def record(of: Trial, validation: list[float], test: list[float], state: str = "done", **fields: Any) -> dict[str, Any]:
    curves = (("validation", validation), ("test", test))
    metrics = [
        {"epoch": epoch, "split": split, "auc": value, "examples": 100}
        for split, values in curves
        for epoch, value in enumerate(values, 1)
    ]
    return {
        "name": of.name, "key": of.key, "state": state, "error": None, "metrics": metrics, "alpha": None,
        "seconds": 30.0, "finished_at": "2026-01-02T03:04:05Z", "command": "papers x", "machine": "2 cores",
        "packages": {"torch": "2.0"}, "git_commit": "0123456789abcdef", "dataset_fingerprint": "f",
    } | fields  # fmt: skip


TRIALS = tuple(
    trial(row, seed, tried, **({"kind": "adam_ar", "alpha": 0.0001} if row == "AdamAR" else {}))
    for row, tried in (("Adam", ""), ("AdamW", "decay 1"), ("AdamW", "decay 3"), ("AdamAR", ""))
    for seed in (0, 1)
)


def table(**fields: Any) -> Table:
    settings: dict[str, Any] = {
        "when": "epochs", "chosen_by": "auc", "published": {("Adam", "DNN"): (0.7, 0.6)}, "published_is": "other data",
    }  # fmt: skip
    return Table("t", "test AUC", (Column("DNN", "dnn", "auc"),), **(settings | fields))


def a_recipe(shown: Table) -> Recipe:
    claims = (
        Claim("AdamAR ends above Adam's best", "t", "dnn", ("AdamAR", "last"), ("Adam", "best"), 0.012),
        Claim("Adam ends above AdamAR", "t", "dnn", ("Adam", "last"), ("AdamAR", "last"), 0.0),
    )
    return Recipe("x", "A title", "A paper", "A protocol.", TRIALS, (shown,), claims)


@pytest.fixture
def records() -> list[dict[str, Any]]:
    """Of AdamW decay 3 is better on validation and worse on test: the choice must not see test."""
    figures = {
        ("Adam", "", 0): ([0.71, 0.70], [0.70, 0.68]),
        ("Adam", "", 1): ([0.73, 0.70], [0.72, 0.70]),
        ("AdamW", "decay 1", 0): ([0.60, 0.61], [0.90, 0.91]),
        ("AdamW", "decay 1", 1): ([0.60, 0.61], [0.90, 0.91]),
        ("AdamW", "decay 3", 0): ([0.70, 0.75], [0.50, 0.55]),
        ("AdamW", "decay 3", 1): ([0.70, 0.75], [0.52, 0.57]),
        ("AdamAR", "", 0): ([0.70, 0.75], [0.7, 0.74]),
    }
    found = [
        record(one, *figures[one.row, one.tried, one.seed], alpha=0.0001 if one.row == "AdamAR" else None)
        for one in TRIALS
        if (one.row, one.tried, one.seed) in figures
    ]
    return [*found, record(TRIALS[-1], [], [], "failed", error="rows.parquet: not there")]


def test_the_table_is_exact(records: list[dict[str, Any]], tmp_path: Path) -> None:
    recipe = a_recipe(table())
    report = write_report(recipe, records, tmp_path)
    lines = report.markdown().splitlines()
    start = lines.index("## test AUC") + 2
    assert lines[start : start + 10] == [
        "| method |  | DNN |",
        "|---|---|---|",
        "| Adam | ours | .7100/.6900 |",
        "|  | sd of 2 seeds | .0141/.0141 |",
        "|  | published | .7000/.6000 |",
        "|  | difference | +0.0100/+0.0900 |",
        "| AdamW | ours | .5100/.5600 |",
        "|  | sd of 2 seeds | .0141/.0141 |",
        "| AdamAR | ours | .7000/.7400 |",
        "",
    ]
    assert "Published: other data." in lines
    assert "AdamW, dnn: decay 3, by the validation split." in lines
    assert "AdamAR, dnn: seed 0 alone." in lines
    assert "Adam, dnn: seed" not in report.markdown()
    assert (
        "`papers x`; 2026-01-02; 2 cores; torch 2.0; commit 0123456789ab; 5 runs, 150 seconds of their clocks "
        "together." in lines
    )
    assert "| holds | AdamAR ends above Adam's best | +0.0400 (at least +0.0120; 1 seed) |" in lines
    assert "| does not hold | Adam ends above AdamAR | -0.0600 (at least +0.0000; 1 seed) |" in lines
    assert "| t/dnn/AdamAR/seed-1 | `rows.parquet: not there` |" in lines
    assert not report.is_good


def test_best_is_the_epoch_that_validation_takes(records: list[dict[str, Any]]) -> None:
    shown = table(when="best")
    figures = Figures(a_recipe(shown), {one["key"]: one for one in records})
    column = shown.columns[0]
    adam, adamw = (figures.cell(shown, column, row) for row in ("Adam", "AdamW"))
    assert adam is not None
    assert adamw is not None
    assert adam.mean == (0.71,)
    assert adamw.mean == pytest.approx((0.56,))
    lower = table(when="best", lower=True)
    worst = Figures(a_recipe(lower), {one["key"]: one for one in records}).cell(lower, column, "Adam")
    assert worst is not None
    assert worst.mean == (0.69,)


def test_smaller_is_better_where_the_table_says_so(records: list[dict[str, Any]]) -> None:
    gains = [
        Figures(recipe, {one["key"]: one for one in records}).judge(recipe.claims[1]).gain
        for recipe in (a_recipe(table()), a_recipe(table(lower=True)))
    ]
    assert gains == pytest.approx([-0.06, 0.06])


def test_a_claim_is_judged_by_seeds_that_both_sides_have(records: list[dict[str, Any]]) -> None:
    """Not at all where they have none in common."""
    recipe = a_recipe(table())
    of_seed_0 = [one for one in records if one["name"] != "t/dnn/Adam/seed-1"]
    of_seed_1 = [one for one in records if one["name"] != "t/dnn/Adam/seed-0"]
    both, first, second = (
        Figures(recipe, {one["key"]: one for one in known}).judge(recipe.claims[0])
        for known in (records, of_seed_0, of_seed_1)
    )
    assert both.gain == pytest.approx(0.74 - 0.70)
    assert both.seeds == first.seeds == (0,)
    assert both.gain == first.gain
    assert second.gain is None


def test_levels_that_do_not_compare_have_no_difference(records: list[dict[str, Any]]) -> None:
    shown = table(comparable=False)
    layout = lay_out(a_recipe(shown), Figures(a_recipe(shown), {one["key"]: one for one in records}), records)
    assert {line[1] for line in layout.sections[0].lines} == {"ours", "sd of 2 seeds", "published"}


def test_nothing_run_is_said(tmp_path: Path) -> None:
    report = write_report(a_recipe(table()), [], tmp_path)
    assert "## Not run\n\n- test AUC\n" in report.markdown()
    assert "## Claims" not in report.markdown()


def test_the_page_needs_nothing_beside_it(records: list[dict[str, Any]], tmp_path: Path) -> None:
    records[-1]["error"] = "<script>alert(1)</script>"
    write_report(a_recipe(table()), records, tmp_path)
    html = (tmp_path / "report.html").read_text("utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "<script" not in html
    (image,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert base64.b64decode(image) == (tmp_path / "t.png").read_bytes()
    assert "<td>.7100/.6900</td>" in html


def test_figures_are_printed_as_papers_print_them() -> None:
    assert joined((0.7, 0.68764, 1.01504, 122.16, -0.05), 4) == ".7000/.6876/1.0150/122.16/-.0500"
    assert joined((0.99999,), 4) == "1.0000"


def test_sections_stand_in_every_form_of_the_report(tmp_path: Path) -> None:
    """And their claims count."""
    found = Findings(
        (
            Section(
                "s", "A section", ("a", "b"), (("x", "<y>"),), ("A note.",), (Panel("p", "x", "y", {"c": [(1, 2)]}),)
            ),
        ),
        (("does not hold", "a claim", "0"),),
    )
    recipe = dataclasses.replace(a_recipe(table()), findings=lambda recipe, records, out: found)
    report = write_report(recipe, [], tmp_path)
    assert "## A section\n\n| a | b |\n|---|---|\n| x | <y> |\n\nA note.\n" in report.markdown()
    assert "| does not hold | a claim | 0 |" in report.markdown()
    html = (tmp_path / "report.html").read_text("utf-8")
    assert "<td>&lt;y&gt;</td>" in html
    assert base64.b64encode((tmp_path / "s.png").read_bytes()).decode() in html
    assert not report.is_good
