"""Imports all that ``evenkeel serve`` does in any role, and what Python imports with the first use."""

from __future__ import annotations

import importlib

import pandas  # noqa: F401  # pyarrow does, with its first array

import service.app  # noqa: F401
from service.api import routes
from service.cli import entrypoint, main, serve  # noqa: F401

for _name in routes.MODULES:
    importlib.import_module(f"service.api.routes.{_name}")
