"""The bill of materials of a release."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy import sbom

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "deploy" / "requirements-cpu.lock"


def test_it_names_what_a_user_installs_as_the_lock_has_it():
    text = JsonV1Dot6(sbom.bill(LOCK)).output_as_string()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    assert document["metadata"]["component"]["name"] == "evenkeel"
    parts = {part["name"]: part for part in document["components"]}
    assert {"torch", "torchrec", "fbgemm-gpu-cpu", "ray", "pyarrow", "fastapi", "uvicorn"} <= parts.keys()
    assert not {"pytest", "ruff", "mypy", "hypothesis"} & parts.keys()
    version = re.search(r"^ray(?:\[.*\])?==(\S+)", LOCK.read_text(), re.MULTILINE)
    assert version is not None
    assert (parts["ray"]["version"], parts["ray"]["purl"]) == (version[1], f"pkg:pypi/ray@{version[1]}")
    assert parts["ray"]["hashes"]
    assert parts["ray"]["licenses"]
    needs = {one["ref"]: one.get("dependsOn", []) for one in document["dependencies"]}
    assert any(ref.startswith("starlette==") for ref in needs[f"fastapi=={parts['fastapi']['version']}"])


def test_a_lock_without_what_is_needed_is_refused(tmp_path: Path):
    lock = tmp_path / "short.lock"
    lock.write_text(re.sub(r"(?m)^fastapi==.*\n(?:    .*\n)*", "", LOCK.read_text()))
    with pytest.raises(SystemExit, match=r"short.lock: has no fastapi: update the lock"):
        sbom.bill(lock)
