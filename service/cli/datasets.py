"""Commands for datasets, and the generator of synthetic click logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import output
from service.cli.output import CommandError, JsonFlag, ask
from service.client import Client

if TYPE_CHECKING:
    from trainer.spec import DatasetSpec


datasets = typer.Typer(
    help="Datasets: register, propose, fetch public ones, list, profile, update, delete.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME")]


@datasets.command("add")
def add_dataset(file: Annotated[Path, typer.Argument(metavar="FILE.yaml")], as_json: JsonFlag = False) -> None:
    """Register the dataset in a YAML file."""
    _send(file, Client.add_dataset, "registered", as_json)


@datasets.command("update")
def update_dataset(file: Annotated[Path, typer.Argument(metavar="FILE.yaml")], as_json: JsonFlag = False) -> None:
    """Replace the registered dataset of the same name; jobs keep the dataset that they were submitted with."""
    _send(file, Client.update_dataset, "updated", as_json)


def _send(file: Path, send: Callable[[Client, DatasetSpec], Mapping[str, Any]], done: str, as_json: bool) -> None:
    from trainer.spec import load_documents

    dataset, _ = load_documents(file)
    if dataset is None:
        raise CommandError(f"{file}: holds a job and no dataset", "`evenkeel datasets infer DATA.parquet` proposes one")
    with Client() as client:
        answer = send(client, located(dataset) if client.is_local else dataset)
    output.print_answer(answer, f"dataset {dataset.name} {done}", as_json)


def located(dataset: DatasetSpec) -> DatasetSpec:
    """Make relative paths of existing files absolute: the service on this machine may run in another directory."""

    def locate(uri: str) -> str:
        return str(Path(uri).absolute()) if "://" not in uri and Path(uri).exists() else uri

    features = {
        name: feature.model_copy(update={"join": feature.join.model_copy(update={"uri": locate(feature.join.uri)})})
        if feature.join is not None and Path(feature.join.uri).parent != Path(".")
        else feature
        for name, feature in dataset.features.items()
    }
    graphs = {
        name: graph.model_copy(update={"uri": locate(graph.uri)}) if Path(graph.uri).parent != Path(".") else graph
        for name, graph in dataset.graphs.items()
    }
    items = dataset.items
    if items is not None and Path(items.uri).parent != Path("."):
        items = items.model_copy(update={"uri": locate(items.uri)})
    return dataset.model_copy(
        update={"uri": locate(dataset.uri), "features": features, "items": items, "graphs": graphs}
    )


@datasets.command("infer")
def infer_dataset(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file or directory in any dataset format.")],
    name: Annotated[str | None, typer.Option(help="The dataset's name (default: from the file's name).")] = None,
    items: Annotated[
        str | None, typer.Option("--items", metavar="FILE", help="A file with one row per item: the item table.")
    ] = None,
    job: Annotated[bool, typer.Option("--job", help="Also propose a job that trains on it and publishes.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Propose a dataset for a file, as YAML to review and save. Contacts no service."""
    from trainer.data.sources.infer import as_yaml, job_as_yaml, job_of, propose

    proposal = propose(file, name=name, items=items)
    if as_json:
        output.print_json(proposal.document)
        for note in proposal.notes:
            typer.echo(note, err=True)
    else:
        text = as_yaml(proposal.document, proposal.notes)
        typer.echo(text + job_as_yaml(job_of(proposal), proposal.document) if job else text, nl=False)


@datasets.command("get")
def get_dataset(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="ml1m, epinions, amazon_beauty, amazon_sports or gowalla.")
    ],
    to: Annotated[Path, typer.Option(help="The folder to write the Parquet files to.")] = Path("data"),
    downloaded: Annotated[
        Path | None, typer.Option("--from", help="A folder with the publisher's files, to use instead of a download.")
    ] = None,
) -> None:
    """Fetch a public data set from its publisher, for examples and recipes. Contacts no service."""
    from trainer.data.published.download import get

    get(name, to, downloaded, told=typer.echo)


@datasets.command("list")
def list_datasets(as_json: JsonFlag = False) -> None:
    """List registered datasets."""
    listed = ask(Client.datasets)
    columns = output.headings("name", "uri", "features")
    empty = "no datasets yet: register one with `evenkeel datasets add FILE.yaml`"
    rows = [{**dataset, "features": list(dataset.get("features") or ())} for dataset in listed]
    output.print_list(listed, columns, empty, as_json, rows)


@datasets.command("profile")
def profile(name: Name, as_json: JsonFlag = False) -> None:
    """Show a dataset's statistics: rows, distinct ids, label rate."""
    output.print_document(ask(Client.profile, name), as_json)


@datasets.command("delete")
def delete_dataset(name: Name) -> None:
    """Remove a dataset from the registry; its files and the jobs that used it stay."""
    ask(Client.delete_dataset, name)
    typer.echo(f"dataset {name} deleted")


def generate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the date=YYYY-MM-DD/ folders to.")],
    churn: Annotated[
        bool,
        typer.Option("--churn", help="Imitate a news site: items live for two days, and half of them get one click."),
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows over all days.")] = 200_000,
    days: Annotated[int, typer.Option(min=1, help="Number of days.")] = 14,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same log.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Write a synthetic click log with a known true model, partitioned by date, to try the service with.

    Without --churn, each row contains the true probability of its click and the cluster of its item. With --churn, the
    true vectors of items and users are in OUT/_truth, a folder that readers of the log skip.
    """
    from trainer.data.sources.click_log import ClickLog
    from trainer.data.sources.click_log import generate as generate_clicks
    from trainer.data.sources.news_log import NewsLog, generate_news

    try:
        if churn:
            news = NewsLog(num_rows=rows, num_days=days, seed=seed)
            paths, users, items = generate_news(news, out), news.num_users, news.num_items
        else:
            log = ClickLog(num_rows=rows, num_days=days, seed=seed)
            paths, users, items = generate_clicks(log, out), log.num_users, log.num_items
    except ValueError as error:
        raise CommandError(str(error), "use more --rows or fewer --days") from None
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror or error}", "name a folder that you can write to") from None
    answer = {"uri": str(out), "rows": rows, "days": len(paths), "users": users, "items": items, "first": str(paths[0])}
    output.print_answer(answer, f"{rows:,} rows, {users:,} users, {items:,} items: {paths[0]} ... {paths[-1]}", as_json)
