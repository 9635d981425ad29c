"""The console script ``evenkeel``: jobs, the service itself, and the checks before both.

Exit codes: 0 done, 1 failed, 2 usage or a spec that is not valid, 3 held by the gate (``submit --wait``,
``schedules backfill``). Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service import DEFAULT_PORT
from service.cli import job_status, model, output, top, vectors
from service.cli.datasets import datasets, generate, located
from service.cli.keys import keys
from service.cli.output import FAILED, HELD, USAGE, CommandError, JsonFlag, ask
from service.cli.roots import roots
from service.cli.schedules import schedules
from service.cli.sinks import sinks
from service.cli.webhooks import webhooks
from service.client import Client, ProblemError, ServiceError

if TYPE_CHECKING:
    from trainer.spec import DatasetSpec, JobSpec

app = typer.Typer(
    name="evenkeel",
    help="Trains recommenders whose item vectors stay put. Start with `evenkeel serve`, or `evenkeel train SPEC.yaml`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpecFile = Annotated[
    Path, typer.Argument(metavar="SPEC.yaml", help="A job, or a dataset and a job, as YAML documents.")
]
JobId = Annotated[str, typer.Argument(metavar="ID")]


def _print_version(show: bool) -> None:
    if show:
        typer.echo(f"evenkeel {importlib.metadata.version('evenkeel')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- running a spec --------------------------------------------------------------------------------------------------


@app.command(
    add_help_option=False,
    options_metavar="SPEC.yaml [OPTIONS]",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(context: typer.Context) -> None:
    """Train in this terminal, without a service (`evenkeel train --help` shows the trainer's options)."""
    model.become("trainer.launch.in_process", context)


@app.command()
def validate(
    spec: SpecFile,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Show what so many rows would need, and read no data; goes with --ids.")
    ] = None,
    ids: Annotated[
        list[str] | None, typer.Option(metavar="TABLE=NUMBER", help="Number of distinct ids of a table, for --rows.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a spec against its dataset, and show the resources that a run would need. Runs nothing.

    In the job of a schedule, today's date in UTC stands for ``{firing_date}``.
    """
    from trainer.spec import load_documents

    dataset, job = load_documents(spec)
    unchecked = ""
    if job is not None:
        job = job.fired_on(datetime.now(UTC).date().isoformat())
    if rows is not None or ids:
        answer = _estimate_of_numbers(spec, dataset, job, rows, ids or [])
    elif job is None:
        assert dataset is not None
        _check_files(dataset)
        _check_labels(dataset)
        answer = {"valid": True, "dataset": dataset.name, "job": None}
    elif dataset is not None:
        job = job.against(dataset)
        _check_labels(dataset)
        unchecked = _check_parent(job, dataset)
        from service.cli.serve import placement as placement_of_runs
        from trainer.sizing.estimate import estimate, too_large

        placement = placement_of_runs()
        prediction = estimate(job, dataset, placement.gpu_bytes(job))
        answer = {"valid": True, "dataset": dataset.name, "job": job.name, "estimate": prediction}
        if not prediction["rows"] and dataset.messages is None:
            raise CommandError(f"{dataset.uri}: has no rows", "point uri at data with rows", USAGE)
        problem = too_large(job, prediction, placement.memory_bytes())
        problem = problem or placement.gpu_problem(job)
        if problem is not None:
            raise CommandError(*problem, USAGE)
    else:
        with Client() as client, _naming(spec):
            answer = {"dataset": job.dataset.name, "job": job.name, **client.estimate(job)}
    if as_json:
        output.print_json(answer)
        return
    output.print_fields({"dataset": answer["dataset"], "job": answer["job"]})
    if answer.get("estimate"):
        _print_estimate(answer["estimate"])
    typer.echo(f"valid, but {unchecked}" if unchecked else "valid")


def _estimate_of_numbers(
    spec: Path, dataset: DatasetSpec | None, job: JobSpec | None, rows: int | None, ids: Sequence[str]
) -> dict[str, Any]:
    """Return the answer of ``validate`` for numbers of rows and ids, without data."""
    from trainer.sizing.estimate import Counts, estimate

    if dataset is None or job is None:
        raise CommandError(f"{spec}: --rows and --ids need a dataset and a job", "put both into the file", USAGE)
    counts = dict(one.rpartition("=")[::2] for one in ids)
    if rows is None or not all(name and number.isdecimal() for name, number in counts.items()):
        example = "such as --rows 1000000 --ids user=50000 --ids item=9000"
        raise CommandError("--rows and --ids go together", example, USAGE)
    job = job.against(dataset)
    try:
        prediction = estimate(job, dataset, counts=Counts(rows, {name: int(one) for name, one in counts.items()}))
    except ValueError as error:
        raise CommandError(str(error), code=USAGE) from None
    return {"valid": True, "dataset": dataset.name, "job": job.name, "estimate": prediction}


def _check_labels(dataset: DatasetSpec) -> None:
    """Check that the labels of the first rows are numbers."""
    from trainer.data.columns.labels import check_first_labels
    from trainer.data.errors import DataError
    from trainer.data.sources.source import Source

    if dataset.messages is not None:
        return
    try:
        check_first_labels(Source(dataset.uri, None, dataset.filter, ids=dataset.id_columns), dataset)
    except DataError as error:
        raise CommandError(f"{error.where}: {error.what}", error.remedy, USAGE) from None


def _check_parent(job: JobSpec, dataset: DatasetSpec) -> str:
    """Check that the job can start from the checkpoint of ``init_from`` on this host, and print the differences.

    Returns:
        The reason why it was not checked; "" if it was.
    """
    if job.init_from is None:
        return ""
    from embeddings.store import StoreError
    from trainer.runs.parents import check_parent, start_of

    home = Path(os.environ.get("EVENKEEL_HOME", ".evenkeel"))
    store_url = os.environ.get("EVENKEEL_STORE_URL") or str((home / "store").resolve())
    try:
        published = None if job.publish is None else job.publish.collection
        start = start_of(job.init_from, published, store_url, home / "runs")
    except (ValueError, StoreError) as error:
        return f"the parent in init_from was not checked: {error}"
    for note in check_parent(job, dataset, start.checkpoints.parent):
        output.note(note)
    return ""


@app.command()
def submit(
    spec: SpecFile,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job ends; exit 3 if the gate held its version.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job to the service. A dataset in the same file is registered first, unless it is registered already."""
    from trainer.spec import load_documents

    dataset, job = load_documents(spec)
    if job is None:
        raise CommandError(f"{spec}: holds a dataset and no job", f"register it with `evenkeel datasets add {spec}`")
    with Client() as client:
        if dataset is not None:
            job = job.against(dataset)
            _register(client, dataset, spec)
        with _naming(spec):
            answer = client.submit(job)
        if wait:
            _wait(client, answer["id"], as_json)
        else:
            remark = f"{answer['state']}; follow it with `evenkeel logs {answer['id']} -f`"
            output.print_with_note(answer, "id", remark, as_json)


def _wait(client: Client, job_id: str, as_json: bool) -> None:
    output.note(f"job {job_id}")
    try:
        with output.job_progress() as progress:
            job = client.wait(job_id, on_update=progress.update)
    except KeyboardInterrupt:
        raise CommandError(
            f"stopped waiting; job {job_id} keeps running",
            f"`evenkeel job {job_id}` shows it, `evenkeel cancel {job_id}` ends it",
            130,
        ) from None
    _print_job(job, as_json)
    if job["state"] != "succeeded":
        raise typer.Exit(FAILED)
    if (job.get("publication") or {}).get("status") == "held":
        raise typer.Exit(HELD)


# --- jobs ------------------------------------------------------------------------------------------------------------


@app.command()
def jobs(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    label: Annotated[str | None, typer.Option(help="Only jobs with this label, key=value.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs to list.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    listed = ask(Client.jobs, state=state, name=name, label=label, limit=limit)
    columns = output.headings("id", "name", "state", "progress", "auc", "publication", "created_at")
    columns["auc"] = job_status.AUC
    empty = "no jobs yet: submit one with `evenkeel submit SPEC.yaml`"
    output.print_list(listed, columns, empty, as_json, map(job_status.row, listed))


@app.command()
def job(job_id: JobId, as_json: JsonFlag = False) -> None:
    """Show one job: progress, metrics per epoch, publication, error."""
    _print_job(ask(Client.job, job_id), as_json)


@app.command()
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
) -> None:
    """Print a job's log."""
    with Client() as client:
        for text in client.follow_logs(job_id) if follow else client.read_logs(job_id):
            sys.stdout.write(text)
            sys.stdout.flush()


@app.command()
def cancel(job_id: JobId, as_json: JsonFlag = False) -> None:
    """Cancel a job; a running one writes a checkpoint first."""
    _print_state(ask(Client.cancel, job_id), as_json)


@app.command()
def retry(job_id: JobId, as_json: JsonFlag = False) -> None:
    """Run a failed or cancelled job again, from its last checkpoint."""
    _print_state(ask(Client.retry, job_id), as_json)


@app.command()
def delete(job_id: JobId) -> None:
    """Delete a job that has ended, its checkpoints and its log; versions that it published stay."""
    ask(Client.delete_job, job_id)
    typer.echo(f"job {job_id} deleted")


# --- the service -----------------------------------------------------------------------------------------------------


@app.command()
def serve(
    role: Annotated[str, typer.Option(help="The part of the service to run: all, api, scheduler or vectors.")] = "all",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = DEFAULT_PORT,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Number of processes; more than one only with --role vectors.")
    ] = 1,
) -> None:
    """Start the service; the dashboard is at `/`."""
    from service.cli.serve import serve as run

    raise typer.Exit(run(role, host, port, workers))


@app.command()
def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC.yaml]", help="Also check that this job would fit this machine.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check this machine: python, packages, ports, memory, disk, GPU, Ray, service. Exit 1 if anything fails."""
    from service.ops.doctor import examine

    checks = examine(spec)
    if as_json:
        output.print_json([check._asdict() for check in checks])
    else:
        console = output.out()
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in checks:
            console.print(f"[{colours[check.level]}]{check.level:<4}[/]  {check.name:<9}  ", end="")
            console.print(check.message, markup=False)
            if check.remedy:
                console.print(f"      {'':<9}  remedy: {check.remedy}", markup=False)
    if any(check.level == "fail" for check in checks):
        raise typer.Exit(FAILED)


@app.command()
def retention(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing, only count what would be removed.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove data past its retention time, as the service does daily. Run it on the service's own machine."""
    from service.cli.serve import sweep

    output.print_fields(sweep(dry_run), as_json)


@app.command()
def clean(as_json: JsonFlag = False) -> None:
    """Remove prepared data that runs on this machine share (EVENKEEL_CACHE); runs keep their own links to it."""
    from trainer.data.prepare.shared import clean_host

    try:
        output.print_fields({"bytes": clean_host()}, as_json)
    except OSError as error:
        raise CommandError(str(error), "check the folder that EVENKEEL_CACHE names", output.USAGE) from None


app.command()(top.top)
vectors.register(app)
model.register(app)
app.command()(generate)
app.add_typer(datasets, name="datasets")
app.add_typer(roots, name="roots")
app.add_typer(schedules, name="schedules")
app.add_typer(keys, name="keys")
app.add_typer(webhooks, name="webhooks")
app.add_typer(sinks, name="sinks")


# --- helpers ---------------------------------------------------------------------------------------------------------


def _check_files(dataset: DatasetSpec) -> None:
    """Check a dataset's files and columns as the service does, but accept files outside the service's data roots."""
    from service.core.errors import Problem
    from service.core.settings import Settings
    from service.datasets import registry
    from trainer.spec.uri_schemes import OBJECT_PREFIXES

    topics = () if dataset.messages is None else (dataset.uri,)
    # The service that will use the dataset may have another home, so none is named here.
    anywhere = Settings(
        home=Path(os.devnull), data_roots=(Path("/"),), object_roots=OBJECT_PREFIXES, topic_roots=topics
    )
    try:
        registry.check_files(anywhere, dataset)
    except Problem as problem:
        raise CommandError(problem.detail, problem.remedy, USAGE) from None


def _register(client: Client, dataset: DatasetSpec, file: Path) -> None:
    """Register the dataset in a job's file; refuse if a different dataset is registered under its name."""
    dataset = located(dataset) if client.is_local else dataset
    try:
        stored = client.dataset(dataset.name)
    except ProblemError as error:
        if error.status != 404:
            raise
        client.add_dataset(dataset)
        output.note(f"dataset {dataset.name} registered")
        return
    registered = type(dataset).model_validate({key: value for key, value in stored.items() if key != "created_at"})
    # Compared as JSON text, because the order of features and labels counts.
    documents = [document.model_dump(mode="json") for document in (dataset, registered)]
    sent, stored = ({field: json.dumps(part) for field, part in document.items()} for document in documents)
    differ = sorted(field for field in sent.keys() | stored.keys() if sent.get(field) != stored.get(field))
    if differ:
        raise CommandError(
            f"{file}: the registered dataset '{dataset.name}' is a different one: it has another {', '.join(differ)}",
            f"give this one another name, or `evenkeel datasets update {file}` first; to train on the one that "
            "is registered, leave the dataset out of the file",
            USAGE,
        )


@contextlib.contextmanager
def _naming(spec: Path) -> Iterator[None]:
    """Turn a refusal of the spec into a usage error; that of an unknown dataset names the command to register it."""
    try:
        yield
    except ProblemError as error:
        unknown = [problem for problem in error.errors if problem.get("field") == "dataset.name"]
        if error.status != 422:
            raise
        if not unknown or "registered" not in str(unknown[0].get("message")):
            raise CommandError(f"{spec}: {error.message}", error.remedy, USAGE) from None
        message = f"{spec}: dataset.name: {unknown[0]['message']}"
        raise CommandError(
            message, "put the dataset into the file, or register it with `evenkeel datasets add FILE.yaml`", USAGE
        ) from None


def _print_state(job: Mapping[str, Any], as_json: bool) -> None:
    output.print_answer(job, f"{job['id']}  {job['state']}", as_json)


def _print_job(job: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        output.print_json(job)
        return
    fields = ("id", "name", "state", "attempt", "created_at", "started_at", "finished_at")
    publication, error = job.get("publication") or {}, job.get("error") or {}
    output.print_fields(
        {field.removesuffix("_at"): job.get(field) for field in fields}
        | {"workers": _workers(job), "reason": job.get("reason"), "progress": job_status.progress(job)}
        | {"processors": job_status.starved(job), "publication": job_status.status(publication)}
        | {"error": error.get("message"), "code": error.get("code"), "remedy": error.get("remedy")}
        | {"warnings": "; ".join((job.get("lineage") or {}).get("warnings") or ())}
    )
    job_status.explain(publication)
    job_status.judge(publication)
    job_status.compare(publication)
    metrics = job.get("metrics") or []
    if metrics:
        # Nested tables (calibration, frequency buckets) are shown only in the report.
        plain = [name for metric in metrics for name, value in metric.items() if not isinstance(value, list | dict)]
        names = [name for name in dict.fromkeys(plain) if name not in ("time", "attempt")]
        typer.echo()
        best = job_status.best_epoch(job)
        rows = [{**metric, "bold": metric.get("epoch") == best} for metric in metrics]
        output.print_table(rows, {name: name.upper() for name in names}, "")
        if best is not None:
            output.note(f"best epoch by validation: {best}")


def _workers(job: Mapping[str, Any]) -> str:
    """Return the number of workers, with the reason if it was reduced; attempt by attempt if attempts differ."""
    attempts = job.get("attempts") or []
    counts = [
        f"{attempt['workers']}{' (' + attempt['because'] + ')' if attempt['because'] else ''}" for attempt in attempts
    ]
    if len(set(counts)) < 2:
        return counts[0] if counts else ""
    return "; ".join(f"attempt {attempt['attempt']}: {text}" for attempt, text in zip(attempts, counts, strict=True))


def _print_estimate(estimate: Mapping[str, Any]) -> None:
    steps, seconds = estimate["steps"], estimate["seconds_per_epoch"]
    output.print_fields(
        {
            "rows": f"{estimate['rows']:,}",
            "steps": f"{steps:,}, {estimate['steps_per_epoch']:,} per epoch",
            "memory": f"{output.size(estimate['peak_memory_bytes'])} at its peak, all processes",
            "per rank": f"{output.size(estimate['peak_memory_bytes_per_rank'])}, of which rows and their state "
            f"{output.size(estimate['table_bytes_per_rank'])}",
            "time": f"about {seconds:g} seconds per epoch" if seconds >= 1 else "less than a second per epoch",
        }
    )
    typer.echo()
    tables = [
        {"table": name, "rows": f"{table['rows']:,}", "size": output.size(table["bytes"])}
        for name, table in estimate["tables"].items()
    ]
    output.print_table(tables, output.headings("table", "rows", "size"), "")
    typer.echo()
    for line in estimate["arithmetic"]:
        output.note(line)


def main() -> None:
    """Run a command; every error that a user can fix ends as one message and an exit code, never as a traceback."""
    try:
        app()
    except CommandError as error:
        output.error(error.message, error.remedy)
        sys.exit(error.code)
    except ServiceError as error:
        output.error(error.message, error.remedy)
        sys.exit(USAGE if isinstance(error, ProblemError) and error.status == 422 else FAILED)
    except (ValueError, TimeoutError) as error:
        from trainer.spec.problems import InvalidFieldsError  # at the start of a command it would take too long

        output.error(str(error))
        sys.exit(USAGE if isinstance(error, InvalidFieldsError) else FAILED)
    except BrokenPipeError:
        # The reader of the pipe has exited (`| head`): not an error, but nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        output.error(f"{where}{error.strerror or error}")
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
