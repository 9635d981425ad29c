"""CLI commands that train many jobs here: a paper's tables (trainer.recipes), a search (trainer.search)."""

from __future__ import annotations

import os
import sys

import typer


def register(app: typer.Typer) -> None:
    for command, options in ((recipe, "NAME [OPTIONS]"), (search, "SPEC.yaml SEARCH.yaml [OPTIONS]")):
        app.command(
            add_help_option=False,
            options_metavar=options,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(command)


def recipe(context: typer.Context) -> None:
    """Run a paper's tables here and report them beside the published figures (`evenkeel recipe --help`)."""
    _become("trainer.recipes.command", context)


def search(context: typer.Context) -> None:
    """Search hyperparameters of a job here, by trials on the same rows (`evenkeel search --help` shows the options)."""
    _become("trainer.search.command", context)


def _become(module: str, context: typer.Context) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])
