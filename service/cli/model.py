"""CLI commands that use a job's model: predict, importance, export.

They need the job's run directory, so they run on the machine that has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from service.cli.output import CommandError, JsonFlag

Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or the directory of a run.")]
WhichCheckpoint = Annotated[
    str, typer.Option(metavar="best|last|STEP", help="Which checkpoint of it (best: by its first validation metric).")
]


def register(app: typer.Typer) -> None:
    app.command()(predict)
    app.command()(importance)
    app.command()(export)


def predict(
    job: Job,
    rows: Annotated[str, typer.Argument(metavar="ROWS.parquet", help="A file or a directory of any dataset format.")],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Where scores go: a path or URI (default: ROWS.scores.parquet beside it)."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="a,b", help="Columns of the rows to keep (default: all).")
    ] = None,
    checkpoint: WhichCheckpoint = "last",
    k: Annotated[
        int | None, typer.Option(min=1, help="Items for each user, of a model of sequences (default: 10).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Score rows with a job's model on this machine: Parquet in, Parquet out, in the same order."""
    options = {"--output": output, "--columns": columns, "--checkpoint": checkpoint, "--k": k}
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    _run("trainer.inference.predict", [str(run_dir(job)), rows, *given, *(["--json"] if as_json else [])])


def importance(
    job: Job,
    rows: Annotated[
        str, typer.Argument(metavar="ROWS.parquet", help="Rows with features and label, such as a later day's.")
    ],
    metric: Annotated[
        str | None, typer.Option(metavar="auc|logloss|rmse|mae", help="What is lost (default: auc, of values rmse).")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Which of several labels.")] = None,
    max_rows: Annotated[int, typer.Option("--rows", min=2, help="How many rows are read.")] = 100_000,
    repeats: Annotated[int, typer.Option(min=2, help="How often each feature is shuffled.")] = 5,
    checkpoint: WhichCheckpoint = "last",
    as_json: JsonFlag = False,
) -> None:
    """Measure each feature's importance: the metric's loss when its values are permuted among rows."""
    options = {
        "--metric": metric, "--label": label, "--rows": max_rows, "--repeats": repeats, "--checkpoint": checkpoint,
    }  # fmt: skip
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    _run("trainer.inference.importance", [str(run_dir(job)), rows, *given, *(["--json"] if as_json else [])])


def export(
    job: Job,
    directory: Annotated[
        str | None,
        typer.Argument(metavar="DIRECTORY", help="A path or URI, not there yet (default: in the run's storage)."),
    ] = None,
    checkpoint: WhichCheckpoint = "last",
    as_json: JsonFlag = False,
) -> None:
    """Write a job's model, vocabularies and tables as files that need neither torch nor the run."""
    given = [str(run_dir(job)), *([directory] if directory is not None else []), "--checkpoint", checkpoint]
    _run("trainer.inference.export", [*given, *(["--json"] if as_json else [])])


def run_dir(job: str) -> Path:
    """Return the run directory of a job on this machine.

    Raises:
        CommandError: It is not on this machine; the error names the remedy.
    """
    # Here: they take most of the time in which every other command starts.
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
            "a model is used where its run directory is: run this there, or export it there and copy the folder",
        )
    raise CommandError(
        f"job '{job}' has no run directory under {settings.runs}",
        "`evenkeel jobs` lists ids; set EVENKEEL_HOME to the service's, or give the directory of a run",
    )


def _run(module: str, arguments: list[str]) -> None:
    """Run a module of the trainer, which imports torch, as a child process, and exit with its exit code."""
    sys.stdout.flush()
    completed = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
    raise typer.Exit(completed.returncode)
