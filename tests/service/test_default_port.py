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
NAMES_IT = {
    "service/__init__.py": rf"DEFAULT_PORT = {DEFAULT_PORT}",
    "docker-compose.yml": rf"- 127\.0\.0\.1:{DEFAULT_PORT}:{DEFAULT_PORT}\n",
    "deploy/haproxy.cfg": rf"bind :{DEFAULT_PORT}\n",
    "deploy/prometheus/compose.yml": rf'"api-1:{DEFAULT_PORT}"',
    "deploy/prometheus/prometheus.yml": rf'"127\.0\.0\.1:{DEFAULT_PORT}"',
    "deploy/helm/evenkeel/templates/roles.yaml": rf'"--port" "{DEFAULT_PORT}"',
    "docs/kubernetes.md": rf"service/ek-api {DEFAULT_PORT}\n",
    "README.md": rf"http://127\.0\.0\.1:{DEFAULT_PORT}/v1/",
    "docs/operations.md": rf"`http://127\.0\.0\.1:{DEFAULT_PORT}`",
}


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


def test_what_names_the_port_names_the_default() -> None:
    for path, named in NAMES_IT.items():
        assert re.search(named, (ROOT / path).read_text("utf-8")), f"{path} names another port than DEFAULT_PORT"


def test_where_a_change_goes_names_every_file_of_the_port() -> None:
    document = (ROOT / "docs" / "development" / "where_a_change_goes.md").read_text("utf-8")
    (row,) = re.findall(r"^\| the default port \|.*$", document, re.MULTILINE)
    assert {path for path in NAMES_IT if f"`{path}`" not in row} == set()


def test_no_other_file_names_the_port() -> None:
    naming = {path for path, text in files().items() if re.search(rf"\b{DEFAULT_PORT}\b", text)}
    assert naming == {*NAMES_IT}, "take DEFAULT_PORT of service, or add the file here and in where_a_change_goes.md"
