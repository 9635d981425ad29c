"""Uninstall packages that the service does not need (compiler, test tools) from the environment that runs this.

The service needs the dependencies in pyproject.toml except the extra ``dev``, and their dependencies in turn.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(root: str, extras: set[str]) -> set[str]:
    """Return the names of ``root`` and of all installed packages that it needs with these extras."""
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
    # pip goes last and uninstalls itself.
    for names in (superfluous, ["pip"]):
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-qq", "--yes", *names], check=True)
