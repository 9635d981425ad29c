"""The default port is in one Python file, and what cannot read it there names the same."""

from __future__ import annotations

import re
from collections import Counter
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
    ".env.example",
)
HISTORY = {"adr", "reports"}
PLACES = {
    "service/__init__.py": ("^[A-Z_]+ = PORT$",),
    "docker-compose.yml": (r"service on http://127\.0\.0\.1:PORT,", r"- 127\.0\.0\.1:\$\{\w+:-PORT\}:"),
    "deploy/prometheus/prometheus.yml": (r'"127\.0\.0\.1:PORT"',),
    ".env.example": (r"^EVENKEEL_P\w+=PORT$",),
    "README.md": ("make serve .*:PORT,", "http://.*:PORT/v1/"),
    "docs/guides/operations.md": ("docker compose up .*:PORT$",),
    "docs/guides/several_hosts.md": ("EVENKEEL_INTERNAL_URL=.*:PORT$", "report to http://.*:PORT and"),
    "docs/guides/kubernetes.md": ("port-forward .* PORT:",),
}
"""Where a file names the port: one that was left behind is missed."""
CONTAINER_PORT = 8080
"""Of containers: their commands name it, and it stays when the default changes."""
OF_CONTAINERS = {
    "docker-compose.yml": 5,
    "deploy/Dockerfile": 2,
    "deploy/haproxy.cfg": 7,
    "deploy/prometheus/compose.yml": 4,
    "deploy/helm/evenkeel/templates/roles.yaml": 3,
    "docs/guides/kubernetes.md": 1,
}


def files() -> dict[str, str]:
    """The product's text files by path."""
    found = [
        path for part in PRODUCT for path in ([ROOT / part] if (ROOT / part).is_file() else (ROOT / part).rglob("*"))
    ]
    text = (".py", ".sh", ".yml", ".yaml", ".md", ".js", ".html", ".cfg", ".example", "Makefile", "Dockerfile")
    return {
        str(path.relative_to(ROOT)): path.read_text("utf-8")
        for path in found
        if path.name.endswith(text) and path.is_file() and not HISTORY & set(path.parts)
    }


def times_named(text: str) -> int:
    return len(re.findall(rf"\b{DEFAULT_PORT}\b", text))


def test_every_place_that_names_the_port_names_the_default() -> None:
    for path, places in PLACES.items():
        for place in places:
            pattern = place.replace("PORT", str(DEFAULT_PORT))
            assert re.search(pattern, (ROOT / path).read_text("utf-8"), re.MULTILINE), f"{path}: {pattern}"


def test_where_a_change_goes_names_every_file_of_the_port() -> None:
    document = (ROOT / "docs" / "development" / "where_a_change_goes.md").read_text("utf-8")
    (row,) = re.findall(r"^- \*\*the default port\*\*: .*(?:\n  .*)*", document, re.MULTILINE)
    assert {path for path in PLACES if f"`{path}`" not in row} == set()


def test_a_container_is_told_its_port() -> None:
    commands = [
        line
        for path in sorted(OF_CONTAINERS)
        for line in (ROOT / path).read_text("utf-8").splitlines()
        if re.search(r"\bserve\b.*0\.0\.0\.0", line)
    ]
    assert len(commands) == 5, "an image, three of compose, the chart's"
    assert [line for line in commands if not re.search(rf'--port"?,? "{CONTAINER_PORT}"', line)] == []


def test_no_other_place_names_the_port() -> None:
    expected = Counter({path: len(places) for path, places in PLACES.items()})
    if DEFAULT_PORT == CONTAINER_PORT:
        expected.update(OF_CONTAINERS)
    naming = {path: times for path, text in files().items() if (times := times_named(text))}
    assert naming == expected, "take DEFAULT_PORT of service, or add the place here and in where_a_change_goes.md"
