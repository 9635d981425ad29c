"""CLI command that writes synthetic click logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli import output
from service.cli.output import CommandError, JsonFlag


def register(app: typer.Typer) -> None:
    app.command()(generate)


def generate(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write date=YYYY-MM-DD/ to.")],
    churn: Annotated[
        bool, typer.Option("--churn", help="As of a news site: items live for two days, half have one click.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows over all days.")] = 200_000,
    days: Annotated[int, typer.Option(min=1, help="Days.")] = 14,
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same log.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Write a synthetic click log, partitioned by date, to try the service with; its truth is known.

    Without --churn each row has the true probability of its click and its item's cluster. With it the true vectors of
    items and users are in OUT/_truth, which readers of the log pass over.
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
        raise CommandError(str(error), "give more --rows, or fewer --days") from None
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror or error}", "name a folder that can be written") from None
    answer = {"uri": str(out), "rows": rows, "days": len(paths), "users": users, "items": items, "first": str(paths[0])}
    output.print_answer(answer, f"{rows:,} rows, {users:,} users, {items:,} items: {paths[0]} ... {paths[-1]}", as_json)
