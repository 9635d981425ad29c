"""The port that everything outside of Python names is the one that the service takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service import DEFAULT_PORT

ROOT = Path(__file__).parents[2]
NAMED = {
    "docker-compose.yml": r"127\.0\.0\.1:(\d+)(?::\1)?\b",
    "deploy/Dockerfile": r"(?:EXPOSE |127\.0\.0\.1:)(\d+)",
    "deploy/prometheus/prometheus.yml": r'"127\.0\.0\.1:(\d+)"',
    "Makefile": r"http://127\.0\.0\.1:(\d+)",
    "examples/demo.py": r"dashboard at http://127\.0\.0\.1:(\d+)",
    "README.md": r"http://127\.0\.0\.1:(\d+)",
}


@pytest.mark.parametrize("file", NAMED)
def test_a_file_that_names_the_port_names_the_default(file: str) -> None:
    ports = set(re.findall(NAMED[file], (ROOT / file).read_text("utf-8")))
    assert str(DEFAULT_PORT) in ports
    assert ports <= {str(DEFAULT_PORT), "8265", "6379", "5432"}, "other ports are those of Ray, Redis and PostgreSQL"
