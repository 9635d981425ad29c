"""CLI commands that train several jobs here, and the refusal of one that is gone."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

RECIPE_IS_GONE = (
    "evenkeel recipe is gone: the papers' tables are python -m benchmarks.papers NAME in a checkout of the sources, "
    "the report on a job is evenkeel generalization SPEC.yaml"
)


def register(app: typer.Typer) -> None:
    settings: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
    arguments = {search: "SPEC.yaml SEARCH.yaml", generalization: "SPEC.yaml|RUN_DIR"}
    for command, metavar in arguments.items():
        app.command(add_help_option=False, options_metavar=f"{metavar} [OPTIONS]", context_settings=settings)(command)
    app.command(add_help_option=False, hidden=True, context_settings=settings)(recipe)


def search(context: typer.Context) -> None:
    """Search hyperparameters of a job here, by trials on the same rows (`evenkeel search --help` shows the options)."""
    _become("trainer.search.command", context)


def generalization(context: typer.Context) -> None:
    """Report how a job's model generalizes, by trainings here (`evenkeel generalization --help` shows the options)."""
    _become("trainer.generalization.command", context)


def recipe() -> None:
    """Refuse: the papers' tables left the package."""
    typer.echo(RECIPE_IS_GONE, err=True)
    raise typer.Exit(2)


def _become(module: str, context: typer.Context) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])
