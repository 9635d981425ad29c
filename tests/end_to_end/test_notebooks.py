"""The notebooks of examples/notebooks run, print what they show, and are kept as Jupyter keeps them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deploy.site import hooks
from deploy.site.notebooks import NOTEBOOKS, code_cells, form, printed, run

ROOT = Path(__file__).resolve().parents[2]
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures may differ from machine to machine; what is asserted of them stands in the notebook."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    notebook = json.loads(path.read_text("utf-8"))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook, path.name), strict=True), 1):
        assert form(text) == form(printed(cell)), f"{path.name}, code cell {number}: run `make notebooks`"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_small_and_named(path: Path) -> None:
    notebook = json.loads(path.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert [cell["execution_count"] for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert {output["output_type"] for cell in code_cells(notebook) for output in cell["outputs"]} == {"stream"}
    assert path.stat().st_size < 20_000
    assert f"notebooks/{path.name}" in (ROOT / "examples" / "README.md").read_text("utf-8")
    assert f"examples/notebooks/{path.name}" in hooks.OUTSIDE.values()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", hooks.as_markdown(path.read_text("utf-8"))):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"


def test_a_cell_that_fails_is_named() -> None:
    cells = [{"cell_type": "markdown", "source": ["# Title"]}]
    cells += [{"cell_type": "code", "source": [source]} for source in ("x = 1\n", "print(y)\n")]
    with pytest.raises(RuntimeError, match=r"a.ipynb, code cell 2: NameError.*'y' is not defined") as raised:
        run({"cells": cells}, "a.ipynb")
    assert isinstance(raised.value.__cause__, NameError)


def test_texts_of_one_form_differ_in_numbers_alone() -> None:
    assert form("AUC  0.97  ####\n1,000 rows in /tmp/a1/run") == form("AUC 1.00 ##\n30 rows in /tmp/xyz/b")
    assert form("+0.003 from epoch 1") == form("-0.04 from epoch 1")
    assert form("AUC 0.97") != form("NDCG 0.97")
    assert form("AUC 0.97 0.96") == form("AUC 0.97")
    assert form("AUC nan") != form("AUC 0.97")
