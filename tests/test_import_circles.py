"""No module imports itself by way of others, imports within functions included."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("embeddings", "trainer", "service")


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of imports that run; those for type checkers alone do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        else:
            yield from imported(node)


def circle(root: Path, packages: tuple[str, ...]) -> list[str]:
    """Return modules that import each other in a circle; none without one."""
    files = [file for package in packages for file in (root / package).rglob("*.py")]
    names = {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    graph: dict[str, set[str]] = {}
    for name, file in names.items():
        pairs = imported(ast.parse(file.read_text("utf-8")))
        found = (f"{module}.{one}" if f"{module}.{one}" in names else module for module, one in pairs)
        graph[name] = {one for one in found if one in names and one != name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_imports_in_a_circle() -> None:
    assert circle(ROOT, PACKAGES) == []


@pytest.mark.parametrize("text", ["import pack.two\n", "def f():\n    from pack.two import g\n"])
def test_a_circle_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/one.py").write_text(text, "utf-8")
    (tmp_path / "pack/two.py").write_text("from pack import one\n", "utf-8")
    assert set(circle(tmp_path, ("pack",))) == {"pack.one", "pack.two"}
    (tmp_path / "pack/two.py").write_text("if TYPE_CHECKING:\n    from pack import one\n", "utf-8")
    assert circle(tmp_path, ("pack",)) == []
