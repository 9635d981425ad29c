"""A package beside ours, as an installation leaves it: a module, and its entry points."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, module: str, code: str, entry_points: dict[str, dict[str, str]]) -> None:
    """Write module MODULE and its entry points, by group and name, into the folder ``site``."""
    (site / f"{module}.py").write_text(code)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{a} = {b}\n" for a, b in names.items()) for group, names in entry_points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
