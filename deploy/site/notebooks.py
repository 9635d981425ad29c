"""Run the notebooks of examples/notebooks and keep what their cells print: ``python -m deploy.site.notebooks``.

Code cells are run in order in this process, without Jupyter, so the test suite needs no Jupyter either.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the code cells of a notebook's document."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """Return the output of a cell that the notebook's file holds."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run(notebook: dict[str, Any], name: str) -> list[str]:
    """Run the code cells of a notebook and return what each printed.

    Call it on the main thread if a cell trains.

    Args:
        notebook: The notebook's document.
        name: Its name in messages.

    Raises:
        RuntimeError: A cell failed, with its error as the cause.
    """
    variables: dict[str, Any] = {"__name__": "__main__"}
    texts = []
    for number, cell in enumerate(code_cells(notebook), 1):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                exec(compile("".join(cell["source"]), f"{name}, code cell {number}", "exec"), variables)
        except Exception as error:
            raise RuntimeError(
                f"{name}, code cell {number}: {error!r}: run it in Jupyter, or fix the code that it uses"
            ) from error
        texts.append(said.getvalue())
    return texts


def form(text: str) -> str:
    """Return a text with numbers, progress bars, spaces and paths replaced, so that outputs of two runs are equal."""
    text = re.sub(r"/\S+", "/", text)
    return re.sub(r"[ +#-]*([\d.,]*\d[ +#-]*|#[ #]*)+", " # ", text).strip()


def main() -> None:
    """Run every notebook and write what its cells print into it."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = json.loads(path.read_text("utf-8"))
        texts = run(notebook, path.name)
        for number, (cell, text) in enumerate(zip(code_cells(notebook), texts, strict=True), 1):
            cell["execution_count"] = number
            cell["outputs"] = (
                [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []
            )
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(path.name, file=sys.stderr)


if __name__ == "__main__":
    main()
