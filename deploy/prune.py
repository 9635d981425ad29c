"""Uninstalls from the environment that runs it what the service does not need: compiler, tests, tools of developers.

Needed is what pyproject.toml asks for without the extra ``dev``, and what that asks for in turn.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(root: str, extras: set[str]) -> set[str]:
    """Names of what ``root`` with these extras needs, as far as it is installed, itself among them."""
    found: set[str] = set()
    asked: dict[str, set[str]] = {}
    waiting = [(canonicalize_name(root), extras)]
    while waiting:
        name, wanted = waiting.pop()
        if name in found and wanted <= asked[name]:
            continue
        found.add(name)
        asked[name] = asked.get(name, set()) | wanted
        for line in requires(name) or ():
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *asked[name])]
            required = canonicalize_name(requirement.name)
            if required in INSTALLED and (
                requirement.marker is None or any(map(requirement.marker.evaluate, environments))
            ):
                waiting.append((required, requirement.extras))
    return found


INSTALLED = {canonicalize_name(one.metadata["Name"]) for one in distributions()}

if __name__ == "__main__":
    superfluous = sorted(INSTALLED - needed("evenkeel", {sys.argv[1], "otel"}) - {"pip"})
    print("prune:", *superfluous)
    # pip goes last, and takes itself along.
    for names in (superfluous, ["pip"]):
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qq", "--yes", *names], check=True)
