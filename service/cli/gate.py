"""CLI commands for the gate: calibration and canaries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import output
from service.cli.output import CommandError, JsonFlag
from service.client import Client, ProblemError

if TYPE_CHECKING:
    from trainer.spec import JobSpec

Collection = Annotated[str, typer.Argument(metavar="COLLECTION")]
canaries = typer.Typer(help="Canaries: frozen consumers that read every candidate first.", no_args_is_help=True)
MIN_RUNS = 3
FIRST_SEED = 1_000_000


def register(app: typer.Typer) -> None:
    app.command()(calibrate)
    app.add_typer(canaries, name="canaries")


# --- calibrate -------------------------------------------------------------------------------------------------------


def calibrate(
    collection: Collection,
    runs: Annotated[int, typer.Option(min=MIN_RUNS, help="Null refreshes to measure.")] = 5,
    spec: Annotated[
        Path | None, typer.Option(help="The job that refreshes the collection (default: that of its current version).")
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="METRIC=VALUE", help="A limit of your own, put in place of the found.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Set the gate's limits from refreshes that differ only by chance.

    The job that refreshes the collection runs RUNS + 1 times with different seeds, each starting from the previous one,
    and publishes to a scratch collection; what is served does not change.
    """
    from embeddings.refresh.scratch import scratch_name

    limits = _limits(limit or [])
    scratch = scratch_name(collection)
    with Client() as client:
        job = _refresh_of(client, collection, spec)
        if job.init_from is None:
            output.note("the job trains from scratch, so its nulls do: a warm start (init_from) holds vectors better")
        versions: list[str] = []
        for number in range(runs + 1):
            version = _null(client, null_job(job, collection, scratch, number), scratch, number)
            if number == 0:
                client.copy_canaries(collection, scratch)
            else:
                versions.append(version)
        calibration = client.calibrate(collection, scratch, versions, limits)
    if as_json:
        output.print_json(calibration)
        return
    rows = [
        {"metric": name, **null, "limit": calibration["limits"].get(name)}
        for name, null in calibration["nulls"].items()
    ]
    columns = {"metric": "METRIC", "mean": "NULL MEAN", "spread": "SPREAD", "worst": "WORST", "limit": "LIMIT"}
    output.print_table(rows, columns, "")
    if calibration["unstable"]:
        output.note(
            f"{', '.join(calibration['unstable'])}: the nulls themselves do not reach the least that is asked for, so "
            "such refreshes will be held: refresh from a warm start (init_from), or train longer"
        )


def null_job(job: JobSpec, collection: str, scratch: str, number: int) -> JobSpec:
    """Return the job of the ``number``-th null refresh: with its own seed, and always published to ``scratch``.

    The first one starts where the next refresh of the collection would, each later one from the one before it.
    """
    assert job.publish is not None, "_refresh_of has refused a job that publishes nothing"
    gate = job.publish.gate.model_copy(update={"mode": "report", "calibrate": "off"})
    publish = job.publish.model_copy(update={"collection": scratch, "gate": gate, "views": ()})
    start = job.init_from
    if start is not None:
        # A refresh's other words on its start (rows given up, for one) stay.
        origin = collection if number == 0 else scratch
        start = start.model_copy(update={"collection": origin, "version": "current", "job": None, "held": "skip"})
    name = f"{job.name[:50]}-null-{number}"
    return job.model_copy(update={"name": name, "seed": FIRST_SEED + number, "publish": publish, "init_from": start})


def _refresh_of(client: Client, collection: str, spec: Path | None) -> JobSpec:
    from trainer.spec import load_documents, parse_job

    if spec is not None:
        _, document = load_documents(spec)
        if document is None:
            raise CommandError(f"{spec}: holds no job", "name a file with the job that refreshes the collection")
        job = document
    else:
        manifest = client.version(collection)
        if not manifest.get("job"):
            raise CommandError(
                f"version {manifest['version']} of '{collection}' names no job", "give the job: --spec SPEC.yaml"
            )
        try:
            job = parse_job(client.job(manifest["job"])["spec"], f"job {manifest['job']}")
        except (KeyError, ProblemError) as error:
            raise CommandError(
                f"job {manifest['job']} of version {manifest['version']} is not known here: {error}",
                "give the job that refreshes the collection: --spec SPEC.yaml",
            ) from None
    target = None if job.publish is None else job.publish.collection
    if target != collection:
        raise CommandError(
            f"the job publishes to {target!r}, not to '{collection}'",
            "name the job that refreshes this collection",
        )
    return job


def _null(client: Client, job: JobSpec, scratch: str, number: int) -> str:
    job_id = client.submit(job)["id"]
    output.note(f"null refresh {number}: job {job_id}")
    with output.job_progress() as progress:
        ended = client.wait(job_id, on_update=progress.update)
    publication = ended.get("publication") or {}
    if ended["state"] != "succeeded" or publication.get("status") != "published":
        why = (ended.get("error") or {}).get("message") or "; ".join(publication.get("reasons") or ())
        raise CommandError(
            f"null refresh {number} (job {job_id}) {ended['state']}, {publication.get('status', 'none')}: {why}",
            f"look at `evenkeel logs {job_id}`, then calibrate again; nothing has changed",
        )
    return str(publication["version"])


def _limits(words: list[str]) -> dict[str, float]:
    limits = {}
    for word in words:
        name, equals, value = word.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            equals = ""
        if not name or not equals:
            raise CommandError(f"--limit {word}: not METRIC=VALUE", "such as newly_carried=0.3", output.USAGE)
    return limits


# --- canaries --------------------------------------------------------------------------------------------------------


@canaries.command("add")
def add_canary(
    collection: Collection,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    labels: Annotated[str, typer.Argument(metavar="LABELS.parquet", help="Columns id and label.")],
    as_json: JsonFlag = False,
) -> None:
    """Fit a frozen consumer on the current version; it is evaluated on every candidate from now on."""
    with Client() as client:
        here = client.is_local and "://" not in labels and Path(labels).exists()
        (answer,) = client.add_canary(collection, name, str(Path(labels).absolute()) if here else labels)["items"]
    text = (
        f"canary {name}: {answer['num_items']} items, {len(answer['classes'])} classes, "
        f"accuracy {answer['accuracy']:.3f} (most frequent class {answer['majority']:.3f})"
    )
    output.print_answer(answer, text, as_json)


@canaries.command("list")
def list_canaries(collection: Collection, as_json: JsonFlag = False) -> None:
    """List a collection's canaries."""
    with Client() as client:
        listed = client.canaries(collection)
    columns = {
        "name": "NAME", "version": "FITTED ON", "anchor_generation": "GENERATION", "num_items": "ITEMS",
        "classes": "CLASSES", "accuracy": "ACCURACY", "created_at": "CREATED",
    }  # fmt: skip
    empty = f"'{collection}' has no canary: `evenkeel canaries add` makes one"
    output.print_list(listed, columns, empty, as_json, lambda one: {**one, "classes": len(one["classes"])})


@canaries.command("delete")
def delete_canary(collection: Collection, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Delete a canary."""
    with Client() as client:
        client.delete_canary(collection, name)
    typer.echo(f"canary {name} removed")
