"""The default port is in one Python file, and what cannot read it there names the same."""

from __future__ import annotations

import re
from pathlib import Path

from service import DEFAULT_PORT

ROOT = Path(__file__).parents[2]
PRODUCT = (
    "embeddings",
    "trainer",
    "service",
    "deploy",
    "examples",
    "docs",
    "Makefile",
    "README.md",
    "docker-compose.yml",
)
HISTORY = {"adr", "reports"}
TIMES = {
    "service/__init__.py": 1,
    "deploy/prometheus/prometheus.yml": 1,
    "README.md": 2,
    "docs/operations.md": 3,
}
"""How often a file names the port: one that was left behind is missed. One of operations.md is of containers."""
CONTAINERS = {
    "docker-compose.yml",
    "deploy/Dockerfile",
    "deploy/haproxy.cfg",
    "deploy/prometheus/compose.yml",
    "deploy/helm/evenkeel/templates/roles.yaml",
    "docs/kubernetes.md",
}
"""Of containers, whose port is given to the command and stays when the default changes."""


def files() -> dict[str, str]:
    """The product's text files by path."""
    found = [
        path for part in PRODUCT for path in ([ROOT / part] if (ROOT / part).is_file() else (ROOT / part).rglob("*"))
    ]
    text = (".py", ".sh", ".yml", ".yaml", ".md", ".js", ".html", ".cfg", "Makefile", "Dockerfile")
    return {
        str(path.relative_to(ROOT)): path.read_text("utf-8")
        for path in found
        if path.name.endswith(text) and path.is_file() and not HISTORY & set(path.parts)
    }


def times_named(text: str) -> int:
    return len(re.findall(rf"\b{DEFAULT_PORT}\b", text))


def test_every_place_that_names_the_port_names_the_default() -> None:
    assert {path: times_named((ROOT / path).read_text("utf-8")) for path in TIMES} == TIMES


def test_where_a_change_goes_names_every_file_of_the_port() -> None:
    document = (ROOT / "docs" / "development" / "where_a_change_goes.md").read_text("utf-8")
    (row,) = re.findall(r"^\| the default port \|.*$", document, re.MULTILINE)
    assert {path for path in TIMES if f"`{path}`" not in row} == set()


def test_a_container_is_told_its_port() -> None:
    commands = [
        line
        for path in sorted(CONTAINERS)
        for line in (ROOT / path).read_text("utf-8").splitlines()
        if re.search(r"\bserve\b.*0\.0\.0\.0", line)
    ]
    assert len(commands) == 5, "an image, three of compose, the chart's"
    assert [line for line in commands if not re.search(r'--port"?,? "8080"', line)] == []


def test_no_other_file_names_the_port() -> None:
    naming = {path for path, text in files().items() if times_named(text)}
    assert naming - CONTAINERS == {*TIMES}, (
        "take DEFAULT_PORT of service, or add the file here and in where_a_change_goes.md"
    )
