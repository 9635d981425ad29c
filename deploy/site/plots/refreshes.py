"""Plots of refreshes: their effect on a frozen consumer, and the verdicts of the gate."""

from __future__ import annotations

from typing import Any

from deploy.site.plots.charts import bars, reference
from deploy.site.plots.figure import BLUE, GREY, RED, SKY, panels
from deploy.site.plots.tables import Measured, Table

SERVED = {"not aligned": RED, "aligned": SKY, "aligned, averaged": BLUE}


def frozen_consumer(table: Table) -> Any:
    kinds = {
        "warm": "refreshed from\na warm start",
        "from scratch": "retrained from scratch,\nanother seed each day",
        "anchor of .02 and frozen context": "the same, with anchor\nand frozen context",
    }
    figure, (kept, flips) = panels(2, 3.6, share_y=True)
    for axes, column in ((kept, "of day 0"), (flips, "flips per day")):
        series: dict[str, tuple[str, list[Measured | None]]] = {
            served: (colour, [Measured(table.numbers(f"{kind} / {served}", column)[0]) for kind in kinds])
            for served, colour in SERVED.items()
        }
        bars(axes, list(kinds.values()), series, form="{:g} %")
    kept.set(xlabel="accuracy of the frozen model, % of day 0's")
    reference(kept, 100, "day 0")
    flips.set(xlabel="predictions that flip in a day, %")
    figure.legend(*kept.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def random_fourier_features(one: Table, two: Table) -> Any:
    figure, places = panels(2, 2.9, share_y=True)
    rows = ["h_32", "phi_32", "phi_64"]
    names = ["vectors (h_32)", "features (phi_32)", "features (phi_64)"]
    for axes, table, own, label in (
        (places[0], one, "accuracy", "accuracy of a movie's first genre, in %"),
        (places[1], two, "recall@5", "recall@5 of the next item, in %"),
    ):
        columns = {
            "fitted on the run": (own, GREY),
            "frozen": ("frozen", RED),
            "frozen, runs aligned": ("frozen, others aligned", BLUE),
        }
        series: dict[str, tuple[str, list[Measured | None]]] = {
            name: (colour, [table.measured(row, column) for row in rows]) for name, (column, colour) in columns.items()
        }
        bars(axes, names, series, form="{:.1f}")
        axes.set(xlabel=label)
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def news_days_consumer(table: Table) -> Any:
    figure, (axes,) = panels(1, 3.4)
    names = {
        "often, ungated": "refreshed every three hours",
        "daily": "refreshed daily",
        "retrained, aligned": "from scratch, aligned",
        "retrained": "from scratch",
    }
    columns = {"audience, frozen": ("fitted on day 3 alone", BLUE), "audience, refitted": ("fitted each day", GREY)}
    series: dict[str, tuple[str, list[Measured | None]]] = {
        name: (colour, [table.measured(row, column) for row in names]) for column, (name, colour) in columns.items()
    }
    bars(axes, list(names.values()), series, form="{:.2f}")
    axes.set(xlabel="AUC of who reads an article, days 5 to 16", xlim=(0, 0.85))
    reference(axes, 0.5, "chance")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure
