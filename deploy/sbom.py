"""Write the bill of materials of an installation as CycloneDX 1.6: evenkeel, what it needs, versions, hashes, licences.

    python deploy/sbom.py deploy/requirements-cpu.lock build/sbom.json

Versions and hashes come from the lock. The metadata of the installation that runs this script say which packages of the
lock a user needs; packages that only developers need are left out.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "evenkeel"
ALIASES = {"fbgemm-gpu": ("fbgemm-gpu-cpu",)}
"""Other names under which a required package may be installed."""
UNLOCKED = (ROOT, "torch")
"""Packages that the lock lacks; torch's build differs between indexes, so no hash fits (deploy/setup.sh)."""


def needed(root: str) -> dict[str, list[str]]:
    """Return {package: its direct dependencies, those of requested extras too} of a package and its dependencies."""
    found: dict[str, list[str]] = {}
    work: list[tuple[str, frozenset[str]]] = [(root, frozenset())]
    seen = set()
    while work:
        name, extras = work.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        needs = found.setdefault(name, [])
        for one in _requirements(name, extras):
            need = _installed_name(canonicalize_name(one.name))
            needs.append(need)
            work.append((need, frozenset(one.extras)))
    return {name: sorted(set(needs)) for name, needs in sorted(found.items())}


def pinned(lock: Path) -> dict[str, tuple[str, list[str]]]:
    """Return version and SHA-256 hashes of each package of a lock."""
    found: dict[str, tuple[str, list[str]]] = {}
    for block in re.split(r"\n(?=\S)", lock.read_text("utf-8")):
        pin = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;]+)", block)
        if pin:
            found[canonicalize_name(pin[1])] = (pin[2], re.findall(r"sha256:([0-9a-f]{64})", block))
    return found


def bill(lock: Path) -> Bom:
    """Return the bill of materials of the lock's packages that a user needs.

    Raises:
        SystemExit: A needed package is not in the lock.
    """
    pins, graph = pinned(lock), needed(ROOT)
    missing = sorted(graph.keys() - pins.keys() - set(UNLOCKED))
    if missing:
        raise SystemExit(f"{lock}: has no {', '.join(missing)}: update the lock with `make lock`")
    pins |= {name: (importlib.metadata.version(name), []) for name in UNLOCKED}
    parts = {name: _component(name, *pins[name]) for name in graph}
    bom = Bom()
    bom.metadata.component = parts[ROOT]
    for name, part in parts.items():
        if name != ROOT:
            bom.components.add(part)
        bom.register_dependency(part, [parts[need] for need in graph[name]])
    return bom


def _installed_name(name: str) -> str:
    for one in (name, *ALIASES.get(name, ())):
        if next(importlib.metadata.distributions(name=one), None) is not None:
            return one
    return name


def _requirements(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    for line in importlib.metadata.requires(name) or ():
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (extras or {""})):
            yield one


def _component(name: str, version: str, hashes: list[str]) -> Component:
    metadata = importlib.metadata.metadata(name)
    component = Component(
        name=name,
        version=version,
        type=ComponentType.APPLICATION if name == ROOT else ComponentType.LIBRARY,
        purl=PackageURL("pypi", name=name, version=version),
        bom_ref=f"{name}=={version}",
        description=metadata["Summary"],
        # Each platform's wheel has its own hash.
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes],
    )
    text = metadata["License-Expression"] or metadata["License"]
    if text and "\n" not in text and len(text) < 100:
        component.licenses.add(LicenseFactory().make_from_string(text))
    return component


def main() -> None:
    """Write the bill of materials of the lock that the first argument names to the file that the second names."""
    lock, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    bom = bill(lock)
    target.write_text(JsonV1Dot6(bom).output_as_string(indent=1) + "\n", "utf-8")
    sys.stdout.write(f"{target}: {len(bom.components)} packages\n")


if __name__ == "__main__":
    main()
