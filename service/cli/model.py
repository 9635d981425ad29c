"""Commands that use or train models on this machine: predict, importance, export, search, generalization.

The commands predict, importance and export need the job's run directory: run them on the machine with that directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from service.cli.output import CommandError, JsonFlag

Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or the directory of a run.")]
WhichCheckpoint = Annotated[
    str,
    typer.Option(metavar="best|last|STEP", help="The job's checkpoint to use (best: by the first validation metric)."),
]

RECIPE_IS_GONE = (
    "evenkeel recipe was removed: use python -m benchmarks.papers NAME in a checkout of the sources for the papers' "
    "tables, evenkeel generalization SPEC.yaml for the report on a job"
)


def register(app: typer.Typer) -> None:
    app.command()(predict)
    app.command()(importance)
    app.command()(export)
    settings: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
    arguments = {search: "SPEC.yaml SEARCH.yaml", generalization: "SPEC.yaml|RUN_DIR"}
    for command, metavar in arguments.items():
        app.command(add_help_option=False, options_metavar=f"{metavar} [OPTIONS]", context_settings=settings)(command)
    app.command(add_help_option=False, hidden=True, context_settings=settings)(recipe)


def predict(
    job: Job,
    rows: Annotated[str, typer.Argument(metavar="ROWS.parquet", help="A file or directory in any dataset format.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", help="Path or URI to write the scores to (default: ROWS.scores.parquet beside the rows)."
        ),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="a,b", help="Columns of the rows to copy to the output (default: all).")
    ] = None,
    checkpoint: WhichCheckpoint = "last",
    k: Annotated[
        int | None,
        typer.Option(min=1, help="Rows are users: items to find for each (sequence models: 10; others score rows)."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Score rows with a job's model on this machine: Parquet in, Parquet out, in the same order."""
    options = {"--output": output, "--columns": columns, "--checkpoint": checkpoint, "--k": k}
    _run("trainer.inference.predict", [str(run_dir(job)), rows, *_given(options)], as_json)


def importance(
    job: Job,
    rows: Annotated[
        str, typer.Argument(metavar="ROWS.parquet", help="Rows with features and label, such as a later day's.")
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="auc|logloss|rmse|mae", help="The metric to measure (default: auc, or rmse for numeric labels)."
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The label to use, if the job has several.")] = None,
    max_rows: Annotated[int, typer.Option("--rows", min=2, help="Most rows to read.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=2, help="Number of times each feature is shuffled.")] = 5,
    checkpoint: WhichCheckpoint = "last",
    as_json: JsonFlag = False,
) -> None:
    """Measure each feature's importance: how much worse the metric gets when its values are permuted among rows."""
    options = {
        "--metric": metric, "--label": label, "--rows": max_rows, "--repeats": repeats, "--checkpoint": checkpoint,
    }  # fmt: skip
    _run("trainer.inference.importance", [str(run_dir(job)), rows, *_given(options)], as_json)


def export(
    job: Job,
    directory: Annotated[
        str | None,
        typer.Argument(
            metavar="DIRECTORY", help="Path or URI that does not exist yet (default: in the run's storage)."
        ),
    ] = None,
    checkpoint: WhichCheckpoint = "last",
    as_json: JsonFlag = False,
) -> None:
    """Write a job's model, vocabularies and tables as files that need neither torch nor the run."""
    target = [] if directory is None else [directory]
    _run("trainer.inference.export", [str(run_dir(job)), *target, "--checkpoint", checkpoint], as_json)


def run_dir(job: str) -> Path:
    """Return the run directory of a job on this machine.

    Raises:
        CommandError: It is not on this machine; the error names the remedy.
    """
    # Imported here: these modules take most of the time that a command needs to start.
    from service.core.settings import LOCAL_HOSTS, Settings
    from trainer.runs.directory import RUN_FILE

    if (Path(job) / RUN_FILE).is_file():
        return Path(job)
    settings = Settings.from_environment()
    directory = settings.run_dir(job)
    if Path(job).name == job and (directory / RUN_FILE).is_file():
        return directory
    url = os.environ.get("EVENKEEL_URL", "")
    if url and urlsplit(url).hostname not in LOCAL_HOSTS:
        raise CommandError(
            f"job '{job}' has no run directory under {settings.runs}, and {url} is another machine",
            "run this on the machine with the run directory, or export the model there and copy the folder",
        )
    raise CommandError(
        f"job '{job}' has no run directory under {settings.runs}",
        "`evenkeel jobs` lists ids; set EVENKEEL_HOME to the service's, or give the directory of a run",
    )


def _given(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() if value is not None for word in (name, str(value))]


def _run(module: str, arguments: list[str], as_json: bool) -> None:
    """Run a module of the trainer, which imports torch, as a child process, and exit with its exit code."""
    sys.stdout.flush()
    arguments = [*arguments, "--json"] if as_json else arguments
    completed = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
    raise typer.Exit(completed.returncode)


def search(context: typer.Context) -> None:
    """Search a job's hyperparameters on this machine by trials on the same rows (see `evenkeel search --help`)."""
    become("trainer.search.command", context)


def generalization(context: typer.Context) -> None:
    """Report how a job's model generalizes, by training it several times (see `evenkeel generalization --help`)."""
    become("trainer.generalization.command", context)


def recipe() -> None:
    """Refuse a removed command: the package no longer contains the papers' tables."""
    typer.echo(RECIPE_IS_GONE, err=True)
    raise typer.Exit(2)


def become(module: str, context: typer.Context) -> None:
    """Replace this process by a process that runs a module of the trainer."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])
