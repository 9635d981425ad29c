"""Plots of times, alone and compared with those of other libraries."""

from __future__ import annotations

from typing import Any

from deploy.site.plots.charts import bars, dots, parts
from deploy.site.plots.figure import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, panels
from deploy.site.plots.tables import Measured, Table


def hosts(table: Table) -> Any:
    figure, (axes,) = panels(1, 2.0)
    series: dict[str, tuple[str, list[Measured | None]]] = {
        "median": (BLUE, [Measured(table.numbers(row, "step")[0]) for row in table.rows]),
        "best": (SKY, [Measured(table.numbers(row, "step")[1]) for row in table.rows]),
    }
    bars(axes, list(table.rows), series)
    axes.set(xlabel="a step of two ranks, ms")
    axes.legend(loc="upper right")
    return figure


def exchanges(table: Table) -> Any:
    figure, (axes,) = panels(1, 2.8)
    sizes = [f"{row} bytes" if row.isdigit() else row for row in table.rows]
    axes.set(yscale="log")
    for name, column, colour in (("gloo", "gloo, wall ms", RED), ("shared memory", "shared memory, wall", BLUE)):
        times = [table.numbers(row, column)[0] for row in table.rows]
        axes.plot(sizes, times, "o-", color=colour, markersize=4)
        axes.annotate(name, (sizes[-1], times[-1]), (8, 0), textcoords="offset points", va="center", color=colour)
    axes.set_yticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
    axes.minorticks_off()
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.set(xlabel="to the other rank", ylabel="best of 60, ms (logarithmic)")
    return figure


def job_start(table: Table) -> Any:
    named = {"queue": GREY, "process": ORANGE, "prepare": GREEN, "Ray": RED, "workers": PINK, "build": BLACK,
             "first step": SKY, "publish": BLUE}  # fmt: skip
    series = {
        part: (colour, [table.numbers(row, part)[0] if table.cell(row, part) else 0.0 for row in table.rows])
        for part, colour in named.items()
    }
    figure, (axes,) = panels(1, 2.5)
    labels = [
        row.replace(" / before", ": a Ray cluster for each run").replace(" / after", ": forked") for row in table.rows
    ]
    parts(axes, labels, series, form="{:.1f} s")
    axes.set(xlabel="seconds of the parts that are timed")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=8, columnspacing=1.0, handlelength=1.0
    )
    return figure


def preparation(table: Table) -> Any:
    rows = {
        "preparation, to the last fsync": "preparation, all of it",
        "polars, coding alone": "polars, coding alone",
    }
    figure, places = panels(3, 1.6, share_y=True)
    for axes, column, label in zip(
        places, ("seconds", "processor seconds", "anonymous memory"),
        ("seconds", "processor seconds", "anonymous memory, MiB"), strict=True,
    ):  # fmt: skip
        figures: list[Measured | None] = [Measured(table.numbers(row, column)[0]) for row in rows]
        bars(axes, list(rows.values()), {column: (BLUE, figures)}, form="{:,g}", colours=[BLUE, RED])
        axes.set(xlabel=label)
    return figure


def feature_store(table: Table) -> Any:
    rows = {
        "get 1000 random ids, embedded, p50 (on an EPYC, three runs)": "embedded",
        "get 1000 random ids, Redis, p50 (--case redis, 2026-11-30, on an EPYC)": "Redis",
    }
    figure, (axes,) = panels(1, 2.3)
    series = {}
    for name, column, colour, marker in (
        ("Evenkeel", "ours", BLUE, "o"),
        ("LMDB, embedded", "LMDB", RED, "s"),
        ("SQLite, embedded", "SQLite", ORANGE, "D"),
    ):
        found = []
        for row in rows:
            text = table.cell(row, column)
            # The figure in brackets is the best of a run, the others are medians of runs.
            medians = len(text.partition("(")[0].split(",")) if text else 0
            found.append([Measured(value) for value in table.numbers(row, column)[:medians]] if text else [])
        series[name] = (colour, marker, found)
    dots(axes, list(rows.values()), series)
    axes.set(xlabel="1000 random ids of a million x 128, p50 of each run, ms", xlim=(0, None))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def event_loop(table: Table) -> Any:
    figure, (axes,) = panels(1, 2.4)
    series = {
        name: (colour, marker, [[Measured(value) for value in table.numbers(row, name)] for row in table.rows])
        for name, colour, marker in (("p50", BLUE, "o"), ("p99", ORANGE, "s"))
    }
    dots(axes, list(table.rows), series)
    axes.set(xlabel="a fetch of 100 ids at 300 requests a second, two runs, ms", xlim=(0, None))
    axes.legend(loc="lower right")
    return figure
