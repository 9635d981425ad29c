"""The build backend of pyproject.toml: setuptools, with the CPU kernel for this platform compiled into wheels."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools.build_meta import *  # noqa: F403
from setuptools.build_meta import build_wheel as _build_wheel

Settings = dict[str, Any] | None


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build the kernel, and a wheel that contains it. Raises BuildError if there is no compiler."""
    # Imported from its folder: an import of the package would need all of its dependencies.
    sys.path.insert(0, str(Path(__file__).parent.parent / "embeddings" / "kernels" / "cpu"))
    from build import build  # type: ignore[import-not-found]

    build()
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    settings = {**(config_settings or {}), "--build-option": ["--plat-name", platform]}
    return str(_build_wheel(wheel_directory, settings, metadata_directory))
